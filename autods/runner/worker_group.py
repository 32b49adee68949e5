"""The nodes that run a fit's trials: chosen, started, given jobs, and replaced when lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.settings import Settings
from ..errors import EnvironmentBroken
from ..events import Event, Note
from ..system import processes
from ..system.host import read_hardware
from ..trial.job import RankJob
from .agent import NodeAgent, digest_file
from .placement import (
    Cluster,
    Need,
    NodeDescription,
    NodeState,
    RayCluster,
    Spot,
    check_same_software,
    describe_gpu_differences,
    reserve_nodes,
)
from .protocol import Heartbeat, LoadFailed, NodeLost, NodeReport, NodeResult, Ready, StoreBound, ZygoteDied
from .ray_connect import format_ray_error, session

POLL_S = 0.25
SILENT_S = 30.0  # a node whose agent does not answer for so long is lost
ABORTED_S = 5.0  # a node that was told to end a job has ended it by then, or is lost
STUCK_GRACE_S = 1.5  # after the first stuck node: time for the others to report which rank makes the others wait
STOP_S = 10.0
_ABORT_AGAIN_S = 0.5
_HEAD_EVERY_S, _HEAD_ANSWERS_S = 5.0, 10.0
OnProgress = Callable[[Heartbeat], None]
CheckReady = Callable[[Ready | LoadFailed | ZygoteDied], None]


@dataclass(slots=True, eq=False)
class Node:
    """One node and its agent.

    `ahead_s` is how far its monotonic clock is ahead of ours.
    `lost` is the reason that the node is not used again.
    """

    state: NodeState
    agent: Any  # the Ray actor of a NodeAgent
    ahead_s: float = 0.0
    lost: str | None = None

    @property
    def address(self) -> str:
        """Its address in the cluster."""
        return self.state.address


class WorkerGroup:
    """A context manager: Ray, the agents and their zygotes live inside it. `run` executes one job.

    `check_ready` gets the report of each zygote that has loaded everything. It raises when the zygote is of no use.
    `room_within_s` is how long other users of the cluster may hold the resources; None waits for ever.
    """

    def __init__(
        self,
        settings: Settings,
        listen: Callable[[Event], None],
        *,
        environment: Mapping[str, str],
        check_ready: CheckReady,
        room_within_s: float | None = None,
    ) -> None:
        self.settings, self.listen, self.environment = settings, listen, environment
        self.check_ready, self.room_within_s = check_ready, room_within_s
        self.built_ops: set[str] = set()  # DeepSpeed ops that all nodes have loaded
        self.nodes: list[Node] = []
        self.descriptions: Sequence[NodeDescription] = ()  # of somebody's cluster
        self.cluster: Cluster | None = None
        self.ray: Any = None
        self.head: str | None = None  # HOST:PORT of the head of somebody's cluster
        self._placement_group: Any = None
        self._job_numbers = itertools.count(1)
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> WorkerGroup:
        with contextlib.ExitStack() as stack:
            self.ray = stack.enter_context(session(cpus=max(2, os.cpu_count() or 2), address=self.settings.address))
            self.cluster = RayCluster(self.ray)
            stack.callback(self.stop)
            self.start()
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    @property
    def hosts(self) -> frozenset[str]:
        """Addresses of the nodes' machines."""
        return frozenset(node.address for node in self.nodes)

    @property
    def host_bytes(self) -> int | None:
        """Host memory of the node that has least; None for a Ray of our own."""
        return min((node.hardware.host_bytes for node in self.descriptions), default=None)

    @property
    def host_free_bytes(self) -> int:
        """Free host memory of the node that had least when it was chosen; of this machine now for a Ray of our own."""
        return (
            min((node.hardware.host_free_bytes for node in self.descriptions), default=None)
            or read_hardware().host_free_bytes
        )

    def start(self) -> None:
        """Reserve nodes, start an agent on each, and wait until their zygotes have loaded everything.

        Raises EnvironmentBroken when the cluster can never hold the ranks or its nodes do not go together, NoRoom when
        it does not hold them in time.
        """
        ray, settings, need = self.ray, self.settings, Need.of_settings(self.settings)
        assert self.cluster is not None
        context = ray.get_runtime_context()
        self.head = context.gcs_address if settings.address is not None else None
        self._placement_group, spots = reserve_nodes(
            self.cluster, need, report=self._note, first=context.get_node_id(), within_s=self.room_within_s
        )
        try:
            self.nodes = [Node(spot.node, self._start_agent(spot, need, number)) for number, spot in enumerate(spots)]
            if settings.address is not None:
                self._check_nodes(spots)
            if len(self.nodes) > 1:
                self.read_clocks()
            for ready in ray.get([node.agent.start.remote() for node in self.nodes]):
                self.check_ready(ready)
        except ray.exceptions.RayActorError as error:
            self.stop()
            raise EnvironmentBroken(f"a Ray actor died before its first trial: {format_ray_error(error)}") from None
        except BaseException:
            self.stop()
            raise

    def run(
        self, job: RankJob, on_progress: OnProgress = lambda heartbeat: None, *, everywhere: bool = False
    ) -> list[NodeResult]:
        """Execute the job; return the result of each node that has a part in it.

        `on_progress` gets the heartbeat of the slowest rank.
        With `everywhere` every node does the whole job by itself, else its ranks are split over the nodes.
        Raises EnvironmentBroken when the cluster's head or our only node is gone.
        """
        self._replace_lost()
        self.check_head()
        if everywhere:
            parts = repeat_job(job, self.nodes)
        else:
            port = None
            if job.world_size > self.settings.ranks_per_node:
                store = self._bind_store()
                if not isinstance(store, StoreBound):
                    return [store]
                port = store.port
            parts = split_job(job, self.nodes, self.settings.ranks_per_node, port)
        with _shared_folders(parts):
            results = self.execute(parts, on_progress)
        lost = next((node for node in self.nodes if node.lost is not None), None)
        if lost is not None and self.settings.address is None:
            raise EnvironmentBroken(f"the Ray actor of this node died: {lost.lost}")
        return results

    def execute(
        self, parts: Sequence[tuple[Node, RankJob]], on_progress: OnProgress = lambda heartbeat: None
    ) -> list[NodeResult]:
        """Run each part on its node until all have ended; when one fails, the others are ended."""
        execution = JobExecution(self, next(self._job_numbers), on_progress)
        for node, job in parts:
            execution.begin(node, job)
        while execution.pending:
            execution.poll()
        execution.finish()
        return [execution.results[node] for node, _ in parts]

    def needs_build(self, ops: Sequence[str]) -> bool:
        """Whether one of these DeepSpeed ops has to be built on any node."""
        self._replace_lost()
        return bool(ops) and any(self.ray.get([node.agent.find_unbuilt.remote(list(ops)) for node in self.nodes]))

    def stop(self) -> None:
        """End all ranks, then the zygotes, then the agents, and give the reservation back. Ray itself stays."""
        nodes, self.nodes = self.nodes, []
        for method, within_s in (("abort", 1.0), ("stop", STOP_S)):
            with contextlib.suppress(Exception):  # Ray may be going down already; who is late is killed below
                calls = [getattr(node.agent, method).remote() for node in nodes if node.lost is None]
                self.ray.get(calls, timeout=within_s)
        try:
            self.check_head()
        except EnvironmentBroken:
            return  # nobody is there to take the rest back
        for node in nodes:
            with contextlib.suppress(Exception):
                self.ray.kill(node.agent)
        group, self._placement_group = self._placement_group, None
        if group is not None and self.cluster is not None:
            with contextlib.suppress(Exception):
                self.cluster.free(group)

    def read_clocks(self) -> None:
        """Find out how far each node's monotonic clock is ahead, so that causes can be sorted by time."""

        def measure(node: Node) -> tuple[float, float]:
            began = time.monotonic()
            clock = float(self.ray.get(node.agent.read_clock.remote()))
            ended = time.monotonic()
            return ended - began, clock - (began + ended) / 2

        for node in self.nodes:
            node.ahead_s = min(measure(node) for _ in range(3))[1]  # the quickest answer is the most exact

    def check_head(self) -> None:
        """Raise EnvironmentBroken when the cluster's head is gone. Ray would end this process a minute later."""
        if self.head is None:
            return
        host, _, port = self.head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _HEAD_ANSWERS_S).close()
        except OSError as error:
            raise EnvironmentBroken(
                f"the head of the Ray cluster at {self.head} is gone: {str(error.strerror or error).lower()}\n"
                "  start Ray again, `ray start --head` first, and the same command continues"
            ) from None

    def take_result(self, node: Node, reference: Any) -> NodeResult:
        """Read the result of an agent's `run`, with times on our clock."""
        try:
            result: NodeResult = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError:
            raise  # an error in our own code
        except self.ray.exceptions.ActorUnavailableError:
            return lose_node(node, "the connection to its agent broke")
        except self.ray.exceptions.RayError as error:
            return lose_node(node, format_ray_error(error))
        return result.on_driver_clock(node.ahead_s) if isinstance(result, NodeReport) else result

    def _note(self, text: str) -> None:
        self.listen(Note(text=text))

    def _replace_lost(self) -> None:
        """Choose nodes again where one was lost. Raises EnvironmentBroken where too few are left."""
        lost = next((node for node in self.nodes if node.lost is not None), None)
        if lost is not None:
            self._note(f"node {lost.address} was lost ({lost.lost}); the ranks are placed on the remaining nodes")
            self.stop()
            self.built_ops.clear()  # a new node may not have them
            self.start()

    def _start_agent(self, spot: Spot, need: Need, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        log = f"{_path_of_node(str(self.settings.out / 'logs' / 'zygote'), number)}.log"
        actor = self.ray.remote(
            num_cpus=need.cpus,
            num_gpus=need.gpus,
            max_concurrency=3,  # `progress` and `abort` must get through while `run` waits for the ranks
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._placement_group, placement_group_bundle_index=spot.bundle
            ),
        )(NodeAgent)
        return actor.remote(
            self.settings.source, self.settings.device, os.getpid(), processes.machine_id(), log, dict(self.environment)
        )

    def _check_nodes(self, spots: Sequence[Spot]) -> None:
        """Check that the nodes of somebody's cluster can run ranks of one job. Raises EnvironmentBroken."""
        self.descriptions = self.ray.get([node.agent.describe.remote() for node in self.nodes])
        check_same_software(self.descriptions, spots)
        if (difference := describe_gpu_differences(self.descriptions, spots)) is not None:
            self._note(difference)
        self._check_shared_files()
        addresses = ", ".join(node.address for node in self.nodes)
        self._note(
            f"{self.settings.ranks_per_node} ranks on each of {addresses}; workload and results are in folders that "
            "they share, the package came through Ray's runtime_env"
        )

    def _check_shared_files(self) -> None:
        """Check that every node sees the workload, the results and the swap folder at the same place."""
        settings = self.settings
        logs = settings.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        mark = logs / f".shared-{secrets.token_hex(4)}"  # another fit may check at the same time
        mark.write_text(secrets.token_hex(16))
        files = {path: digest for path in (str(mark), settings.source.path) if (digest := digest_file(path))}
        folders = [str(path) for path in (settings.out, settings.source.folder, settings.nvme_path) if path is not None]
        try:
            answers = self.ray.get([node.agent.find_missing.remote(files, folders) for node in self.nodes])
        finally:
            mark.unlink(missing_ok=True)
        for node, missing in zip(self.nodes, answers, strict=True):
            if not missing:
                continue
            path = str(settings.out) if missing[0] == str(mark) else missing[0]
            if settings.nvme_path is not None and path == str(settings.nvme_path):
                raise EnvironmentBroken(f"{node.address} has no folder {path} that can be written\n  make it there")
            raise EnvironmentBroken(
                f"{node.address} does not see {path} as this machine does\n"
                "  the workload and --out have to lie in a folder that all nodes share, at the same place"
            )

    def _bind_store(self) -> StoreBound | NodeResult:
        """A port for the rendezvous of the next job, on the first node; or the reason that there is none."""
        first = self.nodes[0]
        reference = first.agent.bind_store.remote(first.address)
        done, _ = self.ray.wait([reference], timeout=SILENT_S * 2)  # it may have to start another zygote
        return self.take_result(first, reference) if done else lose_node(first, "it does not answer")


