"""A machine as it was measured: the benchmark's readings become rates, links and shares that a forecast prices with."""

from __future__ import annotations

import datetime
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any

from ..config.catalogue import Links, Machine, Measured, Rates, Tflops, describe_this_machine
from ..forecast.predict.prices import Efficiency, read_constants
from ..rank.record import Reading, ReadingKind
from ..system.host import Hardware
from ..units import format_bytes

_G, _T = 1e9, 1e12
_MAIN = ("bf16", "fp16")  # the units of most of a step's matmuls: the first that the card has


@dataclass(frozen=True, slots=True)
class Readings:
    """The readings of one rank, while `ranks` ranks of the node measured the same."""

    all: Sequence[Reading]
    ranks: int

    def of(self, kind: ReadingKind, name: str | None = None) -> list[Reading]:
        """Those of a kind and of a name, by size."""
        return [each for each in self.all if each.kind == kind and name in (None, each.name)]

    def last(self, kind: ReadingKind, name: str | None = None) -> Reading | None:
        """The largest."""
        return next(reversed(self.of(kind, name)), None)

    def rate(self, kind: ReadingKind, name: str | None = None) -> float | None:
        """The bytes a second of the largest; None without one."""
        last = self.last(kind, name)
        return None if last is None else last.bytes / last.seconds


def describe_measured(readings: Readings, hardware: Hardware, *, has_nvlink: bool, software: str) -> Machine:
    """Return the machine of these cards, or of the ranks on this processor, as `--on FILE.toml` takes it.

    A peak of the catalogue stays, and what was reached is a share of it. Without one, or above it, the rate that was
    measured is the peak. What was not measured is as in the catalogue.
    """
    base = describe_this_machine(hardware.cards, hardware, measured=False)
    today = datetime.date.today().isoformat()
    name = re.sub(r"[^a-z0-9]+", "-", base.title.lower()).strip("-")[:50]
    source = f"{base.source}; measured on {today} by {readings.ranks} ranks, {software}"
    machine = replace(
        base,
        name=f"{name}-measured",
        driver_names=(base.title,) if hardware.cards else (),
        driver_capability=None,
        gpus=base.gpus or readings.ranks,
        device_bytes=base.device_bytes if hardware.cards else base.device_bytes // readings.ranks,
        source=source,
    )
    shipped = read_constants().efficiency
    rates, shares = _measure_rates(readings, machine, shipped, base.capability)
    links, more = _measure_links(readings, machine, shipped, has_nvlink=has_nvlink)
    host, others = _measure_host(readings, machine)
    reached = {name: round(value, 5) for name, value in {**shares, **more, **others}.items()}
    bf16 = machine.bf16 if rates is None else rates.tflops.bf16 is not None
    return replace(machine, bf16=bf16, rates=rates, links=links, measured=Measured(**reached), **host)


def _measure_rates(
    readings: Readings, machine: Machine, shipped: Efficiency, capability: tuple[int, int] | None
) -> tuple[Rates | None, dict[str, float]]:
    """The card's peaks, and the shares of them that were reached; as they were where matmuls or memory failed."""
    shares = {kind + "_us": each.seconds * 1e6 for kind in ("launch", "view") if (each := readings.last(kind))}
    known, streamed = machine.rates, readings.rate("kernel")
    fp32 = readings.last("matmul", "fp32")
    if streamed is None or (known is None and fp32 is None):
        return known, shares
    memory = max(streamed, known.memory_gb_per_s * _G if known else 0.0)
    shares["memory"] = streamed / memory
    if (reduced := readings.rate("reduction")) is not None:
        shares["reduction"] = reduced / memory
    computed: dict[str, float] = {}  # FLOP/s by units, without the time in which operands pass the memory
    for units in ("fp32", "tf32", "fp16", "bf16"):
        if (last := readings.last("matmul", units)) is not None:
            traffic_s = 0.0 if units == "fp32" else shipped.matmul_traffic * last.bytes / streamed
            computed[units] = last.flops / max(0.5 * last.seconds, last.seconds - traffic_s - shipped.kernel_us * 1e-6)
    if known is None and not machine.bf16:
        computed.pop("bf16", None)
    given: dict[str, float | None] = {} if known is None else asdict(known.tflops)
    units_here = [units for units in given if given[units] is not None] or list(computed)
    peaks = {units: max(given.get(units) or 0.0, computed.get(units, 0.0) / _T) for units in units_here}
    main = next((units for units in _MAIN if units in peaks and units in computed), None)
    if "fp32" in computed:
        shares["fp32_matmul"] = computed["fp32"] / (peaks["fp32"] * _T)
    changes: dict[str, Any] = {}
    if main is not None:
        changes["matmul_share"] = _as_share(computed[main] / (peaks[main] * _T))
    if (attended := readings.last("attention")) is not None:
        intensity = attended.flops / attended.bytes
        peak = peaks[main or "fp32"] * _T * intensity / (intensity + shipped.attention_half_intensity)
        changes["attention_share"] = _as_share(attended.flops / attended.seconds / peak)
    if known is None and capability is not None:
        changes["compute_capability"] = ".".join(map(str, capability))
    rates = known or Rates(multiprocessors=machine.cores or 1, memory_gb_per_s=0, tflops=Tflops(fp32=0), source="")
    return replace(rates, memory_gb_per_s=memory / _G, tflops=Tflops(**peaks), source=machine.source, **changes), shares


