"""Seconds of a script's optimizer steps, without what it does between them that is no training."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """Told of each call of the engine, in seconds of a monotonic clock.

    A step lasts from the end of the one before to its own end: the data that it waits for is a part of it. Between a
    step and the next training forward a script may evaluate, save and log as well; a stretch in which it was seen to
    evaluate or save is left out as a whole.
    """

    times: list[float] = field(default_factory=list)  # of each optimizer step
    _ended_s: float | None = None  # the last optimizer step; before the first one, the first forward
    _paused_s: float | None = None  # the last call of the engine's step, when no training forward came since
    _forward_s: float | None = None
    _other: bool = False  # the stretch is not only waiting for data
    _aside_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Of all steps."""
        return sum(self.times)

    def forward(self, now: float) -> None:
        """A training forward begins."""
        if self._forward_s is None:
            self._forward_s = now
        if self._ended_s is None:
            self._ended_s = now

    def other(self) -> None:
        """The script evaluates, or saves: what it trains on comes after."""
        self._other, self._forward_s = True, None

    def step(self, now: float, *, boundary: bool, counts: bool = True) -> None:
        """A call of the engine's step has ended; boundary: with it an optimizer step; counts: a whole one."""
        if self._other and self._paused_s is not None and self._forward_s is not None:
            self._aside_s += self._forward_s - self._paused_s
        if boundary:
            if counts:
                self.times.append(now - (now if self._ended_s is None else self._ended_s) - self._aside_s)
            self._aside_s = 0.0
        self.resume(now, boundary=boundary)

    def resume(self, now: float, *, boundary: bool = True) -> None:
        """The next stretch begins; what the trial itself did since the last step is left out as well."""
        if boundary:
            self._ended_s = now
        self._paused_s, self._forward_s, self._other = now, None, False
