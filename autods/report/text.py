"""How values are written: outcomes, sizes, rates and times as words; verdicts and statuses as marks."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

from ..forecast.values import TierForecast
from ..types import Failed, Fit, Knobs, Outcome, OutOfMemory, Phase, Scalar, Tier, TierUse, first_line
from ..units import choose_unit, format_bytes, format_in
from .document import StyledLine, line


def format_outcome(outcome: Outcome, *, counts: bool = True) -> str:
    """'out of memory on device, rank 1, init: wanted 124.5 MiB, 35.1 MiB free of 416.0 MiB'.

    One that ran but does not count, since it left no headroom, does not read 'fits'.
    """
    match outcome:
        case Fit():
            device = outcome.find_use("device")
            peak = f"{format_use(device)}, " if device else ""
            times = format_number_of(outcome.alloc_retries, "time")
            retries = f", its allocator ran full {times}" if outcome.alloc_retries else ""
            examined = ", examined" if outcome.examined is not None else ""
            word = "fits" if counts else MARKS["no_headroom"].word
            return f"{word}: {peak}{format_rate(outcome.samples_per_second)} samples/s{retries}{examined}"
        case OutOfMemory():
            lack = f"out of {outcome.lacked}" if outcome.tier == "nvme" else f"out of memory on {outcome.tier}"
            return f"{lack}, {_format_place(outcome)}: {format_shortage(outcome)}"
        case Failed():
            kind = "" if outcome.failure == "unknown" else f" ({outcome.failure.replace('_', ' ')})"
            return f"failed{kind}, {_format_place(outcome)}: {first_line(outcome.evidence)}"


def format_shortage(outcome: OutOfMemory) -> str:
    """'wanted 124.5 MiB, 35.1 MiB free of 416.0 MiB'; the evidence when the numbers are not known."""
    limit = f" of {format_bytes(outcome.limit_bytes)}" if outcome.limit_bytes is not None else ""
    free = f"{format_bytes(outcome.free_bytes)} free{limit}" if outcome.free_bytes is not None else ""
    if outcome.wanted_bytes is None:
        return ", ".join(part for part in (first_line(outcome.evidence).rstrip("."), free) if part)
    return f"wanted {format_bytes(outcome.wanted_bytes)}{', ' + free if free else limit}"


def format_use(use: TierUse) -> str:
    """'380.0 / 416.0 MiB': peak and limit in the limit's unit; the peak alone where nothing limits it.

    A card whose allocator held a cache besides reads '79.2 / 80.0 GiB (71.0 in use)'.
    """
    if use.limit_bytes is None:
        return format_bytes(use.peak_bytes)
    name, factor = choose_unit(use.limit_bytes)
    if use.peak_bytes * 10 < factor:  # 3.0 MiB / 62.8 GiB would read 0.0 / 62.8 GiB
        return f"{format_bytes(use.peak_bytes)} / {format_bytes(use.limit_bytes)}"
    digits = 1 if factor > 1 else 0
    peak, limit = (f"{size / factor:.{digits}f}" for size in (use.peak_bytes, use.limit_bytes))
    in_use = peak if use.in_use_bytes is None else f"{use.in_use_bytes / factor:.{digits}f}"
    return f"{peak} / {limit} {name}" + ("" if in_use == peak else f" ({in_use} in use)")


def format_predicted(predicted: TierForecast) -> str:
    """'28.3 (27.1–30.2) / 80.0 GiB': in the unit of the high bound, so no figure has four digits before its point.

    The limit has a unit of its own where it is far larger.
    """
    sizes = (predicted.low_bytes, predicted.peak_bytes, predicted.high_bytes)
    unit, factor = choose_unit(max(sizes))
    low, peak, high = (format_in(size, factor) for size in sizes)
    interval = f" ({low}–{high})" if low != high else ""
    if not predicted.limit_bytes:
        return f"{peak}{interval} {unit}"
    if choose_unit(predicted.limit_bytes)[0] == unit:
        return f"{peak}{interval} / {predicted.limit_bytes / factor:.1f} {unit}"
    return f"{peak}{interval} {unit} / {format_bytes(predicted.limit_bytes)}"


def format_rate(per_second: float) -> str:
    """Three significant digits, no exponent: '0.000012', '0.0412', '12.3', '1,234'. It serves any figure."""
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{Decimal(f'{per_second:.3g}'):f}"


def format_seconds(seconds: float) -> str:
    """'4.2 s', '3 min 20 s', '2 h 5 min'."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_step_seconds(seconds: float) -> str:
    """'0.0567 s', '1.25 s', '3 min 20 s': the time of an optimizer step, which may be milliseconds."""
    return f"{format_rate(seconds)} s" if seconds < 9.995 else format_seconds(seconds)