def lose_node(node: Node, how: str) -> NodeLost:
    """Do not use the node again."""
    node.lost = how
    return NodeLost(address=node.address, how=how)


@dataclass(slots=True)
class JobExecution:
    """One job while it runs on its nodes. `begin` each part, `poll` while some are pending, `finish`."""

    group: WorkerGroup
    number: int
    on_progress: OnProgress
    pending: dict[Any, Node] = field(default_factory=dict)  # by the reference of the agent's `run`
    results: dict[Node, NodeResult] = field(default_factory=dict)
    heartbeats: dict[Node, Heartbeat] = field(default_factory=dict)
    progress_calls: dict[Node, Any] = field(default_factory=dict)  # references that have no answer yet
    answered_s: dict[Node, float] = field(default_factory=dict)
    abort_calls: list[Any] = field(default_factory=list)
    abort_from_s: float | None = None  # when the nodes that still run are ended; None: all is well
    aborted_s: float = 0.0
    head_checked_s: float = field(default_factory=time.monotonic)

    def begin(self, node: Node, job: RankJob) -> None:
        """Start a part."""
        self.pending[node.agent.run.remote(job, self.number)] = node
        self.answered_s[node] = time.monotonic()

    def poll(self) -> None:
        """Wait a little, take results, read heartbeats, find lost nodes, end the others where one failed."""
        done, _ = self.group.ray.wait(list(self.pending), num_returns=1, timeout=POLL_S)
        for reference in done:
            node = self.pending.pop(reference)
            self._record(node, self.group.take_result(node, reference))
        self._read_heartbeats()
        now = time.monotonic()
        if now - self.head_checked_s > _HEAD_EVERY_S:
            self.head_checked_s = now
            self.group.check_head()
        for reference, node in list(self.pending.items()):
            if now - self.answered_s[node] > SILENT_S:
                self._give_up(reference, node, f"it has not answered for {SILENT_S:.0f} s")
            elif self.abort_from_s is not None and now - self.abort_from_s > ABORTED_S:
                self._give_up(reference, node, "it did not end the trial when it was told to")
        # Told again until they have ended: the first call may come before their zygote has the job.
        if self.abort_from_s is not None and now >= self.abort_from_s and now - self.aborted_s > _ABORT_AGAIN_S:
            self._abort_pending()

    def finish(self) -> None:
        """Wait for the answers to `abort`: none may meet the next job."""
        if self.abort_calls:
            self.group.ray.wait(self.abort_calls, num_returns=len(self.abort_calls), timeout=1.0)

    def _record(self, node: Node, result: NodeResult) -> None:
        self.results[node] = result
        is_well = isinstance(result, NodeReport) and result.succeeded
        if is_well or self.abort_from_s is not None:
            return
        is_stuck = isinstance(result, NodeReport) and result.killed_because in ("stuck", "wall limit")
        self.abort_from_s = time.monotonic() + (STUCK_GRACE_S if is_stuck else 0.0)
        if not is_stuck:
            self._abort_pending()

    def _give_up(self, reference: Any, node: Node, how: str) -> None:
        del self.pending[reference]
        self._record(node, lose_node(node, how))

    def _abort_pending(self) -> None:
        self.aborted_s = time.monotonic()
        self.abort_calls = [node.agent.abort.remote(self.number) for node in self.pending.values()]

    def _read_heartbeats(self) -> None:
        """Ask each agent for its heartbeat without waiting for the answer."""
        has_news = False
        for node in self.pending.values():
            reference = self.progress_calls.get(node)
            if reference is not None:
                done, _ = self.group.ray.wait([reference], timeout=0)
                if not done:
                    continue
                del self.progress_calls[node]
                with contextlib.suppress(self.group.ray.exceptions.RayError):
                    self.heartbeats[node] = self.group.ray.get(reference)
                    self.answered_s[node], has_news = time.monotonic(), True
            self.progress_calls[node] = node.agent.progress.remote()
        if has_news:
            self.on_progress(min(self.heartbeats.values(), key=lambda heartbeat: heartbeat.step))