def _as_share(value: float) -> float:
    return round(min(1.0, value), 5)


def _measure_links(
    readings: Readings, machine: Machine, shipped: Efficiency, *, has_nvlink: bool
) -> tuple[Links | None, dict[str, float]]:
    """The links to the host and between ranks; as they were where copies failed and no catalogue has them."""
    shares: dict[str, float] = {}
    links = machine.links
    alone = {kind: rate for kind in ("copy", "pageable_copy") if (rate := readings.rate(kind, "alone")) is not None}
    if alone:
        fastest = max(alone.values())
        to_host = max(fastest, links.to_host_gb_per_s * _G if links else 0.0)
        names = {"copy": "pinned_copy", "pageable_copy": "pageable_copy"}
        shares |= {names[kind]: rate / to_host for kind, rate in alone.items()}
        together = readings.rate("copy", "all ranks") or readings.rate("pageable_copy", "all ranks")
        kind = "copy" if "copy" in alone else "pageable_copy"
        sharing = 1 if together is None else max(1, round(alone[kind] / together))
        if links is None:
            between = "NVLink" if has_nvlink else "measured"
            links = Links(
                over_pcie=not has_nvlink, between_gpus=between, between_gpus_gb_per_s=fastest / _G,
                to_host="measured", to_host_gb_per_s=fastest / _G,
            )  # fmt: skip
        # Without cards all ranks share the host's memory, whose bandwidth is measured with all of them.
        sharing = sharing if machine.driver_names else 1
        links = replace(links, to_host_gb_per_s=to_host / _G, to_host_shared_by=sharing)
    ring = _measure_ring(readings, shipped)
    if links is None or ring is None:
        return links, shares
    best, speed, latency_s = ring
    usual_s = (shipped.first_step_us + shipped.step_us * (readings.ranks - 1)) * 1e-6
    shares |= {name: getattr(shipped, name) * latency_s / usual_s for name in ("first_step_us", "step_us")}
    directions, name = (1, "pcie_between_gpus") if links.over_pcie else (2, "nvlink")
    known = links.between_gpus_gb_per_s * _G / directions if machine.links is not None else 0.0
    peak = max(best, known)
    shares[name] = speed / peak
    return replace(links, between_gpus_gb_per_s=directions * peak / _G), shares


def _measure_ring(readings: Readings, shipped: Efficiency) -> tuple[float, float, float] | None:
    """The bytes a second of a ring, those of the best collective and of the median one, and the median latency.

    The speed is the one that gives the largest message's seconds by the formula of `PriceList`, where the latency is
    the smallest message's.
    """
    by_name: dict[str, list[Reading]] = {}
    for each in readings.of("collective"):
        by_name.setdefault(each.name, []).append(each)
    if not by_name:
        return None
    latency_s = statistics.median(min(each.seconds for each in group) for group in by_name.values())
    speeds = []
    for group in by_name.values():
        last, fill = group[-1], shipped.pipeline * sqrt(latency_s)
        rest_s = max(0.1 * last.seconds, last.seconds - latency_s)
        bytes_s = ((sqrt(fill**2 + 4 * rest_s) - fill) / 2) ** 2
        speeds.append(last.bytes * (readings.ranks - 1) / readings.ranks / bytes_s)
    return max(speeds), statistics.median(speeds), latency_s


