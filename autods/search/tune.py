"""Tune a rung's buckets and switches with Optuna. The study lies on disk, so that a killed fit goes on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..forecast.values import RungForecast
from ..ladder import Rung
from ..settings import TuneLimits
from ..values import Failed, Fit, OutOfMemory, Record, Run, Scalar, Steps
from .ask import fits_within, samples_per_second
from .confirm import confirm
from .foresight import BLIND, Foresight, lacking_bytes
from .space import Space, space_of
from .study import FAILURE, distributions, importances_of, open_study, told_of

if TYPE_CHECKING:  # optuna is imported where it is used: reading this module stays cheap
    import optuna

_STARTUP_TRIALS = 3  # the start and two at random; from then on the GP knows more than chance
_LEAST_EXCESS = 0.01  # share of the limit by which an out-of-memory at least overshot, for want of a figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What tuning found: `best` is the start unless another was confirmed to be faster.

    importances: key → share of the variation in samples/s, empty when there are too few trials to tell.
    """

    best: Record
    records: tuple[Record, ...]
    importances: Mapping[str, float]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """How an outcome is told to the sampler."""

    start: Record
    limit_bytes: int
    headroom: float
    foresight: Foresight

    @property
    def usable_bytes(self) -> float:
        return self.limit_bytes * (1 - self.headroom)

    def tell(self, study: optuna.Study, asked: optuna.Trial, answer: Record | RungForecast) -> None:
        """The constraint is the share of the limit beyond the usable memory: ≤ 0 leaves the headroom."""
        from optuna.trial import TrialState

        if isinstance(answer, RungForecast):  # not run: it cannot fit
            self._tell_full(study, asked, lacking_bytes(answer))
            return
        match answer.outcome:
            case Fit() as fit:
                margin = (fit.device_peak_bytes - self.usable_bytes) / self.limit_bytes
                asked.set_constraint("device_margin", max(margin, _LEAST_EXCESS) if fit.alloc_retries else margin)
                study.tell(asked, fit.samples_per_second)
            case OutOfMemory() as out:
                # What the last allocation lacked says little of what the trial lacks; its forecast says more.
                forecast = self.foresight.forecast(answer.trial)
                device = None if forecast is None else forecast.memory.get("device")
                foreseen = 0 if device is None else device.peak_bytes - self.limit_bytes
                self._tell_full(study, asked, max(out.missing_bytes or 0, foreseen))
            case Failed() as failure:
                asked.set_user_attr(FAILURE, failure.evidence[:200])
                study.tell(asked, state=TrialState.FAIL)

    def _tell_full(self, study: optuna.Study, asked: optuna.Trial, lacking_bytes: int) -> None:
        excess = max(lacking_bytes / self.limit_bytes, _LEAST_EXCESS)
        asked.set_constraint("device_margin", self.headroom + excess)
        # Running out says nothing of speed. A speed of 0 would dig a hole into the GP's picture of samples/s and spoil
        # the good points beside it; the start's speed neither attracts nor repels, and the constraint alone keeps the
        # search away. (Told as failed, the GP would not see the point at all.)
        study.tell(asked, samples_per_second(self.start))


def tune(
    start: Record,
    run: Run,
    *,
    rung: Rung,
    limits: TuneLimits,
    steps: Steps,
    limit_bytes: int,
    headroom: float,
    seed: int,
    study_path: Path,
    current: Mapping[str, Scalar] | None = None,
    foresight: Foresight = BLIND,
) -> Tuned:
    """Search `rung.tune` around `start` for more samples per second within the usable memory, in limits.trials trials.

    The proposals are a function of the seed and of the outcomes before, so that a search that was killed and goes on
    proposes what it would have proposed. current: what the start's DeepSpeed config says of keys that its settings
    leave out. A proposal that cannot fit by its forecast is not run. Raises InputError when the study on disk is
    damaged.
    """
    space = space_of(rung, start.trial.knobs.settings, current or {})
    if not space.dimensions or limits.trials < 1:
        why = "no trials were granted for tuning" if space.dimensions else f"{rung.name} has nothing to tune"
        return Tuned(best=start, records=(), importances={}, reason=why)
    judge = _Judge(start=start, limit_bytes=limit_bytes, headroom=headroom, foresight=foresight)
    knobs = start.trial.knobs
    study = open_study(study_path, f"{rung.name}, micro batch {knobs.micro_batch} × {knobs.accumulation}", space)
    answers = _search(study, space, judge, run, steps, trials=limits.trials, seed=seed)
    records = tuple(answer for answer in answers.values() if isinstance(answer, Record) and answer is not start)
    foretold = sum(isinstance(answer, RungForecast) for answer in answers.values())
    faster = [
        record
        for record in records
        if fits_within(record, judge.usable_bytes) and samples_per_second(record) > samples_per_second(start)
    ]
    importances = importances_of(study)
    said = f"{len(records)} other settings of {rung.name} were tried"
    said += f" ({foretold} more cannot fit by the forecast)" if foretold else ""
    if not faster:
        return Tuned(best=start, records=records, importances=importances, reason=f"{said}, none was faster")
    leader = max(faster, key=samples_per_second)
    final = confirm(start, leader, run, gain=limits.gain, turns=limits.turns, usable_bytes=judge.usable_bytes)
    reason = f"{said}; {final.reason}"
    return Tuned(best=final.best, records=records + final.records, importances=importances, reason=reason)


def _search(
    study: optuna.Study, space: Space, judge: _Judge, run: Run, steps: Steps, *, trials: int, seed: int
) -> dict[str, Record | RungForecast]:
    """Ask and tell until the start and `trials` more are told; what became of each proposal, the start first."""
    from optuna.samplers import GPSampler

    answers: dict[str, Record | RungForecast] = {_key(space.start): judge.start}

    def answer(proposal: Mapping[str, Any]) -> Record | RungForecast:
        settings = space.settings(proposal)
        key = _key(settings)
        if key not in answers:  # rounding and a confident sampler propose the same again: told, not run
            knobs = replace(judge.start.trial.knobs, settings={**judge.start.trial.knobs.settings, **settings})
            trial = replace(judge.start.trial, knobs=knobs, purpose="tune", steps=steps, repeat=0)
            forecast = judge.foresight.forecast(trial)
            cannot_fit = forecast is not None and forecast.verdict == "cannot_fit"
            answers[key] = forecast if forecast is not None and cannot_fit else run(trial)
        return answers[key]

    for past in told_of(study):
        answer(past.params)  # from the journal: these were run
    while (told := len(told_of(study))) <= trials:
        # A new sampler each time, seeded by the position: no state but the study's has to survive a kill.
        study.sampler = GPSampler(seed=seed + told, n_startup_trials=_STARTUP_TRIALS, warn_independent_sampling=False)
        asked = study.ask(distributions(space))
        judge.tell(study, asked, answer(asked.params))
    return answers


def _key(settings: Mapping[str, Scalar]) -> str:
    return json.dumps(dict(settings), sort_keys=True)
