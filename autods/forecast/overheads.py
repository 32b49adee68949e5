"""What is held besides tensors: rows of configs/forecast/constants.toml, each with an interval and a source."""

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
from .values import EngineSpec, Interval, total

Held = Literal["inside", "outside"]
ShareOf = Literal["tensors", "activations", "reduce_bucket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """One row. Either `bytes` or `share` of `share_of`, as (low, typical, high); both a rank."""

    name: str
    tier: Tier
    device: Device
    held: Held
    source: str
    least_world_size: int = 1
    least_stage: int = 0
    needs: str | None = None
    bytes: tuple[str, ...] = ()
    share_of: ShareOf = "tensors"
    each: Literal["rank", "expert_group"] = "rank"  # what the bytes are of
    share: tuple[float, ...] = ()

    def counts(self, ask: EngineSpec) -> bool:
        """Whether the row holds for this engine."""
        zero = ask.ds_config.get("zero_optimization") or {}
        default = overlaps_communication(ask) if self.needs == "overlap_comm" else False
        needed = self.needs is None or bool(zero.get(self.needs, default))
        large = ask.world_size >= self.least_world_size and zero.get("stage", 0) >= self.least_stage
        return self.device == ask.device and large and needed

    def interval(self, of: Mapping[str, int]) -> Interval:
        """Bytes; `of`: what shares are taken of, bytes, and the number of groups. Raises ValueError for no bytes."""
        if self.bytes:
            times = 1 if self.each == "rank" else of.get("expert_groups", 0)
            low, peak, high = (0 if text == "0" else times * parse_bytes(text) for text in self.bytes)
        else:
            low, peak, high = (int(share * of.get(self.share_of, 0)) for share in self.share)
        return Interval(low_bytes=low, peak_bytes=peak, high_bytes=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """The rows, and how sure a forecast is before any trial: relative standard error, and the least half-width."""

    rows: tuple[Overhead, ...]
    spread: Mapping[str, float]
    least: Mapping[str, float]

    def of(self, ask: EngineSpec, tier: Tier, held: Held, of: Mapping[str, int]) -> Interval:
        """The sum of what counts, bytes a rank."""
        rows = (row for row in self.rows if row.tier == tier and row.held == held and row.counts(ask))
        return total(row.interval(of) for row in rows)


def overlaps_communication(ask: EngineSpec) -> bool:
    """Whether communication overlaps the backward pass: DeepSpeed's default is only to at stage 3."""
    zero = ask.ds_config.get("zero_optimization") or {}
    said = zero.get("overlap_comm")
    return bool(said) if said is not None else zero.get("stage") == 3


@cache
def read_overheads(path: Path | None = None) -> Overheads:
    """The shipped rows, or a file of one's own. Raises InputError that says which row is wrong."""
    path = path or data_folder("configs") / "forecast" / "constants.toml"
    file = read_checked(
        _File,
        read_toml(path),
        _check,
        name="constants",
        where=str(path),
        hint="compare with the shipped file",
        refusal="does not hold the forecast's constants",
    )
    return Overheads(rows=file.constant, spread=file.spread, least=file.least)


_KINDS = ("cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    spread: Mapping[str, float]
    least: Mapping[str, float]
    constant: tuple[Overhead, ...] = ()


def _check(file: _File) -> None:
    """Raises ValueError."""
    for row in file.constant:
        _check_row(row)
    for name, table in (("spread", file.spread), ("least", file.least)):
        if any(not 0 < table.get(kind, 0) < 1 for kind in _KINDS):
            raise ValueError(f"{name} needs a number between 0 and 1 for each of {', '.join(_KINDS)}")


def _check_row(row: Overhead) -> None:
    """Raises ValueError."""
    values = row.bytes or row.share
    if bool(row.bytes) == bool(row.share) or len(values) != 3:
        raise ValueError(f"{row.name!r} needs three bytes or three shares: low, typical, high")
    interval = row.interval({row.share_of: 10**9})
    if not 0 <= interval.low_bytes <= interval.peak_bytes <= interval.high_bytes:
        raise ValueError(f"{row.name!r}: low, typical and high are not in order")
