"""The results of `autods fit`, `plan` and `probe` as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..forecast.values import RungForecast
from ..requests import Site
from ..types import Device, Knobs, ModelFacts, Record, Scalar, Skipped, Tier, TierUse, WorkloadSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Over whole optimizer steps, all ranks together; tokens are None when a sample has no fixed length."""

    samples_per_second: float
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a fit found. `rung`, `knobs`, `ds_config` and `throughput` are None when nothing fits.

    memory: the winner's peaks; a tier that was not measured is absent.
    reasons: rung (or a variant of one) → why it was left or chosen; "grow", "tune" and "certify" → why
    these stopped; "batch" → how many samples an optimizer step trains on, and why.
    importances: tuned key → share of the variation in throughput.
    closest: when nothing fits, {"rung", "missing_bytes", "exact"} of the rung that came nearest; missing_bytes is a
    lower bound unless exact, and None when it is not known.
    question: what was asked: workload, gpus, device, device_bytes, threads (of a rank), global_batch,
    profile, ladder (names in order).
    """

    status: Literal["fit", "nothing_fits"]
    rung: str | None = None
    knobs: Knobs | None = None
    ds_config: Mapping[str, Any] | None = None
    throughput: Throughput | None = None
    memory: Mapping[Tier, TierUse] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    forecast: tuple[Mapping[str, Any], ...] = ()
    trials: tuple[Record, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    importances: Mapping[str, float] = field(default_factory=dict)
    largest_micro_batch: int | None = None
    closest: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    question: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    out: str = ""


Status = Literal["fits", "tight", "nothing_fits", "not_forecast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteForecast:
    """What is said of the rungs on one kind of machine, fastest first.

    to_try: those that could not be forecast and may fit; a fit tries them.
    """

    site: Site
    rungs: tuple[RungForecast, ...]
    to_try: tuple[str, ...] = ()

    @property
    def best(self) -> RungForecast | None:
        """The fastest rung that fits, else the fastest that may."""
        by_verdict = [[rung for rung in self.rungs if rung.verdict == verdict] for verdict in ("fits", "tight")]
        return next((rungs[0] for rungs in by_verdict if rungs), None)

    @property
    def best_rung(self) -> str | None:
        """Its name."""
        return self.best.rung if self.best else None

    @property
    def status(self) -> Status:
        """Whether anything fits."""
        if self.best is None:
            return "not_forecast" if self.to_try else "nothing_fits"
        return "fits" if self.best.verdict == "fits" else "tight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a plan found, machine by machine, smallest device first.

    assumed: what nobody said and the answer depends on, in sentences; each rung adds its own. zero_init: stage 3 was
    built under `deepspeed.zero.Init`.
    """

    sites: tuple[SiteForecast, ...]
    source: WorkloadSource
    facts: ModelFacts
    device: Device = "cuda"
    checkpointing: bool = True
    zero_init: bool = False
    assumed: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """The best of all machines."""
        found = {site.status for site in self.sites}
        order: tuple[Status, ...] = ("fits", "tight", "not_forecast")
        return next((status for status in order if status in found), "nothing_fits")

    @property
    def all_assumed(self) -> tuple[str, ...]:
        """Once each, the plan's own first."""
        own = (said for site in self.sites for rung in site.rungs for said in rung.assumed)
        return tuple(dict.fromkeys((*self.assumed, *_of_workload(self), *own)))


def _of_workload(forecast: Forecast) -> list[str]:
    """What a workload's own defaults decide."""
    source, facts = forecast.source, forecast.facts
    said = []
    if source.seq_len is None and facts.tokens_per_sample is not None:
        why = "as build_batch makes them" if source.kind != "hf_config" else "the config's longest, at most 2048"
        said.append(f"sequences of {facts.tokens_per_sample} tokens, {why} (--seq-len)")
    if source.kind == "hf_config":
        said.append(f"task {source.task} (--task), random weights built in fp32")
    if not facts.checkpointing and source.kind != "script":  # a script's own affair
        said.append("no gradient checkpointing: the model has no gradient_checkpointing_enable()")
    return said


PROBE = "probe.json"
PROBE_CSV = "probe.csv"
CellStatus = Literal["fit", "out_of_memory", "failed", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast as the cell that all are compared with, with an interval of 95 %."""

    times: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """By more than the noise of the measurements."""
        return not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The largest micro batch.

    forecast: by the simulated device; None: none fits, or it could not be simulated. verified: the largest that trials
    showed to fit; None: none did, or there were no trials. refused: the smallest that trials showed not to fit.
    exact: nothing is left between the two. said: how they compare, in a sentence.
    """

    forecast: int | None = None
    verified: int | None = None
    refused: int | None = None
    exact: bool = False
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One combination of values, and what came of it.

    values: axis → value; None: not set. reason: why it did not fit or was not run. unheeded: axes that mean nothing
    here, and why. same_as: the cell whose trials these are. samples_per_second, tokens_per_second: medians of
    `repeats` trials; spread: their relative standard deviation. sent_bytes: by a rank in an optimizer step. memory: the
    highest peaks. missing_bytes: on `tier`, at least. trials: ids.
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
    checkpointing: bool | None = None
    capacity: Capacity | None = None
    trials: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a probe measured.

    status: nothing_fits when no cell did. compared: the number of the cell that ratios are to, and by which measure.
    notes: what holds of all cells, in sentences. question: what was asked.
    """

    status: Literal["done", "nothing_fits"]
    axes: Mapping[str, tuple[Scalar | None, ...]]
    cells: tuple[CellResult, ...]
    compared: tuple[int, Literal["samples", "tokens"]] | None = None
    notes: tuple[str, ...] = ()
    trials: tuple[Record, ...] = ()
    question: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    out: str = ""