def _measure_host(readings: Readings, machine: Machine) -> tuple[dict[str, Any], dict[str, float]]:
    """The node's memory and disk, and the shares that were reached. Ranks share both, and measured at the same time."""
    shares: dict[str, float] = {}
    fields: dict[str, Any] = {}
    rows = (("core_gb_per_s", "one thread"), ("first_touch_gb_per_s", "first touch"))
    shares |= {name: rate / _G for name, row in rows if (rate := readings.rate("host", row)) is not None}
    rates = {"dram": readings.rate("host", "all threads"), "host_optimizer": readings.rate("host_optimizer")}
    sharers = max(readings.ranks, machine.sockets)
    node = {name: rate * sharers / _G for name, rate in rates.items() if rate is not None}
    if node:
        fields["dram_gb_per_s"] = peak = max([machine.dram_gb_per_s or 0.0, *node.values()])
        shares |= {name: rate / peak for name, rate in node.items()}
    if (read := readings.rate("nvme", "read")) is not None:
        fields["nvme_gb_per_s"] = peak = max(machine.nvme_gb_per_s or 0.0, read / _G)
        shares["nvme"] = read / _G / peak
    return fields, shares


_BETWEEN_RANKS = ("nvlink", "pcie_between_gpus", "first_step_us", "step_us")
_TO_HOST = ("pinned_copy", "pageable_copy")


def keep_earlier(machine: Machine, earlier: Machine) -> tuple[Machine, list[tuple[str, str]]]:
    """Return the machine with what an earlier measurement of it has and this one lacks; a name and a line for each.

    It keeps the links between more ranks, with their `gpus`, and the disk.
    """
    rows: list[tuple[str, str]] = []
    shares = machine.measured.known
    before, links = earlier.measured.known, earlier.links
    if links is not None and (earlier.gpus or 0) > (machine.gpus or 0) and before.keys() & set(_BETWEEN_RANKS):
        kept: tuple[str, ...] = _BETWEEN_RANKS if machine.links is not None else (*_BETWEEN_RANKS, *_TO_HOST)
        if machine.links is not None:
            links = replace(links, to_host=machine.links.to_host, to_host_gb_per_s=machine.links.to_host_gb_per_s)
        machine = replace(machine, links=links, gpus=earlier.gpus)
        shares = {name: value for name, value in shares.items() if name not in kept}
        shares |= {name: before[name] for name in kept if name in before}
        rows.append(("links", f"those between {earlier.gpus} cards are kept from an earlier measurement"))
    if "nvme" in before and "nvme" not in shares:
        machine = replace(machine, nvme_gb_per_s=earlier.nvme_gb_per_s)
        shares["nvme"] = before["nvme"]
        rows.append(("NVMe", "kept from an earlier measurement"))
    return replace(machine, measured=Measured(**shares)), rows


_TITLES: Mapping[ReadingKind, str] = {
    "kernel": "memory", "reduction": "reductions", "launch": "launch of an", "view": "view", "copy": "pinned copies",
    "pageable_copy": "pageable copies", "collective": "", "host": "host memory", "host_optimizer": "", "nvme": "NVMe",
}  # fmt: skip


def list_readings(readings: Readings) -> Iterator[tuple[str, str]]:
    """Yield a name and a result for each kind of work, such as ('matmul bf16', '8192: 702 TFLOP/s')."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in readings.all:
        title = f"{_TITLES.get(each.kind, each.kind)} {each.name}".strip()
        groups.setdefault((each.kind, title), []).append(_format_reading(each))
    for (_, title), results in groups.items():
        yield title, ", ".join(results)


def _format_reading(each: Reading) -> str:
    if each.kind in ("launch", "view"):
        return f"{each.seconds * 1e6:.3g} µs"
    if each.flops:
        return f"{each.size}: {each.flops / each.seconds / _T:.3g} TFLOP/s"
    size = f"{each.size:,}" if each.kind == "host_optimizer" else format_bytes(each.size)
    return f"{size}: {each.bytes / each.seconds / _G:.3g} GB/s"
