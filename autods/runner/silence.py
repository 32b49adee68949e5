"""Silent ranks of a node: where they are, and whether they are stuck.

In a step of DeepSpeed's engine, and wherever autods itself works, silence has a limit, after which ranks are stuck. A
run's script also works between the engine's calls: it evaluates, computes metrics, uploads, reads data. How long that
takes only the script knows. There a rank is not stuck while it computes, moves bytes, or waits for a disk or a network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..rank.job import Beat, RankJob
from ..system import processes, stacks
from ..system.waiting import MOST_LIMITS
from ..types import Phase

_ASK_AFTER_S, _ASK_EVERY_S, _ANSWER_S = 10.0, 30.0, 1.0  # silent ranks are asked where they are
_WORKS = 0.05  # of a processor: ranks that wait use less, and to encrypt an upload takes as much
_MOVES_BYTES = 2**20  # between a question and its answer, which is a few KiB itself


def is_own_code(job: RankJob, phase: Phase) -> bool:
    """Whether a run's script decides how long the phase takes."""
    return job.order is not None and phase in ("script", "evaluate")


@dataclass(slots=True)
class RunningRank:
    """A rank that has not ended.

    `slot` is its place on this node.
    `changed_s` is the time at which a new heartbeat was seen.
    """

    rank: int
    slot: int
    pid: int
    beat: Beat
    changed_s: float
    stopped_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """When ranks were asked for their stacks, and what each of them had done until then."""

    asked_s: float
    work: Mapping[int, processes.SessionUse]


@dataclass(slots=True)
class Silence:
    """The silence of a node's ranks, at which its monitor looks again and again.

    `seconds` are those since any rank has moved. `place` is the line of the user's code where one of them is; '' where
    that is not known. `awaits_s` are the seconds for which each answer has said that all wait for other ranks. Whether
    those wait for these, too, only the driver can tell.
    """

    job: RankJob
    seconds: float = 0.0
    place: str = ""
    awaits_s: float = 0.0
    _awaits_from_s: float = math.inf
    _asked_s: float = 0.0
    _question: _Question | None = None
    _is_idle: bool = False  # by the last answer nobody is at work
    _at_work_s: float = 0.0

    def find_passed_limit(self, ranks: Sequence[RunningRank], now: float) -> float | None:
        """Return the seconds of silence after which these ranks count as stuck, if they do; else None.

        `now` is the monotonic time in seconds.
        """
        self.seconds = now - max(rank.changed_s for rank in ranks)
        limit_s = max(self.job.silence_s[rank.beat.phase] for rank in ranks)  # a fast rank waits for a slow one
        quiet_s = min(self.seconds, now - self._at_work_s)
        is_over, depends = quiet_s > limit_s, self._depends_on_work(ranks, quiet_s, limit_s)
        self._keep_asking(ranks, now, at_once=is_over and depends)
        if not is_over or (depends and not self._is_idle):
            return None
        if any(processes.is_compiling(rank.pid) for rank in ranks):
            self._at_work_s = now
            return None
        return limit_s

    def _depends_on_work(self, ranks: Sequence[RunningRank], quiet_s: float, limit_s: float) -> bool:
        """Whether what ranks do decides, not the limit: those of this node, or another one's for which these wait."""
        if self.job.order is None:
            return False
        waits_for_others = not self.job.is_whole and quiet_s < MOST_LIMITS * limit_s
        return waits_for_others or any(is_own_code(self.job, rank.beat.phase) for rank in ranks)

    def _keep_asking(self, ranks: Sequence[RunningRank], now: float, *, at_once: bool) -> None:
        """Ask silent ranks where they are, now and then, and read their answers; forget them where ranks have moved."""
        if self.seconds < _ASK_AFTER_S and not at_once:
            self.place, self._asked_s, self._question, self._is_idle = "", 0.0, None, False
            self.awaits_s, self._awaits_from_s = 0.0, math.inf
        elif self._question is None:
            if at_once or now - self._asked_s > _ASK_EVERY_S:
                self._ask(ranks, now)
        elif now - self._question.asked_s > _ANSWER_S:
            self._read_answer(self._question, ranks, now)

    def _ask(self, ranks: Sequence[RunningRank], now: float) -> None:
        self._asked_s = now
        self._question = _Question(
            asked_s=now,
            work={rank.rank: processes.measure_work(rank.pid) for rank in ranks if self.job.order is not None},
        )
        for rank in ranks:
            stacks.ask(rank.pid)

    def _read_answer(self, question: _Question, ranks: Sequence[RunningRank], now: float) -> None:
        """Find the user's line in what ranks have written, and whether one of them is at work."""
        self._question = None
        written = {rank.rank: processes.read_tail(self.log_of(rank)) for rank in ranks}
        frames = (stacks.find_hang(text) for text in written.values())
        self.place = str(next((frame for frame in frames if frame is not None), ""))
        if self.job.order is None:
            return
        at_work = [
            rank
            for rank in ranks
            if is_own_code(self.job, rank.beat.phase)
            and not stacks.awaits_ranks(written[rank.rank])
            and self._is_at_work(rank, question, written[rank.rank], now)
        ]
        awaits_a_node = not self.job.is_whole and all(stacks.awaits_ranks(text) for text in written.values())
        self._awaits_from_s = min(now, self._awaits_from_s) if awaits_a_node else math.inf
        self.awaits_s = max(0.0, now - self._awaits_from_s)
        self._is_idle = not at_work and not awaits_a_node
        if at_work:
            self._at_work_s = now

    @staticmethod
    def _is_at_work(rank: RunningRank, question: _Question, text: str, now: float) -> bool:
        before, work = question.work[rank.rank], processes.measure_work(rank.pid)
        return (
            work.cpu_s - before.cpu_s >= _WORKS * (now - question.asked_s)
            or work.moved_bytes - before.moved_bytes >= _MOVES_BYTES
            or work.waits_for_disk
            or stacks.awaits_network(text)
        )

    def log_of(self, rank: RunningRank) -> Path:
        """The file with what a rank prints."""
        return Path(self.job.folder) / f"rank{rank.rank}.log"