def repeat_job(job: RankJob, nodes: Sequence[Node]) -> list[tuple[Node, RankJob]]:
    """Let every node do the whole job by itself, each in a separate folder."""
    scratch = job.scratch.removeprefix(job.folder)
    folders = [_path_of_node(job.folder, number) for number in range(len(nodes))]
    return [
        (node, replace(job, folder=folder, scratch=f"{folder}{scratch}"))
        for node, folder in zip(nodes, folders, strict=True)
    ]


def split_job(job: RankJob, nodes: Sequence[Node], ranks_per_node: int, port: int | None) -> list[tuple[Node, RankJob]]:
    """Give each node consecutive ranks. A job that fits on one node stays whole.

    `port` is that of the rendezvous on the first node.
    """
    if job.world_size <= ranks_per_node:
        return [(nodes[0], job)]
    parts = []
    for number, node in enumerate(nodes):
        ranks = range(number * ranks_per_node, min((number + 1) * ranks_per_node, job.world_size))
        if not ranks:
            break
        part = replace(
            job,
            local_ranks=tuple(ranks),
            node_rank=number,
            node_address=node.address,
            master_address=nodes[0].address,
            master_port=port,
            checkpoints=f"{job.folder}/checkpoints",
            scratch=_path_of_node(job.scratch, number),
        )
        if job.swap is not None:
            swap = _path_of_node(job.swap, number)
            part = replace(part, swap=swap, ds_config=_replace_path(job.ds_config, job.swap, swap))
        parts.append((node, part))
    return parts


def _path_of_node(path: str, number: int) -> str:
    """A path for that node alone: several nodes may be one machine or share a folder. The first gets `path` itself."""
    return path if number == 0 else f"{path}-node{number}"


def _replace_path(config: Any, path: str, other: str) -> Any:
    """The config with every value `path` replaced by `other`."""
    if isinstance(config, Mapping):
        return {key: _replace_path(value, path, other) for key, value in config.items()}
    return other if config == path else config


@contextlib.contextmanager
def _shared_folders(parts: Sequence[tuple[Node, RankJob]]) -> Iterator[None]:
    """Make and remove the folder of a checkpoint that all ranks write: no single node may do so."""
    folders = {job.checkpoints for _, job in parts if job.checkpoints is not None}
    try:
        for folder in folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
