"""Several nodes run one job: how they are started, how the job is split, whose failure ends it, and who is lost."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autods.errors import EnvironmentBroken
from autods.events import Event, Note
from autods.rank.job import RankJob
from autods.runner import parts, worker_group
from autods.runner.environment import rank_environment
from autods.runner.node_messages import Heartbeat, NodeLost, NodeResult, RankExit, StoreBound
from autods.runner.outcome import find_failure
from autods.runner.parts import Node, repeat_job, split_job
from autods.runner.placement import NodeDescription, NodeState
from autods.runner.worker_group import WorkerGroup
from autods.types import PHASES, Failed, OutOfMemory, WorkloadSource
from tests.support.ends import rank_exit, report_of
from tests.support.machines import a_machine, a_node, describe, settings_of

JOB = RankJob(
    job="train",
    source=WorkloadSource(kind="file", path="/model.py", name="model", digest="1"),
    device="cpu",
    folder="/out/logs/001-zero1",
    scratch="/out/logs/001-zero1/scratch",
    world_size=4,
    local_ranks=(0, 1, 2, 3),
)
WELL = report_of()


class Ray:
    """References are answers: ready when their moment has come. An answer that is an exception is raised."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError):
            cause: Exception | None = None

        class RayActorError(RayError): ...

        class ActorUnavailableError(RayActorError): ...

    def wait(self, references: list[Any], num_returns: int = 1, timeout: float = 0) -> tuple[list[Any], list[Any]]:
        done = [reference for reference in references if reference.ready()]
        if not done:
            time.sleep(0.001)
        return done, [reference for reference in references if reference not in done]

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference.answer, Exception):
            raise reference.answer
        return reference.answer


class Reference:
    def __init__(self, answer: Any, ready: Any = lambda: True) -> None:
        self.answer, self.ready = answer, ready


