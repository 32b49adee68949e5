"""The result of `autods probe`: every cell of the grid with its measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...system.host import Hardware
from ...types import Record, Scalar, Steps, Tier, TierUse
from .shown import Shown

CellStatus = Literal["fit", "out_of_memory", "failed", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The speed of a cell divided by that of the reference cell, with its 95 % interval."""

    times: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1: the two speeds differ by more than noise."""
        return not self.low <= 1 <= self.high

    def differs_from(self, other: Ratio) -> bool:
        """Whether the speeds of two cells, by their ratios to one reference, differ by more than noise.

        Intervals are as wide as the turns are few. That of the two cells is as wide as the wider one.
        """
        margin = max(self.high / self.times, other.high / other.times)
        return max(self.times / other.times, other.times / self.times) > margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The largest micro batch of a cell.

    `forecast` is that of the simulated device. It is None when no size fits or the cell could not be simulated.
    `verified` is the largest size that fitted in a trial, `refused` the smallest that did not.
    `exact` is true if no size lies between the two. `explanation` compares the three in one sentence.
    """

    forecast: int | None = None
    verified: int | None = None
    refused: int | None = None
    exact: bool = False
    explanation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One combination of values and its measurements.

    `values` maps an axis to its value; None is a value that is not set. `reason` says why the cell did not fit or was
    not run. `unheeded` maps an axis that has no effect here to the reason. `same_as` is the cell whose trials are
    shared. The samples and tokens per second are medians of `repeats` trials, and `spread` is their relative standard
    deviation. `sent_bytes` counts what a rank sends in an optimizer step. `memory` has the highest peaks.
    `missing_bytes` is a lower bound, on `tier`. `trials` are ids.
    """

    number: int
    values: Mapping[str, Scalar | None]
    status: CellStatus
    reason: str = ""
    unheeded: Mapping[str, str] = field(default_factory=dict)
    same_as: int | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    spread: float | None = None
    ratio: Ratio | None = None
    repeats: int = 0
    step_s: float | None = None
    sent_bytes: int | None = None
    memory: Mapping[Tier, TierUse] = field(default_factory=dict)
    tier: Tier | None = None
    missing_bytes: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    checkpointing: bool | int | None = None
    capacity: Capacity | None = None
    trials: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuestion:
    """What a probe was asked, besides its axes. `machine` is the one that a probe without trials forecasts for."""

    workload: str
    gpus: int
    nodes: int
    device: str
    device_bytes: int
    global_batch: int | None
    precision: str
    repeats: int
    steps: Steps
    capacity: bool
    parallel_trials: int
    forecast_only: bool
    machine: str | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProbeReport(Shown):
    """The result of a probe.

    `compared` is the number of the reference cell of all ratios, and their measure.
    `notes` are sentences that hold for all cells. `warnings` are those of the machine, while it was measured.
    """

    status: Literal["done", "nothing_fits"]
    axes: Mapping[str, tuple[Scalar | None, ...]]
    cells: tuple[CellResult, ...]
    compared: tuple[int, Literal["samples", "tokens"]] | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    trials: tuple[Record, ...] = ()
    question: ProbeQuestion
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Hardware | None = None
    seconds: float = 0.0
    out: str = ""
