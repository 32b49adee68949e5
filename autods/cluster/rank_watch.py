"""The ranks of one job while they run: which one ended and how, which one is lost; one that fails ends them all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import procs
from ..trial.heartbeat import Beat, Heartbeats
from ..trial.spec import RankJob
from .host_watch import HostWatch

GRACE_S = 0.05  # after the first failure: time for the others to say what they saw
STACKS_S = 2.0  # at most, for ranks that were asked where they are: a busy machine lets them wait for their turn
STOPPED_S = 0.5  # a rank that stays stopped (SIGSTOP) this long is lost

# Phases that may build ops, load weights, read a data set or write a checkpoint: the longer limit holds.
_SLOW_PHASES = ("start", "rendezvous", "build", "init", "save", "load")


@dataclass(slots=True)
class Live:
    """One running rank."""

    rank: int
    slot: int
    pid: int
    beat: Beat
    changed_s: float
    stopped_s: float | None = None


@dataclass(slots=True)
class RankWatch:
    """`look` while they run, `ended` when one of them is gone; `ends` is what is reported of each."""

    job: RankJob
    board: Heartbeats
    live: dict[int, Live]  # by pidfd
    host: HostWatch
    ends: list[dict[str, Any]] = field(default_factory=list)
    first_failure_s: float | None = None
    killed_s: float | None = None
    why_killed: str | None = None

    def ended(self, pidfd: int) -> None:
        """A rank is gone: reap it and note how."""
        live = self.live.pop(pidfd)
        _, status = os.waitpid(live.pid, 0)
        os.close(pidfd)
        now = time.monotonic()
        procs.keep_short(self._log_of(live))
        record = _record(self.job, live.rank)
        code = os.waitstatus_to_exitcode(status)
        by_us = self.killed_s is not None and code == -signal.SIGKILL
        at_s = (record or {}).get("at_s", now)
        end = self._end(live, self.board.read(live.slot), exit=code, killed_by_us=by_us, record=record, at_s=at_s)
        self.ends.append(end)
        failed = code != 0 or record is None or not record["ok"]
        if failed and not by_us and self.first_failure_s is None:
            self.first_failure_s = now

    def look(self, began: float) -> None:
        """Heartbeats, stopped ranks and limits; ends the job when one is passed."""
        now = time.monotonic()
        if self.killed_s is not None:
            if now - self.killed_s > 0.5:  # a rank between fork and setsid may have missed it
                self._signal_all(signal.SIGKILL)
            return
        if self.first_failure_s is not None:
            if now - self.first_failure_s >= GRACE_S:
                self.kill("another rank failed")
            return
        for live in self.live.values():
            procs.keep_short(self._log_of(live))
            beat = self.board.read(live.slot)
            if beat != live.beat and beat.at_s:
                live.beat, live.changed_s = beat, now
            live.stopped_s = (live.stopped_s or now) if procs.is_stopped(live.pid) else None
            if live.stopped_s is not None and now - live.stopped_s > STOPPED_S:
                self._lost([live], "stopped")
                return
        limit = self.job.init_s if any(x.beat.phase in _SLOW_PHASES for x in self.live.values()) else self.job.stall_s
        if self.live and all(now - live.changed_s > limit for live in self.live.values()):
            self._lost(list(self.live.values()), "stuck")
        elif self.live and now - began > self.job.wall_s:
            self._lost(list(self.live.values()), "wall limit")

    def kill(self, why: str) -> None:
        """End all of them with their children."""
        self.killed_s, self.why_killed = time.monotonic(), why
        self._signal_all(signal.SIGKILL)

    def _lost(self, suspects: list[Live], how: str) -> None:
        """Ranks that will not end by themselves: ask all for their stacks, note the suspects, end all.

        Who of them waits and who lets the others wait is for the verdict to say.
        """
        self.first_failure_s = time.monotonic()
        self._signal_all(signal.SIGUSR1)
        self._hear_stacks()
        self.ends += [self._end(live, live.beat, exit=None, lost=how) for live in suspects]
        self.kill(how)

    def _hear_stacks(self) -> None:
        """Until faulthandler has written them into the logs; a rank that is stopped writes none."""
        asked = [live.pid for live in self.live.values() if not procs.is_stopped(live.pid)]
        time.sleep(GRACE_S)
        until = time.monotonic() + STACKS_S
        while any(procs.is_taking(pid, signal.SIGUSR1) for pid in asked) and time.monotonic() < until:
            time.sleep(GRACE_S)

    def _end(self, live: Live, beat: Beat, *, record: dict[str, Any] | None = None, **said: Any) -> dict[str, Any]:
        """What is reported of a rank. The end of its log only where its record does not speak for it: thousands of
        ranks report to one driver."""
        spoke = record is not None and bool(said["exit"] == 0 if record["ok"] else record["error"]["types"])
        return {
            "rank": live.rank,
            "killed_by_us": False,
            "record": record,
            "phase": beat.phase,
            "step": beat.step,
            "at_s": beat.at_s,
            "log_tail": "" if spoke else procs.tail(self._log_of(live)),
            **said,
        }

    def _log_of(self, live: Live) -> Path:
        return Path(self.job.folder) / f"rank{live.rank}.log"

    def _signal_all(self, number: signal.Signals) -> None:
        for live in self.live.values():
            if number == signal.SIGKILL:
                with contextlib.suppress(OSError):
                    os.killpg(live.pid, number)  # the rank is the leader of its session: its children go with it
            with contextlib.suppress(OSError):
                os.kill(live.pid, number)


def _record(job: RankJob, rank: int) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((Path(job.folder) / f"rank{rank}.json").read_text())
    except (OSError, ValueError):
        return None
    return record