class Agent:
    """Reports what is scripted: at once, or when it is told to end (`when="aborted"`), or never."""

    def __init__(self, result: Any, when: str = "done", ahead_s: float = 0.0) -> None:
        self.result, self.when, self.aborted, self.ahead_s = result, when, [], ahead_s
        self.looks = 0
        self.gave_up: list[int] = []
        for name in ("run", "abort", "give_up", "progress", "read_clock", "bind_store"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _run(self, job: RankJob, number: int) -> Reference:
        ready = {"done": lambda: True, "aborted": lambda: bool(self.aborted), "never": lambda: False}.get(
            self.when, self._later
        )
        return Reference(self.result, ready)

    def _bind_store(self, address: str) -> Reference:
        return self._run(JOB, 0)

    def _later(self) -> bool:
        self.looks += 1
        return self.looks > 20

    def _abort(self, number: int) -> Reference:
        self.aborted.append(number)
        return Reference(None)

    def _give_up(self, number: int) -> Reference:
        self.gave_up.append(number)
        return self._abort(number)

    def _progress(self) -> Reference:
        return Reference(Heartbeat(phase="forward", step=3))

    def _read_clock(self) -> Reference:
        return Reference(time.monotonic() + self.ahead_s)


def a_group(*agents: Any) -> WorkerGroup:
    group = WorkerGroup(settings_of(), lambda event: None, environment={}, check_ready=lambda ready: None)
    group.ray = Ray()
    group.nodes = [Node(f"10.0.0.{number}", agent) for number, agent in enumerate(agents, 1)]
    return group


def nodes(count: int) -> Sequence[Node]:
    return a_group(*[Agent(WELL)] * count).nodes


def run(group: WorkerGroup) -> list[NodeResult]:
    return group.execute(split_job(JOB, group.nodes, 2, 29500))


def failed(rank: int, error: dict[str, Any], *, at_s: float = 5.0) -> RankExit:
    return rank_exit(rank, error=error, phase="forward", step=0, at_s=at_s)


def killed(rank: int) -> RankExit:
    return rank_exit(rank, phase="forward", step=0, exit_code=-9, killed_by_us=True)


def an_error(type: str, message: str) -> dict[str, Any]:
    return {"types": [type, "RuntimeError", "Exception"], "message": message, "traceback": ""}


AWAITING = (
    'Current thread 0x1 (most recent call first):\n  File "/venv/torch/distributed/distributed_c10d.py", line 1\n'
)
PEER_CLOSED = an_error("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:30422")
NO_MEMORY = an_error(
    "RuntimeError",
    "[enforce fail at alloc_cpu.cpp:113] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "68719476736 bytes. Error code 12 (Cannot allocate memory)",
)


def test_consecutive_ranks_share_a_node() -> None:
    parts = split_job(JOB, nodes(2), 2, 29500)
    variables = [rank_environment(job, slot, 1) for _, job in parts for slot in range(2)]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR")
    assert [tuple(rank[name] for name in names) for rank in variables] == [
        ("0", "0", "2", "0", "4", "10.0.0.1"),
        ("1", "1", "2", "0", "4", "10.0.0.1"),
        ("2", "0", "2", "1", "4", "10.0.0.1"),
        ("3", "1", "2", "1", "4", "10.0.0.1"),
    ]


def test_nodes_that_get_no_ranks_have_no_part() -> None:
    assert [job.local_ranks for _, job in split_job(JOB, nodes(3), 3, 1)] == [(0, 1, 2), (3,)]


def test_nodes_of_one_machine_have_different_scratch_folders() -> None:
    assert len({job.scratch for _, job in split_job(JOB, nodes(2), 2, 1)}) == 2


def test_ranks_of_several_nodes_share_what_they_write() -> None:
    """A rank of another node reads what rank 0 prepared, and all write one checkpoint."""
    assert {job.shared_folder for _, job in split_job(JOB, nodes(2), 2, 1)} == {Path("/out/logs/001-zero1/shared")}
    assert JOB.shared_folder == Path(JOB.scratch)


def test_a_repeated_job_has_a_folder_on_each_node() -> None:
    first, other = (job for _, job in repeat_job(JOB, nodes(2)))
    assert first == JOB
    assert other.scratch == f"{other.folder}/scratch"
    assert not other.folder.startswith(f"{first.folder}/")


def test_nodes_of_one_machine_swap_into_different_folders() -> None:
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme/autods-1-a"}}
    job = replace(JOB, swap="/nvme/autods-1-a", ds_config={"zero_optimization": {"stage": 3, **offload}})
    parts = [part for _, part in split_job(job, nodes(2), 2, 1)]
    assert [part.swap for part in parts] == ["/nvme/autods-1-a", "/nvme/autods-1-a-node1"]
    for part in parts:
        zero = part.ds_config["zero_optimization"]
        assert zero["offload_optimizer"]["nvme_path"] == part.swap
        assert zero["stage"] == 3


def test_no_node_is_aborted_when_all_end_well() -> None:
    agents = Agent(WELL), Agent(WELL)
    assert run(a_group(*agents)) == [WELL, WELL]
    assert [agent.aborted for agent in agents] == [[], []]


def test_a_rank_that_fails_ends_the_ranks_of_other_nodes() -> None:
    waiting = Agent(report_of(killed(0), killed_because="aborted"), when="aborted")
    results = run(a_group(waiting, Agent(report_of(failed(3, NO_MEMORY)))))
    assert waiting.aborted
    outcome = find_failure(results, JOB)
    assert isinstance(outcome, OutOfMemory)
    assert outcome.rank == 3


def task_error(cause: Exception) -> Ray.exceptions.RayTaskError:
    error = Ray.exceptions.RayTaskError("its stacks")
    error.cause = cause
    return error


def test_an_error_in_our_own_code_ends_the_command() -> None:
    with pytest.raises(Ray.exceptions.RayTaskError):
        run(a_group(Agent(report_of(killed(0)), "aborted"), Agent(task_error(KeyError("slot")))))


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (Ray.exceptions.RayError("died\nits stacks"), "died"),
        (Ray.exceptions.ActorUnavailableError("RpcError: 14"), "the connection to its agent broke"),
        (task_error(OSError(errno.ENOSPC, "No space left")), "its agent cannot work: [Errno 28] No space left"),
    ],
)
def test_an_agent_that_cannot_be_reached_or_work_is_lost(error: Exception, how: str) -> None:
    group = a_group(Agent(report_of(killed(0)), "aborted"), Agent(error))
    outcome = find_failure(run(group), JOB)
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.action) == ("infrastructure", "retry")
    assert outcome.evidence == f"node 10.0.0.2 was lost in the trial: {how}"
    assert group.nodes[1].lost == how


