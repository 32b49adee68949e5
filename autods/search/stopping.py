"""Why growing the micro batch stops, each reason as a sentence for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..outcomes import Failed, Fit, OutOfMemory, first_line
from ..units import show_bytes
from ..values import Record
from .ask import samples_per_second
from .bounds import well_below
from .memory_line import LONGEST_JUMP, Ground


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """is_limit: larger micro batches do not run; otherwise the largest was not looked for any further."""

    is_limit: bool
    reason: str


def when_saturated(records: Sequence[Record], ground: Ground, sizes: Sequence[int], gain: float) -> Stop | None:
    """The last trial grew the micro batch twofold or more, and throughput by less than `gain`."""
    timed = {
        record.trial.knobs.micro_batch: samples_per_second(record)
        for record in records
        if isinstance(record.outcome, Fit)
    }
    last = records[-1].trial.knobs.micro_batch if records else 0
    before = well_below(timed, last)
    if before is None or last not in timed or timed[last] >= gain * timed[before]:
        return None
    most = sizes[-1] if ground.bad is None else ground.bad - 1
    most = max(ground.good, int(min(ground.allowed() or ground.good, most)))
    ratio = timed[last] / timed[before]
    return Stop(
        is_limit=False,
        reason=f"micro batch {last} is only {ratio:.2f} times as fast as {before}; memory would allow about {most}",
    )


def when_found(ground: Ground, sizes: Sequence[int], records: Sequence[Record], whole_share: int | None) -> Stop:
    """There is no micro batch left to try. whole_share: a rank's part of the global batch, if there is one."""
    usable = show_bytes(ground.usable_bytes)
    good = ground.good
    if ground.peaks[good] > ground.usable_bytes:
        return Stop(
            is_limit=True, reason=f"micro batch 1 already needs {show_bytes(ground.peaks[1])}, usable: {usable}"
        )
    if ground.bad is not None:
        last = [record for record in records if record.trial.knobs.micro_batch == ground.bad][-1]
        return Stop(is_limit=True, reason=f"micro batch {ground.bad} {what_happened(last, usable)}")
    if good == sizes[-1]:
        why = (
            "is a rank's whole share of the global batch" if good == whole_share else "is the largest that may be tried"
        )
        return Stop(is_limit=False, reason=f"micro batch {good} {why}")
    allowed, following = ground.allowed(), ground.between(sizes)[0]
    if allowed is None or (allowed >= following > LONGEST_JUMP * good):
        why = "is too far above to be foreseen"
        return Stop(is_limit=False, reason=f"{following}, the next divisor of a rank's share of the batch, {why}")
    return Stop(
        is_limit=True, reason=f"by the line through the measured peaks micro batch {int(allowed)} fills the {usable}"
    )


def when_spent(ground: Ground, most_trials: int) -> Stop:
    """The trials ran out before the gap was closed."""
    above = "" if ground.bad is None else f" and {ground.bad} does not"
    return Stop(is_limit=False, reason=f"all {most_trials} trials are spent: micro batch {ground.good} fits{above}")


def when_slow(micro_batch: int, seconds: float, budget_s: float) -> Stop:
    """Even the next size would take too long to be timed."""
    said = (
        f"a step of micro batch {micro_batch} would take about {seconds:.1f} s, more than the {budget_s:.1f} s that"
        " timing may take"
    )
    return Stop(is_limit=False, reason=said)


def step_seconds(records: Sequence[Record]) -> dict[int, float]:
    """Median seconds of an optimizer step by micro batch; the walk's one step is good enough to foresee by."""
    return {
        record.trial.knobs.micro_batch: median(record.outcome.step_s)
        for record in records
        if isinstance(record.outcome, Fit) and record.outcome.step_s
    }


def predicted_s(times: Mapping[int, float], micro_batch: int) -> float:
    """Seconds of a step by the line through the two largest measured micro batches.

    One point does not tell which part stays (nearly all, with an optimizer on the CPU): that is hopeful, half of it.
    So it is where noise hides that a step becomes longer: no line is believed that says less.
    """
    if not times:
        return 0.0
    largest = max(times)
    hopeful = times[largest] * max(1.0, micro_batch / largest / 2)
    if len(times) == 1:
        return hopeful
    before = sorted(times)[-2]
    each = max(0.0, (times[largest] - times[before]) / (largest - before))
    return max(hopeful, times[largest] + each * (micro_batch - largest))


def what_happened(record: Record, usable: str) -> str:
    """What a trial that is no good came to. usable: the memory that may be used, in words."""
    match record.outcome:
        case Fit(alloc_retries=int(retries)) if retries:
            return f"fits, but its allocator ran full {retries} times in the steps"
        case Fit() as fit:
            return f"needs {show_bytes(fit.device_peak_bytes)}, which does not leave the headroom (usable: {usable})"
        case OutOfMemory() as out:
            return f"ran out of {out.tier} memory"
        case Failed() as failure:
            return f"failed ({failure.failure}: {first_line(failure.evidence)}): this caps the micro batch only"
