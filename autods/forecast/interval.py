"""Bytes with an interval: what is expected, and between which bounds the truth is believed to lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..units import show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """What a forecast is multiplied by; low ≤ middle ≤ high."""

    low: float = 1.0
    middle: float = 1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """low_bytes ≤ peak_bytes ≤ high_bytes."""

    low_bytes: int = 0
    peak_bytes: int = 0
    high_bytes: int = 0

    def __add__(self, other: Interval) -> Interval:
        """Both at once, bound to bound. Independent parts would be surer than that: it errs to the wide side."""
        return Interval(
            low_bytes=self.low_bytes + other.low_bytes,
            peak_bytes=self.peak_bytes + other.peak_bytes,
            high_bytes=self.high_bytes + other.high_bytes,
        )

    def times(self, ratios: Ratios | int) -> Interval:
        """Each bound by its ratio, or all by a count."""
        if isinstance(ratios, int):
            ratios = Ratios(low=ratios, middle=ratios, high=ratios)
        return Interval(
            low_bytes=int(self.low_bytes * ratios.low),
            peak_bytes=round(self.peak_bytes * ratios.middle),
            high_bytes=int(-(-self.high_bytes * ratios.high // 1)),
        )

    def __str__(self) -> str:
        """'28.3 GiB (27.1 to 30.0)'."""
        peak, low, high = (show_bytes(size) for size in (self.peak_bytes, self.low_bytes, self.high_bytes))
        if low == peak == high:
            return peak
        units = {text.rpartition(" ")[2] for text in (peak, low, high)}
        if len(units) == 1:
            low, high = (text.rpartition(" ")[0] for text in (low, high))
        return f"{peak} ({low} to {high})"


def exactly(size: int) -> Interval:
    """No doubt about it."""
    return Interval(low_bytes=size, peak_bytes=size, high_bytes=size)


def total(parts: Iterable[Interval]) -> Interval:
    """The sum."""
    return sum(parts, Interval())