@pytest.mark.parametrize(
    ("limit", "job", "words"),
    [
        ("MARGIN_S", replace(JOB, end_s=0.0), "it has not ended the trial 0 s after it was told to"),
        ("SILENT_S", replace(JOB, end_s=0.0), "it has not answered for 0 s"),
        ("MARGIN_S", replace(JOB, wall_s=0.0, silence_s={"start": -60.0}), "it has not done its part within 0 s"),
    ],
)
def test_a_node_that_does_not_answer_or_end_is_lost(
    monkeypatch: pytest.MonkeyPatch, limit: str, job: RankJob, words: str
) -> None:
    monkeypatch.setattr(parts, limit, 0.0)
    group = a_group(Agent(report_of(failed(0, PEER_CLOSED))), Agent(None, when="never"))
    lost = group.execute(split_job(job, group.nodes, 2, 29500))[1]
    assert isinstance(lost, NodeLost)
    assert lost.how == words


def test_a_node_with_much_memory_to_free_has_longer_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpinning hundreds of gigabytes takes a minute, in which it may not even answer."""
    monkeypatch.setattr(parts, "MARGIN_S", 0.0)
    monkeypatch.setattr(parts, "SILENT_S", 0.0)
    late = Agent(report_of(killed(2)), when="later")
    group = a_group(Agent(report_of(failed(0, PEER_CLOSED))), late)
    results = group.execute(split_job(replace(JOB, end_s=60.0), group.nodes, 2, 29500))
    assert late.aborted
    assert not any(isinstance(result, NodeLost) for result in results)


def test_a_slow_start_of_a_zygote_is_awaited_while_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports can come from a slow file system."""
    monkeypatch.setattr(worker_group, "POLL_S", 0.0)
    agent = Agent(StoreBound(port=29500), when="later")
    group = a_group(agent, Agent(WELL))
    port: list[int | None] = []
    monkeypatch.setattr(group, "execute", lambda parts, on_progress: port.extend(job.master_port for _, job in parts))
    group.run(replace(JOB, world_size=8, local_ranks=tuple(range(8))))
    assert port == [29500, 29500]
    assert agent.looks > 20


