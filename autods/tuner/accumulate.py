"""More micro batches a step, where the user left the global batch open: what an optimizer step costs once (the
optimizer, and what the ranks exchange) is shared by more samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config.profiles import AccumulateLimits
from ..types import Fit, Record, Run, Steps
from .comparison import Score
from .forecasts import Foresight
from .trials import asked, fits_within, paced, step_s_of

_SURELY_FITS = 0.5  # of the memory; gradients that are kept between micro batches are less than all that lies there now
_LONGER_STEPS = 2  # times what timing may take: so long a step of several micro batches may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """best: the start, or the same with more micro batches a step. reason: a sentence; None: nothing was tried."""

    best: Record
    reason: str | None = None


def accumulate(
    start: Record,
    run: Run,
    *,
    limits: AccumulateLimits,
    steps: Steps,
    world_size: int,
    noise: float,
    usable_bytes: float,
    foresight: Foresight,
    score: Score,
) -> Accumulated:
    """One trial of as many micro batches a step as limits and time allow, kept where it gains `limits.gain`.

    Where the start's trial saw how much of a step the optimizer takes, that says what is gained at least, and better
    than two trials that a busy machine ran one after the other: then the trial only has to be no slower than `noise`.
    Nothing is tried where a trial is mostly something else than steps: its model is so small that they say little.
    """
    had = start.trial.knobs.accumulation
    if had > 1:
        return Accumulated(best=start, reason=_said_of(start, had))
    many = _how_many(step_s_of(start), limits.most, _LONGER_STEPS * steps.budget_s)
    if many < 2 or not _is_mostly_steps(start):
        return Accumulated(best=start)
    sure = _sure_gain(start, many)
    if sure is not None and sure < limits.gain and world_size == 1:  # else what ranks exchange may be worth more
        return Accumulated(best=start, reason=f"{many} micro batches a step would be {sure:.2f} times as fast as one")
    trial = replace(
        start.trial,
        knobs=replace(start.trial.knobs, accumulation=many),
        purpose="grow",
        steps=paced(steps, many * step_s_of(start), least=2),
        repeat=0,
    )
    if not fits_within(start, usable_bytes * _SURELY_FITS):
        forecast = foresight.forecast(trial)
        if forecast is not None and forecast.verdict == "cannot_fit":
            return Accumulated(best=start, reason=f"{many} micro batches a step cannot fit by the forecast")
    record = asked(trial, run)[-1]
    if not fits_within(record, usable_bytes):
        return Accumulated(best=start, reason=f"{many} micro batches a step do not fit with the headroom")
    ratio = score(record) / score(start)
    said = f"{many} micro batches a step were measured to be {ratio:.2f} times as fast as one"
    if sure is not None:
        said += f", and are {sure:.2f} times by the optimizer's share of a step"
    if ratio >= limits.gain or (sure is not None and sure >= limits.gain and ratio >= 1 - noise):
        return Accumulated(best=record, reason=said)
    return Accumulated(best=start, reason=f"{said}: {limits.gain:g} counts")


def _how_many(step_s: float, most: int, longest_s: float) -> int:
    """The largest power of two of them that take no longer."""
    many = 1
    while 2 * many <= most and 2 * many * step_s <= longest_s:
        many *= 2
    return many


def _said_of(record: Record, many: int) -> str | None:
    """Why it has more than one."""
    assert isinstance(record.outcome, Fit)
    share = record.outcome.timing.update_share
    if share is None:
        return None
    alone = many * share / (1 + (many - 1) * share)  # of a step of one
    return f"{many} micro batches a step share the optimizer's part, which is {alone:.1%} of a step of one"


def _sure_gain(record: Record, many: int) -> float | None:
    """How many times as fast so many micro batches a step are, by what the optimizer takes of one; None: not seen."""
    assert isinstance(record.outcome, Fit)
    share = record.outcome.timing.update_share
    return None if share is None else _gain_of(share, many)


def _gain_of(share: float, many: int) -> float:
    """share: what the optimizer takes of a step of one micro batch."""
    return 1 / (1 - min(share, 0.99) * (1 - 1 / many))


def _is_mostly_steps(record: Record) -> bool:
    outcome = record.outcome
    return isinstance(outcome, Fit) and 2 * outcome.timing.steps_s >= record.seconds
