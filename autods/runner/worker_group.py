"""The nodes that run one trial together: each node's part, and the report of all of them."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import EnvironmentBroken
from ..trial.job import RankJob
from .placement import NodeState
from .ray_connect import said_by

POLL_S = 0.25
SILENT_S = 30.0  # a node that lives and does not say how far it is for so long is stuck
ENDS_S = 5.0  # a node that was told to end a job has ended it by then, or is lost
_REMIND_S = 0.5
_HEAD_EVERY_S, _HEAD_ANSWERS_S = 5.0, 10.0
_SAYS_S = 1.5  # where one node is stuck the others are, too: time for them to say which rank lets the others wait
Report = Mapping[str, Any]


@dataclass(slots=True)
class Member:
    """One node and its actor. ahead_s: how far its monotonic clock is ahead of ours. lost: why it is not used again."""

    node: NodeState
    actor: Any
    ahead_s: float = 0.0
    lost: str | None = None


@dataclass(slots=True)
class Team:
    """`execute` runs a job's parts, each on its member, to their end: when one fails, the others are ended."""

    ray: Any
    members: Sequence[Member]
    head: str | None = None  # HOST:PORT of the head of somebody's cluster
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def lost(self) -> Member | None:
        """One that is not there any more."""
        return next((member for member in self.members if member.lost is not None), None)

    def set_clocks(self) -> None:
        """What happened first is asked of several machines, whose clocks count from different moments."""
        for member in self.members:
            asked = [self._clock(member) for _ in range(3)]
            member.ahead_s = min(asked)[1]

    def _clock(self, member: Member) -> tuple[float, float]:
        """How long it took to ask, and how far it is ahead."""
        began = time.monotonic()
        said = float(self.ray.get(member.actor.clock.remote()))
        ended = time.monotonic()
        return ended - began, said - (began + ended) / 2

    def bind(self) -> Report:
        """A port for the store on the first node, for the next job: {"bound": port}, or why there is none."""
        first = self.members[0]
        reference = first.actor.bind.remote(first.node.address)
        done, _ = self.ray.wait([reference], timeout=SILENT_S * 2)  # it may have to start another zygote
        said = self._report(first, reference) if done else self._lost(first, "it does not answer")
        return {"lost": said["why"], "address": first.node.address} if "why" in said else said

    def execute(
        self, parts: Sequence[tuple[Member, RankJob]], told: Callable[[str, int], None] = lambda phase, step: None
    ) -> list[Report]:
        """The report of each part, in their order; {"lost": why} of a node that is gone.

        told: phase and step of the slowest rank, a few times a second.
        """
        run = _Run(team=self, number=next(self.numbers), told=told)
        for member, job in parts:
            run.begin(member, job)
        while run.pending:
            run.look()
        run.settle()
        return [run.reports[id(member)] for member, _ in parts]

    def check_head(self) -> None:
        """Raises EnvironmentBroken when the head of the cluster does not answer: Ray itself ends us 60 s later."""
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

    def _report(self, member: Member, reference: Any) -> Report:
        """What it said, on our clock."""
        try:
            return on_our_clock(dict(self.ray.get(reference)), member.ahead_s)
        except self.ray.exceptions.RayTaskError:
            raise  # our own mistake
        except self.ray.exceptions.RayError as error:
            return self._lost(member, said_by(error))

    def _lost(self, member: Member, why: str) -> Report:
        member.lost = why
        return {"lost": why, "address": member.node.address}


