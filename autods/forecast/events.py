"""What a forecast tells while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..events import Note
from .values import RungForecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulating:
    """A micro batch of a rung is being simulated."""

    rung: str
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasted:
    """A rung is done on a machine; `done` of `total` rungs are."""

    machine: str
    forecast: RungForecast
    done: int
    total: int


ForecastEvent = Note | Simulating | Forecasted
ForecastListener = Callable[[ForecastEvent], None]