def test_a_second_stuck_node_may_report_before_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that reports first has ranks that only wait for those of the other."""
    monkeypatch.setattr(worker_group, "STUCK_GRACE_S", 60.0)
    waits = rank_exit(0, phase="forward", at_s=5.0, lost="stuck", log_tail=AWAITING)
    hangs = rank_exit(3, phase="forward", at_s=1.0, lost="stuck")
    late = Agent(report_of(hangs, killed_because="stuck"), when="later")
    results = run(a_group(Agent(report_of(waits, killed_because="stuck")), late))
    assert late.aborted == []
    outcome = find_failure(results, JOB)
    assert isinstance(outcome, Failed)
    assert outcome.rank == 3


def test_nodes_that_wait_for_each_other_are_given_up_once() -> None:
    class Waiting(Agent):
        def _progress(self) -> Reference:
            return Reference(Heartbeat(phase="script", awaits_s=1e6))

    stuck = report_of(replace(killed(0), lost="stuck"))
    agents = [Waiting(replace(stuck, killed_because="stuck"), "aborted") for _ in range(2)]
    run(a_group(*agents))
    assert [len(agent.gave_up) for agent in agents] == [1, 1]


def test_clocks_that_drift_in_a_long_job_are_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_CLOCKS_EVERY_S", 0.0)
    silent = Agent(WELL, "later", ahead_s=5.0)
    silent.read_clock = SimpleNamespace(remote=lambda: Reference(Ray.exceptions.RayError("no answer in 2 s")))
    group = a_group(Agent(WELL, "later", ahead_s=90.0), silent)
    group.nodes[1].ahead_s = 7.0
    run(group)
    assert [round(node.ahead_s) for node in group.nodes] == [90, 7]
    assert [node.lost for node in group.nodes] == [None, None]


def test_an_agent_that_died_between_jobs_is_named_and_not_used_again() -> None:
    died = Ray.exceptions.RayActorError("The actor died\nits stack")
    agent = Agent(WELL)
    agent.find_unbuilt = SimpleNamespace(remote=lambda ops: Reference(died))
    group = a_group(agent)
    with pytest.raises(EnvironmentBroken, match=r"10\.0\.0\.1 was lost while .* ops: The actor died\n"):
        group.needs_build(["cpu_adam"])
    assert group.nodes[0].lost == "The actor died"


def test_a_wait_for_the_last_ranks_is_reported_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their swap files are being removed, or they do not end at all."""
    monkeypatch.setattr(worker_group, "MARGIN_S", 0.0)
    group, texts = a_group(Agent(WELL)), list[str]()
    group.listen = lambda event: texts.append(getattr(event, "text", ""))
    group.nodes[0].agent.stop = SimpleNamespace(remote=lambda: Reference(None, lambda: False))
    group.stop()
    assert len(texts) == 2
    assert texts[0].startswith("waiting until the ranks have ended")
    assert texts[1].startswith("some ranks have not ended")


def test_a_head_that_is_gone_ends_the_fit_with_a_hint() -> None:
    group = a_group(Agent(WELL), Agent(WELL))
    with socket.create_server(("127.0.0.1", 0)) as head:
        group.head = f"127.0.0.1:{head.getsockname()[1]}"
        group.check_head()
    with pytest.raises(EnvironmentBroken, match="connection refused") as broken:
        group.run(JOB)
    assert "ray start --head" in str(broken.value)


def test_memory_that_ran_out_explains_a_lost_node() -> None:
    results = [report_of(failed(1, NO_MEMORY)), NodeLost(address="10.0.0.2", how="no answer")]
    assert isinstance(find_failure(results, JOB), OutOfMemory)


def test_a_node_that_rays_memory_monitor_killed_ran_out() -> None:
    lost = NodeLost(address="10.0.0.2", how="Task was killed due to the node running low on memory.")
    outcome = find_failure([WELL, lost], JOB)
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.tier, outcome.action) == ("host", "less_host_memory")


def test_the_first_failure_is_found_across_clocks() -> None:
    """By its own clock the second node's rank failed an hour later; it failed first."""
    first = report_of(failed(0, an_error("ValueError", "second"), at_s=20.0))
    other = report_of(failed(2, an_error("ValueError", "first"), at_s=3610.0))
    group = a_group(Agent(first), Agent(other, ahead_s=3600.0))
    group.read_clocks()
    outcome = find_failure(run(group), JOB)
    assert isinstance(outcome, Failed)
    assert outcome.rank == 2


class StartingRay(Ray):
    """Starts agents; `options` of each, `calls` to them, `killed` of those that were ended."""

    def __init__(self, *descriptions: NodeDescription) -> None:
        self.descriptions, self.options, self.calls, self.killed = descriptions, [], [], 0
        self.missing: list[str] = []

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "id1", gcs_address="10.0.0.1:6379")

    def remote(self, **options: Any) -> Any:
        number = len(self.options)
        self.options.append(options)
        answers = {
            "progress": Heartbeat(),
            "describe": self.descriptions[number],
            "find_missing": self.missing,
            "read_clock": 0.0,
        }

        def method(name: str) -> Any:
            def remote(*args: object) -> Any:
                self.calls.append((number, name))
                return answers.get(name, {})

            return SimpleNamespace(remote=remote)

        names = ("describe", "find_missing", "read_clock", "start", "progress", "abort", "stop")
        agent = SimpleNamespace(**{name: method(name) for name in names})
        return lambda cls: SimpleNamespace(remote=lambda *args: agent)

    def wait(self, references: list[Any], num_returns: int = 1, timeout: float = 0) -> tuple[list[Any], list[Any]]:
        return references, []

    def get(self, references: Any, timeout: float | None = None) -> Any:
        return references

    def kill(self, agent: Any) -> None:
        self.killed += 1