@dataclass(slots=True)
class _Run:
    """One job under way on its nodes."""

    team: Team
    number: int
    told: Callable[[str, int], None]
    pending: dict[Any, Member] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    asked: dict[int, Any] = field(default_factory=dict)  # what was asked of a member and is not answered yet
    heard_s: dict[int, float] = field(default_factory=dict)
    beats: dict[int, tuple[str, int]] = field(default_factory=dict)
    aborts: list[Any] = field(default_factory=list)
    ending_s: float | None = None
    reminded_s: float = 0.0
    head_checked_s: float = 0.0

    def begin(self, member: Member, job: RankJob) -> None:
        self.pending[member.actor.run.remote(job.to_json(), self.number)] = member
        self.heard_s[id(member)] = time.monotonic()

    def look(self) -> None:
        """Wait a little, take what is done, ask the others how far they are."""
        done, _ = self.team.ray.wait(list(self.pending), num_returns=1, timeout=POLL_S)
        for reference in done:
            member = self.pending.pop(reference)
            self._ended(member, self.team._report(member, reference))
        self._ask()
        now = time.monotonic()
        if now - self.head_checked_s > _HEAD_EVERY_S:
            self.head_checked_s = now
            self.team.check_head()
        for reference, member in list(self.pending.items()):
            if now - self.heard_s[id(member)] > SILENT_S:
                self._given_up(reference, member, f"it has not answered for {SILENT_S:.0f} s")
            elif self.ending_s is not None and now - self.ending_s > ENDS_S:
                self._given_up(reference, member, "it did not end the trial when it was told to")
        if self.ending_s is not None and now >= self.ending_s and now - self.reminded_s > _REMIND_S:
            self._end_others()

    def settle(self) -> None:
        """What was asked must not meet the next job."""
        if self.aborts:
            self.team.ray.wait(self.aborts, num_returns=len(self.aborts), timeout=1.0)

    def _ended(self, member: Member, report: Report) -> None:
        self.reports[id(member)] = report
        if is_bad(report) and self.ending_s is None:
            stuck = report.get("why_killed") in ("stuck", "wall limit")
            self.ending_s = time.monotonic() + (_SAYS_S if stuck else 0.0)
            if not stuck:
                self._end_others()

    def _given_up(self, reference: Any, member: Member, why: str) -> None:
        del self.pending[reference]
        self._ended(member, self.team._lost(member, why))

    def _end_others(self) -> None:
        """Told again until they have: the first word may come before their zygote has the job."""
        self.reminded_s = time.monotonic()
        self.aborts = [member.actor.abort.remote(self.number) for member in self.pending.values()]

    def _ask(self) -> None:
        """How far each is, without waiting for the answer; a node that is gone gives none."""
        news = False
        for member in self.pending.values():
            key = id(member)
            reference = self.asked.get(key)
            if reference is not None:
                done, _ = self.team.ray.wait([reference], timeout=0)
                if not done:
                    continue
                del self.asked[key]
                with contextlib.suppress(self.team.ray.exceptions.RayError):
                    phase, step = self.team.ray.get(reference)
                    self.beats[key], self.heard_s[key], news = (phase, int(step)), time.monotonic(), True
            self.asked[key] = member.actor.progress.remote()
        if news:
            self.told(*min(self.beats.values(), key=lambda beat: beat[1]))


def is_bad(report: Report) -> bool:
    """Whether a node's part of the job failed, so that the others wait for nothing."""
    return "ends" not in report or any(
        end["exit"] != 0 or not (end["record"] or {}).get("ok", False) for end in report["ends"]
    )


def on_our_clock(report: dict[str, Any], ahead_s: float) -> dict[str, Any]:
    """The report with its moments as our clock has them."""
    if "gone_at_s" in report:
        report["gone_at_s"] -= ahead_s
    for end in report.get("ends", ()):
        for noted in (end, end["record"] or {}):
            if noted.get("at_s"):  # 0: before its first beat
                noted["at_s"] -= ahead_s
    return report


Part = tuple[Member, RankJob]


def own_place(path: str, number: int) -> str:
    """A path for that node alone: several nodes may be one machine, or share a folder. The first has `path` itself."""
    return path if number == 0 else f"{path}-node{number}"


def repeated(job: RankJob, members: Sequence[Member]) -> list[Part]:
    """Every node does all of the job by itself, and clears its folder before."""
    folders = [own_place(job.folder, number) for number in range(len(members))]
    inside = job.scratch.removeprefix(job.folder)
    return [
        (member, replace(job, folder=folder, scratch=f"{folder}{inside}"))
        for member, folder in zip(members, folders, strict=True)
    ]


def parts_of(job: RankJob, members: Sequence[Member], ranks_per_node: int, port: int | None) -> list[Part]:
    """Consecutive ranks share a node; a job that one node can hold is left whole. port: of the store on the first."""
    if job.world_size <= ranks_per_node:
        return [(members[0], job)]
    parts = []
    for number, member in enumerate(members):
        ranks = range(number * ranks_per_node, min((number + 1) * ranks_per_node, job.world_size))
        if not ranks:
            break
        part = replace(
            job,
            local_ranks=tuple(ranks),
            node_rank=number,
            node_address=member.node.address,
            master_address=members[0].node.address,
            master_port=port,
            checkpoints=f"{job.folder}/checkpoints",
        )
        parts.append((member, _placed(part, number)))
    return parts


@contextlib.contextmanager
def shared_folders(parts: Sequence[Part]) -> Iterator[None]:
    """What no single node may make or remove is there inside: the folder of a checkpoint that all ranks write."""
    folders = {job.checkpoints for _, job in parts if job.checkpoints is not None}
    try:
        for folder in folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _placed(job: RankJob, number: int) -> RankJob:
    """The job with the folders of that node, which makes and removes them: its working directory and its swap files."""
    job = replace(job, scratch=own_place(job.scratch, number))
    if job.swap is None:
        return job
    swap = own_place(job.swap, number)
    return replace(job, swap=swap, ds_config=_with_path(job.ds_config, job.swap, swap))


def _with_path(config: Any, path: str, other: str) -> Any:
    """The config with `other` wherever that path stands."""
    if isinstance(config, Mapping):
        return {key: _with_path(value, path, other) for key, value in config.items()}
    return other if config == path else config
