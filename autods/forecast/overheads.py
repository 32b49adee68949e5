"""Memory besides tensors: rows of configs/forecast/constants.toml, each with an interval and a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ..schema import read_checked, read_toml
from ..system.host import data_folder
from ..types import Device, Tier
from ..units import parse_bytes
from .values import EngineSpec, Interval, sum_intervals

Place = Literal["inside", "outside"]  # of what torch allocates
ShareOf = Literal["tensors", "activations", "reduce_bucket"]
_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """One row: `bytes`, or a `share` of `share_of`, as (low, typical, high) a rank.

    The row counts for engines of this device with at least these ranks and stage, where `needs` is true in
    zero_optimization. `each` says what the bytes are counted for.
    """

    name: str
    tier: Tier
    device: Device
    held: Place
    source: str
    least_world_size: int = 1
    least_stage: int = 0
    needs: str | None = None
    bytes: tuple[str, ...] = ()
    share_of: ShareOf = "tensors"
    each: Literal["rank", "expert_group"] = "rank"
    share: tuple[float, ...] = ()

    def applies_to(self, spec: EngineSpec) -> bool:
        """Return whether the row counts for this engine."""
        zero = spec.ds_config.get("zero_optimization") or {}
        default = overlaps_communication(spec) if self.needs == "overlap_comm" else False
        needed = self.needs is None or bool(zero.get(self.needs, default))
        large = spec.world_size >= self.least_world_size and zero.get("stage", 0) >= self.least_stage
        return self.device == spec.device and large and needed

    def interval(self, amounts: Mapping[str, int]) -> Interval:
        """Return bytes a rank. `amounts` has the bytes that shares are taken of, and the number of expert groups.

        Raises ValueError for text that is no number of bytes.
        """
        if self.bytes:
            count = 1 if self.each == "rank" else amounts.get("expert_groups", 0)
            low, peak, high = (0 if text == "0" else count * parse_bytes(text) for text in self.bytes)
        else:
            low, peak, high = (int(share * amounts.get(self.share_of, 0)) for share in self.share)
        return Interval(low_bytes=low, peak_bytes=peak, high_bytes=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """The rows, and the certainty of a forecast before any trial, by device.

    `spread` is its relative standard error, and `least` the smallest half-width of its interval.
    """

    spread: Mapping[str, float]
    least: Mapping[str, float]
    constant: tuple[Overhead, ...] = ()

    def sum(self, spec: EngineSpec, tier: Tier, held: Place, amounts: Mapping[str, int]) -> Interval:
        """Return the sum of the rows that count for this engine, in bytes a rank."""
        rows = (row for row in self.constant if row.tier == tier and row.held == held and row.applies_to(spec))
        return sum_intervals(row.interval(amounts) for row in rows)


def overlaps_communication(spec: EngineSpec) -> bool:
    """Return whether communication overlaps the backward pass, which is DeepSpeed's default at stage 3 only."""
    zero = spec.ds_config.get("zero_optimization") or {}
    setting = zero.get("overlap_comm")
    return bool(setting) if setting is not None else zero.get("stage") == 3


@cache
def read_overheads(path: Path | None = None) -> Overheads:
    """Read the shipped rows or another file. Raises InputError that says which row is wrong."""
    path = path or data_folder("configs") / "forecast" / "constants.toml"
    return read_checked(
        Overheads,
        read_toml(path),
        _check,
        name="constants",
        where=str(path),
        hint="compare with the shipped file",
        refusal="does not hold the forecast's constants",
    )


def _check(overheads: Overheads) -> None:
    for row in overheads.constant:
        _check_row(row)
    for name, table in (("spread", overheads.spread), ("least", overheads.least)):
        if any(not 0 < table.get(device, 0) < 1 for device in _DEVICES):
            raise ValueError(f"{name} needs a number between 0 and 1 for each of {', '.join(_DEVICES)}")


def _check_row(row: Overhead) -> None:
    values = row.bytes or row.share
    if bool(row.bytes) == bool(row.share) or len(values) != 3:
        raise ValueError(f"{row.name!r} needs three bytes or three shares: low, typical, high")
    interval = row.interval({row.share_of: 10**9})
    if not 0 <= interval.low_bytes <= interval.peak_bytes <= interval.high_bytes:
        raise ValueError(f"{row.name!r}: low, typical and high are not in order")