class TwoNodes:
    """A cluster whose second bundle is on the driver's node."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, float]] = []
        self.freed = 0

    def nodes(self) -> list[NodeState]:
        return [a_node(1), a_node(2)]

    def reserve(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.bundles = bundles
        return SimpleNamespace(bundle_specs=bundles)

    def is_ready(self, group: Any, within_s: float) -> bool:
        return True

    def node_ids(self, group: Any) -> list[str]:
        return ["id2", "id1"]

    def free(self, group: Any) -> None:
        self.freed += 1


def a_starting_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *descriptions: NodeDescription
) -> tuple[WorkerGroup, StartingRay, TwoNodes, list[str]]:
    monkeypatch.setattr(WorkerGroup, "check_head", lambda group: None)
    texts: list[str] = []

    def listen(event: Event) -> None:
        assert isinstance(event, Note)
        texts.append(event.text)

    group = WorkerGroup(settings_of(out=folder), listen, environment={}, check_ready=lambda ready: None)
    group.ray, group.cluster = ray, cluster = StartingRay(*descriptions), TwoNodes()
    return group, ray, cluster, texts


def test_each_agent_has_the_gpus_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, ray, cluster, texts = a_starting_group(
        tmp_path, monkeypatch, describe(a_machine()), describe(a_machine(), 2)
    )
    group.start()
    assert cluster.bundles == [{"CPU": 1.0, "GPU": 4.0}] * 2
    assert [options["num_gpus"] for options in ray.options] == [4, 4]
    assert [options["scheduling_strategy"].placement_group_bundle_index for options in ray.options] == [1, 0]
    assert [node.address for node in group.nodes] == ["10.0.0.1", "10.0.0.2"]
    assert any("4 ranks on each of 10.0.0.1, 10.0.0.2" in text for text in texts)


def test_different_software_is_refused_and_all_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = describe(a_machine()), describe(a_machine(), 2, torch="2.9.0")
    group, ray, cluster, _ = a_starting_group(tmp_path, monkeypatch, *nodes)
    with pytest.raises(EnvironmentBroken, match=r"torch 2\.13\.0 on 10\.0\.0\.1, 2\.9\.0 on 10\.0\.0\.2"):
        group.start()
    assert "start" not in [name for _, name in ray.calls]
    assert (ray.killed, cluster.freed) == (2, 1)


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, ray, _, _ = a_starting_group(tmp_path, monkeypatch, describe(a_machine()), describe(a_machine(), 2))
    ray.missing.append("/home/me/model.py")
    with pytest.raises(EnvironmentBroken, match=r"10\.0\.0\.1 does not see /home/me/model\.py"):
        group.start()
    assert "start" not in [name for _, name in ray.calls]


@pytest.mark.parametrize(
    ("job", "folder", "text"),
    [
        (JOB, JOB.folder, "001-zero1: no rank has moved for 25 s, in init; they count as stuck after 300 s"),
        (replace(JOB, job="ops"), "/out/logs/build-cpu_adam", "build-cpu_adam: compiling for 25 s"),
    ],
)
def test_silence_is_reported_as_what_it_is(job: RankJob, folder: str, text: str) -> None:
    class SilentAgent(Agent):
        def _progress(self) -> Reference:
            return Reference(Heartbeat(phase="init", silent_s=25.0))

    notes: list[Event] = []
    group = a_group(SilentAgent(WELL, "later"), SilentAgent(WELL, "later"))
    group.listen = notes.append
    job = replace(job, folder=folder, silence_s=dict.fromkeys(PHASES, 300.0))
    group.execute(split_job(job, group.nodes, 2, 29500))
    assert any(isinstance(note, Note) and note.text.startswith(text) for note in notes), notes
