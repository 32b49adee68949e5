"""Several nodes run one job: how it is cut, whose failure ends it, who is lost, and what that is called."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from autods.errors import EnvironmentBroken
from autods.runner import worker_group as teams
from autods.runner.agent import Node
from autods.runner.outcome import failure_from
from autods.runner.placement import NodeState
from autods.runner.worker_group import Member, Team, parts_of, repeated
from autods.trial.job import RankJob
from autods.trial.worker import environment
from autods.types import Failed, OutOfMemory, WorkloadSource

JOB = RankJob(
    job="train",
    source=WorkloadSource(kind="file", path="/model.py", name="model", digest="1"),
    device="cpu",
    folder="/out/logs/001-zero1",
    scratch="/out/logs/001-zero1/scratch",
    world_size=4,
    local_ranks=(0, 1, 2, 3),
)
WELL = {"ends": [], "wall_s": 1.0, "gone_at_s": 1.0, "why_killed": None}


class Ray:
    """References are answers: ready when their moment has come. An answer that is an exception is raised."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

    def wait(self, references: list[Any], num_returns: int = 1, timeout: float = 0) -> tuple[list[Any], list[Any]]:
        done = [one for one in references if one.ready()]
        if not done:
            time.sleep(0.001)
        return done, [one for one in references if one not in done]

    def get(self, reference: Any) -> Any:
        if isinstance(reference.answer, Exception):
            raise reference.answer
        return reference.answer


class Reference:
    def __init__(self, answer: Any, ready: Any = lambda: True) -> None:
        self.answer, self.ready = answer, ready


class Actor:
    """Reports what is scripted: at once, or when it is told to end (`when="aborted"`), or never."""

    def __init__(self, report: Any, when: str = "done", ahead_s: float = 0.0) -> None:
        self.report, self.when, self.aborted, self.ahead_s = report, when, [], ahead_s
        self.jobs: list[RankJob] = []
        self.looks = 0
        for name in ("run", "abort", "progress", "clock"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _run(self, line: str, number: int) -> Reference:
        self.jobs.append(RankJob.from_json(line))
        ready = {"done": lambda: True, "aborted": lambda: bool(self.aborted), "never": lambda: False}.get(
            self.when, self._later
        )
        return Reference(self.report, ready)

    def _later(self) -> bool:
        self.looks += 1
        return self.looks > 20

    def _abort(self, number: int) -> Reference:
        self.aborted.append(number)
        return Reference(None)

    def _progress(self) -> Reference:
        return Reference(["forward", 3])

    def _clock(self) -> Reference:
        return Reference(time.monotonic() + self.ahead_s)


def a_member(actor: Actor, number: int) -> Member:
    return Member(NodeState(id=f"id{number}", address=f"10.0.0.{number}", total={}), actor)


def a_team(*actors: Actor) -> Team:
    return Team(Ray(), [a_member(actor, number) for number, actor in enumerate(actors, 1)])


def run(team: Team) -> list[Any]:
    return team.execute(parts_of(JOB, team.members, 2, 29500))


def an_end(
    rank: int, *, at_s: float = 5.0, killed: bool = False, error: dict[str, Any] | None = None
) -> dict[str, Any]:
    record = {"ok": False, "error": error, "phase": "forward", "step": 0, "at_s": at_s} if error else None
    return {
        "rank": rank, "exit": -9 if killed else 1, "killed_by_us": killed, "record": record, "phase": "forward",
        "step": 0, "at_s": at_s, "log_tail": "",
    }  # fmt: skip


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


def test_consecutive_ranks_share_a_node_and_know_their_place() -> None:
    parts = parts_of(JOB, a_team(Actor(WELL), Actor(WELL)).members, 2, 29500)
    said = [environment(job, slot, 1) for _, job in parts for slot in range(2)]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR")
    assert [tuple(one[name] for name in names) for one in said] == [
        ("0", "0", "2", "0", "4", "10.0.0.1"),
        ("1", "1", "2", "0", "4", "10.0.0.1"),
        ("2", "0", "2", "1", "4", "10.0.0.1"),
        ("3", "1", "2", "1", "4", "10.0.0.1"),
    ]


def test_fewer_ranks_than_places_leave_nodes_alone_that_they_do_not_need() -> None:
    team = a_team(Actor(WELL), Actor(WELL), Actor(WELL))
    assert [job.local_ranks for _, job in parts_of(JOB, team.members, 3, 1)] == [(0, 1, 2), (3,)]


def test_nodes_of_one_machine_do_not_share_a_working_directory() -> None:
    parts = parts_of(JOB, a_team(Actor(WELL), Actor(WELL)).members, 2, 1)
    assert len({job.scratch for _, job in parts}) == 2


def test_nodes_that_all_do_a_job_work_where_no_other_clears() -> None:
    first, other = (job for _, job in repeated(JOB, a_team(Actor(WELL), Actor(WELL)).members))
    assert first == JOB
    assert other.scratch == f"{other.folder}/scratch"
    assert not other.folder.startswith(f"{first.folder}/")


def test_nodes_of_one_machine_swap_into_folders_of_their_own() -> None:
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme/autods-1-a"}}
    job = replace(JOB, swap="/nvme/autods-1-a", ds_config={"zero_optimization": {"stage": 3, **offload}})
    parts = [part for _, part in parts_of(job, a_team(Actor(WELL), Actor(WELL)).members, 2, 1)]
    assert [part.swap for part in parts] == ["/nvme/autods-1-a", "/nvme/autods-1-a-node1"]
    for part in parts:
        zero = part.ds_config["zero_optimization"]
        assert zero["offload_optimizer"]["nvme_path"] == part.swap
        assert zero["stage"] == 3


def test_when_all_parts_end_well_nobody_is_told_to_end() -> None:
    actors = Actor(WELL), Actor(WELL)
    assert run(a_team(*actors)) == [WELL, WELL]
    assert [actor.aborted for actor in actors] == [[], []]


def test_a_rank_that_fails_on_one_node_ends_the_ranks_of_the_other() -> None:
    failed = {**WELL, "ends": [an_end(3, error=NO_MEMORY)]}
    ended = {**WELL, "ends": [an_end(0, killed=True)], "why_killed": "aborted"}
    waiting = Actor(ended, when="aborted")
    reports = run(a_team(waiting, Actor(failed)))
    assert waiting.aborted
    outcome = failure_from(reports, JOB)
    assert isinstance(outcome, OutOfMemory)
    assert outcome.rank == 3


def test_an_actor_that_ray_calls_dead_is_lost() -> None:
    team = a_team(
        Actor({**WELL, "ends": [an_end(0, killed=True)]}, "aborted"), Actor(Ray.exceptions.RayError("died\n"))
    )
    outcome = failure_from(run(team), JOB)
    assert isinstance(outcome, Failed)
    assert outcome.evidence == "node 10.0.0.2 was lost in the trial: died"


def test_a_node_that_does_not_end_when_told_to_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "ENDS_S", 0.0)
    team = a_team(Actor({**WELL, "ends": [an_end(0, error=PEER_CLOSED)]}), Actor(None, when="never"))
    assert "did not end" in run(team)[1]["lost"]


