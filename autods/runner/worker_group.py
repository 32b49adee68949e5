"""The nodes that run a fit's trials: chosen, started, given jobs, and replaced when lost."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.settings import Settings
from ..devices import Health
from ..errors import EnvironmentBroken, make_write_error
from ..events import Event, Note
from ..rank.job import RankJob
from ..system import processes
from ..system.host import HostMemory, find_memory_groups, read_host_memory
from ..system.waiting import AGAIN_S, FIRST_S, MOST_LIMITS, Wait
from .agent import NodeAgent, digest_file
from .cleanup import session_variables
from .node_messages import Heartbeat, LoadFailed, NodeReport, NodeResult, Ready, StoreBound, ZygoteDied
from .parts import (
    MARGIN_S,
    SILENT_S,
    Node,
    RunningPart,
    await_each_other,
    join_heartbeats,
    measure_clock,
    path_of_node,
    repeat_job,
    split_job,
)
from .placement import Need, NodeDescription, RayCluster, check_same_software, describe_gpu_differences, reserve_nodes
from .ray_connect import find_head_problem, format_ray_error, session
from .silence import is_own_code

POLL_S = 0.25
RUN_POLL_S = 0.5  # of a run, which lasts for days
STUCK_GRACE_S = 1.5  # after the first stuck node: time for the others to report which rank makes the others wait
STOP_S = 3.0  # a longer wait for the nodes' last ranks is reported
_ABORT_AGAIN_S = 0.5
_HEAD_EVERY_S = 5.0
_CLOCKS_EVERY_S, _CLOCK_S = 3600.0, 2.0  # clocks of two machines drift by milliseconds an hour, by seconds in weeks
_LOCATED_S = 4.0  # an agent reads the zygote's stack in less
OnProgress = Callable[[Heartbeat], None]


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
        check_ready: Callable[[Ready | LoadFailed | ZygoteDied], None],
        room_within_s: float | None = None,
    ) -> None:
        self.settings, self.listen, self.environment = settings, listen, environment
        self.check_ready, self.room_within_s = check_ready, room_within_s
        self.built_ops: set[str] = set()  # DeepSpeed ops that all nodes have loaded
        self.nodes: list[Node] = []
        self.descriptions: Sequence[NodeDescription] = ()  # of somebody's cluster
        self.cluster: RayCluster | None = None
        self.ray: Any = None
        self.head: str | None = None  # HOST:PORT of the head of the cluster
        self._placement_group: Any = None
        self._end_s = 0.0  # that the ranks of the last job may take to end
        self._silence_reported_s = -math.inf
        self._job_numbers = itertools.count(1)
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> WorkerGroup:
        with contextlib.ExitStack() as stack:
            cpus = max(2, os.cpu_count() or 2)
            self.ray = stack.enter_context(session(cpus=cpus, address=self.settings.address))
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
    def host_memory(self) -> HostMemory:
        """The least total and free host memory of a node: when it was chosen, or now for a Ray of our own."""
        machines = [node.hardware for node in self.descriptions]
        if not machines:
            return read_host_memory(find_memory_groups())
        return HostMemory(
            total_bytes=min(machine.host_bytes for machine in machines),
            free_bytes=min(machine.host_free_bytes for machine in machines),
        )

    def start(self) -> None:
        """Reserve nodes, start an agent on each, and wait until their zygotes have loaded everything.

        Raises EnvironmentBroken when the cluster can never hold the ranks or its nodes do not go together, NoRoom when
        it does not hold them in time.
        """
        need = Need.of_settings(self.settings)
        assert self.cluster is not None
        context = self.ray.get_runtime_context()
        is_shared = self.settings.address is not None
        self.head = context.gcs_address
        self._placement_group, places = reserve_nodes(
            self.cluster, need, report=self._note, first=context.get_node_id(), within_s=self.room_within_s
        )
        try:
            self.nodes = [
                Node(place.address, self._start_agent(bundle, need, number))
                for number, (bundle, place) in enumerate(places.items())
            ]
            if is_shared:
                self._check_nodes()
            if len(self.nodes) > 1:
                self.read_clocks()
            load_s = MOST_LIMITS * self.settings.profile.limits.init_s
            loading = "loading torch, DeepSpeed and the workload"
            for ready in self._call(lambda node: node.agent.start.remote(), loading, within_s=load_s):
                self.check_ready(ready)
        except BaseException:
            self.stop()
            raise

    def run(
        self, job: RankJob, on_progress: OnProgress = lambda heartbeat: None, *, everywhere: bool = False
    ) -> list[NodeResult]:
        """Execute the job; return the result of each node that has a part in it.

        `on_progress` gets the heartbeat of the slowest rank, with the fullest node of each tier.
        With `everywhere` every node does the whole job by itself, else its ranks are split over the nodes.
        Raises EnvironmentBroken when the cluster's head or our only node is gone.
        """
        self.replace_lost()
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
        # The ranks of all nodes use the same folder: no single node may make or remove it.
        folders = {part.shared for _, part in parts if part.shared is not None}
        try:
            for folder in folders:
                _make_folder(Path(folder))
            results = self.execute(parts, on_progress)
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        lost = self._find_lost()
        if lost is not None and self.settings.address is None:
            raise EnvironmentBroken(f"the Ray actor of this node was lost: {lost.lost}")
        return results

    def execute(
        self, parts: Sequence[tuple[Node, RankJob]], on_progress: OnProgress = lambda heartbeat: None
    ) -> list[NodeResult]:
        """Run each part on its node until all have ended; when one fails, the others are ended."""
        number, began = next(self._job_numbers), time.monotonic()
        running = [
            RunningPart.of_job(node, job, node.agent.run.remote(job, number), self._watch_silence(node))
            for node, job in parts
        ]
        self._end_s = max(job.end_s for _, job in parts)
        abort_calls: list[Any] = []
        abort_from_s, aborted_s = math.inf, -math.inf  # infinite: all is well; no node was told to end
        head_checked_s = clocks_read_s = began
        gave_up = False
        is_run = all(job.job == "run" for _, job in parts)
        while pending := [part for part in running if part.result is None]:
            poll_s = RUN_POLL_S if is_run and abort_from_s == math.inf else POLL_S
            done, _ = self.ray.wait([part.run for part in pending], num_returns=1, timeout=poll_s)
            if self._read_heartbeats(pending):
                beats = [part.heartbeat for part in running if part.heartbeat is not None]
                on_progress(join_heartbeats(running))
                self._report_silence(parts[0][1], beats)
                if not gave_up and await_each_other(running, parts[0][1]):
                    gave_up = True
                    for part in running:
                        part.node.agent.give_up.remote(number)
            now = time.monotonic()
            if now - head_checked_s > _HEAD_EVERY_S:
                head_checked_s = now
                self.check_head()
            if now - clocks_read_s > _CLOCKS_EVERY_S:
                clocks_read_s = now
                self._read_clocks_again()
            for part in pending:
                if part.run in done:
                    part.result = self.take_result(part.node, part.run)
                elif (how := part.find_loss(abort_from_s)) is not None:
                    part.result = part.node.lose(how)
                else:
                    continue
                report = part.result if isinstance(part.result, NodeReport) else None
                if abort_from_s == math.inf and (report is None or not report.succeeded):
                    is_stuck = report is not None and report.killed_because in ("stuck", "wall limit")
                    abort_from_s = now + (STUCK_GRACE_S if is_stuck else 0.0)
            # Told again until they have ended: the first call may come before their zygote has the job.
            if now >= abort_from_s and now - aborted_s > _ABORT_AGAIN_S:
                aborted_s = now
                abort_calls = [part.node.agent.abort.remote(number) for part in pending if part.result is None]
        if abort_calls:  # none may meet the next job
            self.ray.wait(abort_calls, num_returns=len(abort_calls), timeout=1.0)
        return [part.result for part in running if part.result is not None]

    def examine(self) -> list[tuple[str, Health]]:
        """Return the address of each node, '' for a single one, and the health of its devices."""
        self.replace_lost()
        ranks = self.settings.ranks_per_node
        healths = self._call(lambda node: node.agent.examine.remote(ranks), "looking at the devices")
        return [
            (node.address if len(self.nodes) > 1 else "", health)
            for node, health in zip(self.nodes, healths, strict=True)
        ]

    def needs_build(self, ops: Sequence[str]) -> bool:
        """Whether one of these DeepSpeed ops has to be built on any node."""
        self.replace_lost()
        if not ops:
            return False
        looking = "looking for DeepSpeed's ops"
        return any(self._call(lambda node: node.agent.find_unbuilt.remote(list(ops)), looking))

    def stop(self) -> None:
        """End all ranks and zygotes, then the agents, and give the reservation back. Ray itself stays."""
        nodes, self.nodes = self.nodes, []
        with contextlib.suppress(Exception):  # Ray may be going down already; who is late is killed below
            calls = [node.agent.stop.remote() for node in nodes if node.lost is None]
            _, late = self.ray.wait(calls, num_returns=len(calls), timeout=STOP_S)
            if late:
                within_s = self._end_s + 2 * MARGIN_S
                self._note(f"waiting until the ranks have ended and their files are removed, {within_s:.0f} s at most")
                _, late = self.ray.wait(late, num_returns=len(late), timeout=within_s)
            if late:
                self._note("some ranks have not ended: they may hold memory, and swap files may be left")
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

        def read(node: Node) -> float:
            return float(self._call(lambda node: node.agent.read_clock.remote(), "comparing clocks", [node])[0])

        for node in self.nodes:
            node.ahead_s = measure_clock(functools.partial(read, node))

    def _read_clocks_again(self) -> None:
        """Correct the drift of the clocks. A node that does not answer at once keeps what is known of its clock."""

        def read(node: Node) -> float:
            return float(self.ray.get(node.agent.read_clock.remote(), timeout=_CLOCK_S))

        for node in self.nodes if len(self.nodes) > 1 else ():
            with contextlib.suppress(self.ray.exceptions.RayError):
                node.ahead_s = measure_clock(functools.partial(read, node))

    def check_head(self) -> None:
        """Raise EnvironmentBroken when the cluster's head is gone. Ray would end this process a minute later."""
        if self.head is None or (reason := find_head_problem(self.head)) is None:
            return
        if self.settings.address is None:
            raise EnvironmentBroken(f"Ray's server on this machine is gone: {reason}\n  the same command continues")
        raise EnvironmentBroken(
            f"the head of the Ray cluster at {self.head} is gone: {reason}\n"
            "  start Ray again, `ray start --head` first, and the same command continues"
        )

    def take_result(self, node: Node, reference: Any) -> NodeResult:
        """Read the result of an agent's `run`, with times on our clock."""
        try:
            result: NodeResult = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            return node.lose(_find_machines_fault(error))
        except self.ray.exceptions.ActorUnavailableError:
            return node.lose("the connection to its agent broke")
        except self.ray.exceptions.RayError as error:
            return node.lose(format_ray_error(error))
        return result.on_driver_clock(node.ahead_s) if isinstance(result, NodeReport) else result

    def _call(
        self, call: Callable[[Node], Any], subject: str, nodes: Sequence[Node] | None = None, *, within_s: float = 0.0
    ) -> list[Any]:
        """Call the agent of each node, and return the answers; says what it waits for, and where that is.

        Raises EnvironmentBroken where a node does not answer in time, or its agent has died: that node is not used
        again. An agent may have to be started first.
        """
        limits = self.settings.profile.limits
        parts = [
            RunningPart(node, call(node), max(within_s, SILENT_S) + MARGIN_S, first_s=limits.init_s)
            for node in (self.nodes if nodes is None else nodes)
        ]
        clock = Wait(
            report=lambda waited_s: self._note_wait(f"{subject}: {waited_s:.0f} s so far{self._locate(parts)}")
        )
        while pending := [part for part in parts if part.result is None]:
            done, _ = self.ray.wait([part.run for part in pending], num_returns=1, timeout=POLL_S)
            self._read_heartbeats(pending)
            clock.look()
            for part in pending:
                how = self._read_answer(part) if part.run in done else part.find_loss()
                if how is not None:
                    part.node.lose(how)
                    raise EnvironmentBroken(
                        f"node {part.node.address} was lost while {subject}: {how}\n"
                        "  look for its `ray::NodeAgent` process: is it stopped, or does it wait for a file system?"
                    )
        return [part.result[0] for part in parts]

    def _read_answer(self, part: RunningPart) -> str | None:
        """Read the answer of a call that is done, as the part's result; return why there is none, if so."""
        try:
            part.result = (self.ray.get(part.run),)
        except self.ray.exceptions.RayTaskError as error:
            return _find_machines_fault(error)
        except self.ray.exceptions.RayError as error:
            return format_ray_error(error)
        return None

    def _locate(self, parts: Sequence[RunningPart]) -> str:
        """': in load_data, /x/model.py:7': where a node is that has not answered yet; '' where that is not known."""
        part = next((part for part in parts if part.result is None), None)
        if part is None or part.heartbeat is None:
            return ""
        with contextlib.suppress(self.ray.exceptions.RayError):
            place = str(self.ray.get(part.node.agent.locate.remote(), timeout=_LOCATED_S))
            return f": {place}" if place else ""
        return ""

    def _report_silence(self, job: RankJob, beats: Sequence[Heartbeat]) -> None:
        """Tell the user about ranks that do not move, after some seconds and once a minute."""
        silent_s, now = min(beat.silent_s for beat in beats), time.monotonic()
        if silent_s < FIRST_S or now - self._silence_reported_s < AGAIN_S:
            return
        self._silence_reported_s = now
        beat = next((beat for beat in beats if beat.place), beats[0])
        place = f", {beat.place}" if beat.place else ""
        limit_s = max(job.silence_s[beat.phase] for beat in beats)
        limit = f"they count as stuck after {limit_s:.0f} s"
        if any(is_own_code(job, beat.phase) for beat in beats):
            limit = "they count as stuck once none of them computes, moves bytes or waits for a disk or network"
        silence = f"no rank has moved for {silent_s:.0f} s, in {beat.phase}{place}"
        if job.job == "ops":  # a compiler moves no rank
            silence = f"compiling for {silent_s:.0f} s"
        self._note_wait(f"{Path(job.folder).name}: {silence}; {limit}")

    def _note(self, text: str) -> None:
        self.listen(Note(text=text))

    def _note_wait(self, text: str) -> None:
        self.listen(Note(text=text, passing=True))

    def _find_lost(self) -> Node | None:
        return next((node for node in self.nodes if node.lost is not None), None)

    def replace_lost(self) -> None:
        """Choose nodes again where one was lost. Raises EnvironmentBroken where too few are left."""
        if (lost := self._find_lost()) is not None:
            self._note(f"node {lost.address} was lost ({lost.lost}); the ranks are placed on the remaining nodes")
            self.stop()
            self.built_ops.clear()  # a new node may not have them
            self.start()

    def _start_agent(self, bundle: int, need: Need, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        log = f"{path_of_node(str(self.settings.out / 'logs' / 'zygote'), number)}.log"
        actor = self.ray.remote(
            **need.actor_options,
            # `progress`, `locate` and `abort` must get through while `run` waits for the ranks.
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._placement_group, placement_group_bundle_index=bundle
            ),
        )(NodeAgent)
        return actor.remote(
            self.settings.source,
            self.settings.device,
            os.getpid(),
            processes.machine_id(),
            log,
            {**self.environment, **session_variables()},
            self.settings.address is not None,
            self.settings.profile.limits.init_s,
        )

    def _check_nodes(self) -> None:
        """Check that the nodes of somebody's cluster can run ranks of one job. Raises EnvironmentBroken."""
        self.descriptions = self._call(
            lambda node: node.agent.describe.remote(node.address), "starting an agent on each node"
        )
        check_same_software(self.descriptions)
        if (difference := describe_gpu_differences(self.descriptions)) is not None:
            self._note(difference)
        self._check_shared_files()
        addresses = ", ".join(node.address for node in self.nodes)
        self._note(
            f"{self.settings.ranks_per_node} ranks on each of {addresses}; workload and results are in folders that "
            "they share, the package came through Ray's runtime_env, and of your environment what torch, CUDA and NCCL "
            "read (--export NAME adds more)"
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
            answers = self._call(
                lambda node: node.agent.find_missing.remote(files, folders), "comparing the nodes' files"
            )
        finally:
            mark.unlink(missing_ok=True)
        for node, missing in zip(self.nodes, answers, strict=True):
            if not missing:
                continue
            path = str(settings.out) if missing[0] == str(mark) else missing[0]
            if path == str(settings.nvme_path):
                raise EnvironmentBroken(f"{node.address} has no folder {path} that can be written\n  make it there")
            raise EnvironmentBroken(
                f"{node.address} does not see {path} as this machine does\n"
                "  the workload and --out have to lie in a folder that all nodes share, at the same place"
            )

    def _bind_store(self) -> StoreBound | NodeResult:
        """A port for the rendezvous of the next job, on the first node; or the reason that there is none."""
        first = self.nodes[0]
        # It may have to start another zygote, whose imports can come from a slow file system.
        part = RunningPart(
            first, first.agent.bind_store.remote(first.address), within_s=self.settings.profile.limits.init_s
        )
        while not self.ray.wait([part.run], timeout=POLL_S)[0]:
            self._read_heartbeats([part])
            if (how := part.find_loss()) is not None:
                return first.lose(how)
        return self.take_result(first, part.run)

    def _read_heartbeats(self, pending: Sequence[RunningPart]) -> bool:
        """Ask each agent for its heartbeat without waiting for the answer. Return whether one has answered."""
        has_news = False
        for part in pending:
            if part.progress is not None:
                done, _ = self.ray.wait([part.progress], timeout=0)
                if not done:
                    continue
                with contextlib.suppress(self.ray.exceptions.RayError):
                    heartbeat: Heartbeat = self.ray.get(part.progress)
                    part.heartbeat, part.silence, has_news = heartbeat, self._watch_silence(part.node), True
            part.progress = part.node.agent.progress.remote()
        return has_news

    def _watch_silence(self, node: Node) -> Wait:
        """A clock that reports where the agent of a node does not answer any more."""
        return Wait(
            report=lambda waited_s: self._note_wait(
                f"the agent of node {node.address} has not answered for {waited_s:.0f} s; it counts as lost after "
                f"{SILENT_S:.0f} s"
            )
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise make_write_error(folder, error) from None


def _find_machines_fault(error: Any) -> str:
    """Return why an agent cannot work: its /tmp is full, a file system is gone. Raises any other error."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, OSError):
        raise error  # in our own code
    return f"its agent cannot work: {cause}"