class TimeUnit(NamedTuple):
    """A unit of a long time, as a sentence and the head of a column name it."""

    name: str
    seconds: int


TIME_UNITS = (TimeUnit("days", 86_400), TimeUnit("hours", 3600), TimeUnit("minutes", 60), TimeUnit("seconds", 1))


def choose_time_unit(seconds: float) -> TimeUnit:
    """The largest unit of which there is at least one, else seconds: 1740 → minutes."""
    return next((unit for unit in TIME_UNITS if seconds >= unit.seconds), TIME_UNITS[-1])


def format_about(seconds: float) -> str:
    """'about 40 s', 'about 3 min', 'about 2 h 10 min': no more digits than an estimate has."""
    if seconds < 95:
        return f"about {max(1, round(seconds / 10)) * 10} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(round(minutes, -1), 60)
    return f"about {hours} h {rest} min" if minutes >= 60 else f"about {minutes} min"


def format_share(share: float) -> str:
    """0.0041 → '0.41 %'."""
    return f"{format_rate(100 * share)} %" if share else "0 %"


def format_number_of(number: int, noun: str) -> str:
    """'1 step', '3 steps', '10,000 trials'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_value(value: Scalar | None) -> str:
    """A setting as a user writes it: 'on', '1,000,000', 'not set'."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def format_batch(knobs: Knobs, ranks: int, name: str = "rank") -> str:
    """'micro batch 4 × accumulation 2 × 2 ranks = global batch 16'. For a pipeline `name` is 'replica'."""
    parts = f"micro batch {knobs.micro_batch} × accumulation {knobs.accumulation} × {format_number_of(ranks, name)}"
    return f"{parts} = global batch {knobs.train_batch(ranks)}"


def format_ranks(count: int, device: str) -> str:
    """'2 cpu ranks', '1 cuda rank'."""
    return format_number_of(count, f"{device} rank")


def format_phase(phase: Phase, step: int) -> str:
    """'backward, step 2'; 'init', which belongs to no step."""
    return f"{phase}, step {step}" if phase in ("forward", "backward", "step") and step else phase


def _format_place(outcome: OutOfMemory | Failed) -> str:
    rank = f"rank {outcome.rank}" if outcome.rank >= 0 else "node"
    return f"{rank}, {format_phase(outcome.phase, outcome.step)}"


class Mark(NamedTuple):
    """A sign, its meaning in words, and its style."""

    sign: str
    word: str
    style: str

    @property
    def words(self) -> StyledLine:
        """'✓ fits', coloured."""
        return line((f"{self.sign} {self.word}", self.style))


# By the kind of an outcome, the verdict of a forecast or the status of a probe's cell.
MARKS: Mapping[str, Mark] = {
    "fit": Mark("✓", "fits", "green"),
    "fits": Mark("✓", "fits", "green"),
    "no_headroom": Mark("~", "no headroom", "yellow"),  # it ran, and does not count
    "tight": Mark("~", "tight", "yellow"),
    "out_of_memory": Mark("✗", "out of memory", "yellow"),
    "cannot_fit": Mark("✗", "cannot fit", "red"),
    "failed": Mark("!", "failed", "red"),
    "skipped": Mark("–", "skipped", "dim"),
    "refused": Mark("–", "refused", "dim"),
    "not_applicable": Mark("–", "not applicable", "dim"),
}
TIER_NAMES: Mapping[Tier, str] = {
    "device": "device memory",
    "host": "host memory",
    "pinned": "pinned memory",
    "shm": "shared memory (/dev/shm)",
    "nvme": "disk space (NVMe)",
}