def test_where_a_node_is_stuck_the_other_may_say_so_too_before_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that reports first has ranks that only wait for those of the other."""
    monkeypatch.setattr(teams, "_SAYS_S", 60.0)
    waits = {**an_end(0), "exit": None, "lost": "stuck", "log_tail": AWAITING}
    hangs = {**an_end(3, at_s=1.0), "exit": None, "lost": "stuck"}
    late = Actor({**WELL, "ends": [hangs], "why_killed": "stuck"}, when="later")
    reports = run(a_team(Actor({**WELL, "ends": [waits], "why_killed": "stuck"}), late))
    assert late.aborted == []
    outcome = failure_from(reports, JOB)
    assert isinstance(outcome, Failed)
    assert outcome.rank == 3


def test_a_head_that_is_gone_ends_the_fit_with_a_way_to_go_on() -> None:
    team = a_team(Actor(WELL), Actor(WELL))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        team.head = f"127.0.0.1:{listening.getsockname()[1]}"
        team.check_head()
    with pytest.raises(EnvironmentBroken, match="connection refused"):
        run(team)


def test_memory_that_ran_out_on_a_node_that_is_there_is_the_cause_of_one_that_is_not() -> None:
    reports = [{**WELL, "ends": [an_end(1, error=NO_MEMORY)]}, {"lost": "no answer", "address": "10.0.0.2"}]
    assert isinstance(failure_from(reports, JOB), OutOfMemory)


def test_a_node_that_rays_memory_monitor_emptied_ran_out_of_host_memory() -> None:
    lost = {"lost": "Task was killed due to the node running low on memory.", "address": "10.0.0.2"}
    outcome = failure_from([WELL, lost], JOB)
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.tier, outcome.action) == ("host", "less_host_memory")


def test_what_happened_first_is_told_from_clocks_that_count_from_different_moments() -> None:
    """By its own clock the second node's rank failed an hour later; it failed first."""
    first = {**WELL, "ends": [an_end(0, at_s=20.0, error=an_error("ValueError", "second"))]}
    other = {**WELL, "ends": [an_end(2, at_s=3610.0, error=an_error("ValueError", "first"))]}
    team = a_team(Actor(first), Actor(other, ahead_s=3600.0))
    team.set_clocks()
    outcome = failure_from(run(team), JOB)
    assert isinstance(outcome, Failed)
    assert outcome.rank == 2


def test_the_word_that_ends_one_job_never_meets_the_next() -> None:
    """It comes when that job has ended by itself: the zygote does not even hear it."""
    ours, zygotes = socket.socketpair()
    node = Node(asdict(JOB.source), "cpu", {"pid": 1, "machine": "another"}, "log", {})
    node.connection = ours
    zygotes.sendall(b'{"done": {"ends": []}}\n')
    assert node.run("the first job", 1) == {"ends": []}
    node.abort(1)
    zygotes.sendall(b'{"done": {"ends": []}}\n')
    node.run("the second job", 2)
    assert zygotes.recv(100) == b"the first job\nthe second job\n"
    for one in (ours, zygotes):
        one.close()
