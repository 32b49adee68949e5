"""The result of a fit, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..outcomes import Tier, TierUse
from ..values import Knobs, Record, Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Over whole optimizer steps, all ranks together; tokens are None when a sample has no fixed length."""

    samples_per_second: float
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a fit found. `rung`, `knobs`, `ds_config` and `throughput` are None when nothing fits.

    memory: the winner's peaks; a tier that was not measured is absent.
    reasons: rung (or a variant of one) → why it was left or chosen; "grow", "tune", "accumulate" and "certify" → why
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
