"""The tuning space of a rung around a start: which values a key may take, and the settings that a proposal means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ladder import Dimension, Rung
from ..values import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of some values, the start's first."""

    options: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements from low to high, both inclusive, searched in ratio."""

    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be tuned, and two points of it: the start, and DeepSpeed's usual settings as far as they are inside."""

    dimensions: Mapping[str, Choice | Range]
    start: Mapping[str, Scalar]
    usual: Mapping[str, Scalar]

    @property
    def seeds(self) -> tuple[Mapping[str, Scalar], ...]:
        """What is worth a trial before anything is known, the start first."""
        return (self.start,) if self.usual == self.start else (self.start, self.usual)

    def settings(self, proposal: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The settings to run: ranges rounded down to even, since ZeRO aligns partitions to two elements."""
        return {key: self._rounded(key, proposal[key]) for key in self.dimensions}

    def _rounded(self, key: str, value: Scalar) -> Scalar:
        if isinstance(self.dimensions[key], Choice):
            return value
        return self.start[key] if value == self.start[key] else max(2, int(value) // 2 * 2)


def space_of(rung: Rung, settings: Mapping[str, Scalar], current: Mapping[str, Scalar]) -> Space:
    """The space of `rung.tune` around a start.

    settings: what the start sets. current: what its config says anyway of keys that it does not set. A key of which
    neither says anything starts at its first choice; without a number to start from a range is left alone.
    """
    dimensions: dict[str, Choice | Range] = {}
    start: dict[str, Scalar] = {}
    usual: dict[str, Scalar] = {}
    for key, row in rung.tune.items():
        value = settings.get(key, current.get(key))
        found = _choice(row, value) if row.choices else _range(row, value)
        if found is not None:
            dimensions[key] = found
            start[key] = found.options[0] if isinstance(found, Choice) else int(value or 0)
            usual[key] = start[key] if row.usual is None else _inside(found, row.usual)
    return Space(dimensions=dimensions, start=start, usual=usual)


def _inside(found: Choice | Range, usual: Scalar) -> Scalar:
    return usual if isinstance(found, Choice) else min(max(int(usual), found.low), found.high)


def _choice(row: Dimension, value: Scalar | None) -> Choice | None:
    first = row.choices[0] if value is None else value
    options = (first, *(option for option in row.choices if option != first))
    return Choice(options=options) if len(options) > 1 else None


def _range(row: Dimension, value: Scalar | None) -> Range | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 2:
        return None
    start = int(value)
    # The start is always inside, also where the user's own value is beyond `most`.
    low = min(start, max(2, int(start * row.low)))
    high = max(start, int(min(start * row.high, row.most or start * row.high)))
    return Range(low=low, high=high) if low < high else None
