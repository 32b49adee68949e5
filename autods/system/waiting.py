"""Waits that end: each has a limit, and says after some seconds what it waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from . import processes

FIRST_S = 20.0  # a shorter wait is not reported
AGAIN_S = 60.0
MOST_BETWEEN_S = 5.0  # a longer time between two looks is one in which this process was stopped itself
MOST_LIMITS = 8  # of a process that loads and moves bytes all the time
_MANY_BYTES = 2**26


@dataclass(slots=True)
class Wait:
    """The clock of one wait; its owner looks at it again and again, a few times a second.

    Time in which this process was stopped (Ctrl-Z, a suspended job) does not count. `report` is called after `FIRST_S`
    seconds and every `AGAIN_S` from there on, with the seconds so far.
    """

    limit_s: float = math.inf
    report: Callable[[float], None] = lambda waited_s: None
    waited_s: float = 0.0
    _next_report_s: float = field(default_factory=lambda: FIRST_S)
    _looked_s: float = field(default_factory=lambda: time.monotonic())

    def look(self) -> float:
        """Return the seconds so far; reports the wait where it is time to."""
        now = time.monotonic()
        self.waited_s += min(now - self._looked_s, MOST_BETWEEN_S)
        self._looked_s = now
        if self.waited_s >= self._next_report_s and self.waited_s < self.limit_s:
            self._next_report_s = self.waited_s + AGAIN_S
            self.report(self.waited_s)
        return self.waited_s

    def is_over(self) -> bool:
        """Whether the limit is passed; see `look`."""
        return self.look() >= self.limit_s


@dataclass(slots=True)
class Loading:
    """The clock of a process that loads: its limit counts from the last time that the process had moved many bytes.

    So an import that reads or downloads large files for long is no hang. It ends at some multiple of the limit anyhow.
    """

    pid: int
    limit_s: float
    whole: Wait
    quiet: Wait = field(default_factory=Wait)
    moved_bytes: int = 0

    @classmethod
    def of(cls, pid: int, limit_s: float, report: Callable[[float], None] = lambda waited_s: None) -> Loading:
        """Begin to wait for this process."""
        return cls(pid, limit_s, Wait(MOST_LIMITS * limit_s, report))

    def is_over(self) -> bool:
        """Whether the limit is passed; reports the wait where it is time to."""
        moved_bytes = processes.count_moved_bytes(self.pid)
        if moved_bytes - self.moved_bytes >= _MANY_BYTES:
            self.moved_bytes, self.quiet = moved_bytes, Wait()
        is_too_long = self.whole.is_over()
        return self.quiet.look() >= self.limit_s or is_too_long
