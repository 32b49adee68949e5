"""Tune buckets and other knobs of a rung with Optuna."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.deepspeed import get_key
from ..config.rungs import Rung
from ..events import Note
from ..forecast.values import RungForecast
from ..report.trial_names import config_name
from ..types import Failed, Fit, OutOfMemory, Record, Scalar, Trial
from ..units import format_factor
from .candidates import with_open_keys
from .comparison import PRIOR_NOISE, TURNS_WITHOUT_BUDGET, confirm_gain, usual_score
from .forecaster import lacking_bytes
from .trials import FitContext, fit_steps_to_budget, median_step_s, samples_per_second

if TYPE_CHECKING:
    import optuna

Sampler = Callable[[int], "optuna.samplers.BaseSampler"]
STARTUP = 5  # fewest trials before convergence counts: the start, the usual settings, a random one, two of the sampler
WAIT = 10  # trials in a row without gain that end the search
_STOP_GAIN = 0.01  # what they have to gain together
_RANDOM_UNTIL = 3  # trials: the start, the usual settings and a random one; then the GP knows more than chance
_MOST_LEADERS = 2  # that are measured again: a third costs more than it brings
_FEWEST_FOR_IMPORTANCE = 5  # trials that fitted
_PRICED_TRIALS = 3  # of the priced settings, the best by the forecast
_LEAST_EXCESS = 0.01  # share of the limit by which an out-of-memory counts as too large, where the amount is unknown


def gp_sampler(seed: int) -> optuna.samplers.BaseSampler:
    """The sampler that needs the fewest trials, by tests/benchmarks/samplers.py (44 searches, noise 2 % and 5 %).

    After 24 trials it is at 0.97 of the optimum; TPE is at 0.95 and random search at 0.92. A tenth of its trials run
    out of memory; with TPE it is a fourth, with random search a third.
    """
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed, n_startup_trials=_RANDOM_UNTIL, warn_independent_sampling=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of tuning. `best` is the start unless another config was confirmed to be faster.

    `importances` maps a key to its share of the score's variation; empty with too few trials.
    """

    best: Record
    importances: Mapping[str, float]
    reason: str


def tune(
    start: Record, context: FitContext, *, stop_gain: float = _STOP_GAIN, sampler: Sampler = gp_sampler
) -> TuneResult:
    """Search the rung's space around `start` for a higher score within the usable memory.

    Proposals depend on the seed and the outcomes before them only. So a search that was killed makes the same ones
    again, and the journal answers those that were run. A proposal that cannot fit by its forecast is not run. The
    search ends once it gains less than `stop_gain`, see `has_converged`; 0 spends all trials of the profile. The best
    settings are measured again with the start. `sampler` is called with a seed for each proposal.

    Nothing is tried where the card computes for nearly all of the start's step, so that no setting can gain what the
    profile asks for. Where step times are forecast and the profile says so, proposals are priced by forecasts, and only
    the few that promise most are run.
    """
    settings, score = context.settings, context.score
    if settings.profile.tune.trials < 1:
        return TuneResult(best=start, importances={}, reason="no trials were allowed for tuning")
    rung = with_open_keys(settings.rung(start.trial.rung), settings.site, context.facts)
    config = context.final_config(start.trial)
    current = {key: value for key in rung.tune if (value := get_key(config, key)) is not None}
    space = space_of(rung, start.trial.knobs.settings, current)
    if not space.dimensions:
        return TuneResult(best=start, importances={}, reason=f"{rung.name} has nothing to tune")
    if (reason := _why_pointless(start, context)) is not None:
        return TuneResult(best=start, importances={}, reason=reason)
    knobs = start.trial.knobs
    name = config_name(rung.name, knobs, recomputes=True)
    study = _open_study(context.study, f"{name}, micro batch {knobs.micro_batch} × {knobs.accumulation}", space)
    search = _Search(study=study, space=space, start=start, context=context)
    is_priced = settings.profile.tune.priced > 0 and score is samples_per_second  # a price is a step's seconds
    is_priced = is_priced and context.forecaster.step_time(start.trial) is not None
    end = search.run_priced() if is_priced else search.run_until(stop_gain, sampler)
    records = [answer for answer in search.answers.values() if isinstance(answer, Record) and answer is not start]
    not_run = sum(isinstance(answer, RungForecast) for answer in search.answers.values())
    importances = _parameter_importances(study)
    noun = "setting of {} was" if len(records) == 1 else "settings of {} were"
    summary = f"{len(records) or 'no'} other {noun.format(rung.name)} tried"
    summary += f" ({not_run} more cannot fit by the forecast)" if not_run else ""
    summary += end if records else end.replace(" until", ":", 1)
    usual = usual_score(start, context)
    better = [record for record in records if context.fits(record) and score(record) > usual]
    if not better:
        none = "none was faster" if score is samples_per_second else "none was better"
        reason = f"{summary}, {none}" if records else summary
        return TuneResult(best=start, importances=importances, reason=reason)
    ranked = sorted(better, key=score, reverse=True)[:_MOST_LEADERS]
    # A leader that lies further behind than the noise of two measurements is not measured again.
    leaders = [record for record in ranked if score(record) * (1 + PRIOR_NOISE * sqrt(2)) >= score(ranked[0])]
    best, reason = confirm_gain(start, leaders, context)
    return TuneResult(best=best, importances=importances, reason=f"{summary}; {reason}")


def _why_pointless(start: Record, context: FitContext) -> str | None:
    """The reason that no setting can gain enough by the forecast; None where one may, or no time is forecast.

    Settings decide when the card waits for links, the host and launches, and hardly what it computes.
    """
    forecast, gain = context.forecaster.step_time(start.trial), context.settings.profile.tune.gain
    if context.score is not samples_per_second or forecast is None or not forecast.computed_seconds:
        return None
    step_s = max(median_step_s(start), forecast.seconds)
    if step_s >= gain * forecast.computed_seconds:
        return None
    waits = max(0.0, 1 - forecast.computed_seconds / step_s)
    return (
        f"skipped: by the forecast, links, host and launches hold up {waits:.1%} of a step, and a gain counts from"
        f" {gain - 1:.0%} on"
    )


@dataclass(slots=True, kw_only=True)
class _Search:
    """A search under way. `answers` has the outcome of each proposal, the start first."""

    study: optuna.Study
    space: Space
    start: Record
    context: FitContext
    answers: dict[str, Record | RungForecast] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = {json.dumps(dict(self.space.start), sort_keys=True): self.start}

    def run_until(self, stop_gain: float, sampler: Sampler) -> str:
        """Run the start and the profile's proposals. Returns why it ended earlier, as the end of a sentence, or ""."""
        limits, seed = self.context.settings.profile.tune, self.context.settings.seed
        for finished in range(limits.trials + 1):
            trials = self.study.get_trials(deepcopy=False)[:finished]  # those after them are queued
            if has_converged([trial.value if _fitted(trial) else None for trial in trials], stop_gain):
                return f" until {WAIT} in a row had gained less than {100 * stop_gain:g}%"
            if not self._may_run():
                return " until the budget was spent"
            self.study.sampler = sampler(seed + finished)
            proposal = self.study.ask(dict(self.space.dimensions))
            self._tell(proposal, self._answer(proposal.params))
        return ""

    def run_priced(self) -> str:
        """Run the best of the profile's proposals by the forecast of their step. Returns the end of a sentence.

        They come from chance, so that all are simulated side by side. One is run if it promises half of the gain that
        counts, since the forecast of what a setting saves may be too low by as much.
        """
        import optuna

        context, limits = self.context, self.context.settings.profile.tune
        context.memory.listen(Note(text=f"pricing {limits.priced} settings by forecasts of their step", passing=True))
        self.study.sampler = optuna.samplers.RandomSampler(seed=context.settings.seed)
        proposals = [self.study.ask(dict(self.space.dimensions)) for _ in range(1 + limits.priced)]
        self._tell(proposals[0], self.start)
        context.forecaster.prepare([self._trial(proposal.params) for proposal in proposals[1:]])
        start = context.forecaster.step_time(self.start.trial)
        assert start is not None  # else nothing is priced
        gains = {each.number: self._promised_gain(each.params, start.seconds) for each in proposals[1:]}
        worthwhile = 1 + (limits.gain - 1) / 2
        proposals = sorted(proposals[1:], key=lambda proposal: gains[proposal.number], reverse=True)
        for place, proposal in enumerate(proposals):
            gain = gains[proposal.number]
            is_promising = place < _PRICED_TRIALS and gain >= worthwhile
            if is_promising and self._may_run():
                self._tell(proposal, self._answer(proposal.params))
            else:
                proposal.set_user_attr("outcome", f"not run: {gain:.3f} times as fast as the start by the forecast")
                self.study.tell(proposal, state=optuna.trial.TrialState.PRUNED)
        most = max(gains.values(), default=0.0)
        if most >= worthwhile:
            return f", the best of {len(gains)} by the forecast"
        if not most:
            return f": none of {len(gains)} leaves headroom by the forecast"
        times = f"{format_factor(most)} times as fast as the start by the forecast"
        return f": the best of {len(gains)} is {times}, and a gain counts from {limits.gain - 1:.0%} on"

    def _may_run(self) -> bool:
        """Whether the budget has a trial for one more proposal, and those that confirm its gain."""
        turns = min(self.context.settings.profile.tune.turns, TURNS_WITHOUT_BUDGET)
        return self.context.may_run(1 + 2 * turns)

    def _promised_gain(self, params: Mapping[str, Any], start_s: float) -> float:
        """How many times as fast as the start's step a proposal is by the forecast; 0 where it leaves no headroom."""
        context, trial = self.context, self._trial(params)
        forecast, step = context.forecaster.forecast(trial), context.forecaster.step_time(trial)
        if forecast is None or step is None:
            return 0.0
        if forecast.verdict == "cannot_fit" or forecast.memory["device"].peak_bytes > context.usable_bytes:
            return 0.0
        return start_s / step.seconds

    def _trial(self, params: Mapping[str, Any]) -> Trial:
        """The trial of a proposal."""
        first, timed = self.start.trial, self.context.settings.profile.timed
        knobs = replace(first.knobs, settings={**first.knobs.settings, **self.space.settings(params)})
        steps = fit_steps_to_budget(timed, median_step_s(self.start))
        return replace(first, knobs=knobs, purpose="tune", steps=steps, repeat=0)

    def _answer(self, params: Mapping[str, Any]) -> Record | RungForecast:
        """The record of a proposal, or its forecast where that cannot fit. Equal proposals are run once."""
        settings = self.space.settings(params)
        key = json.dumps(settings, sort_keys=True)
        if key not in self.answers:
            trial = self._trial(params)
            forecast = self.context.forecaster.forecast(trial)
            cannot_fit = forecast is not None and forecast.verdict == "cannot_fit"
            self.answers[key] = forecast if forecast is not None and cannot_fit else self.context.run(trial)
        return self.answers[key]

    def _tell(self, proposal: optuna.Trial, answer: Record | RungForecast) -> None:
        """Tell Optuna one outcome. Each one has a score; too much memory violates a constraint.

        The constraint is the share of the limit above the usable memory: ≤ 0 leaves headroom.
        """
        from optuna.trial import TrialState

        context, limit_bytes = self.context, self.context.settings.device_bytes
        # An out-of-memory has no speed. A speed of 0 would make the GP expect little of good points nearby; the start's
        # speed neither attracts nor repels, and the constraint keeps the search away. The GP ignores failed trials.
        score, margin = context.score(self.start), None
        if isinstance(answer, RungForecast):
            outcome, lacking = "not run: cannot fit by the forecast", lacking_bytes(answer) or 0
        else:
            proposal.set_user_attr("trial", answer.id)  # for readers of the study: the trial's number in the journal
            match answer.outcome:
                case Fit() as fit:
                    score, lacking = context.score(answer), 0
                    margin = (fit.device_peak_bytes - context.usable_bytes) / limit_bytes
                    leaves = context.fits(answer)
                    margin = min(margin, 0.0) if leaves else max(margin, _LEAST_EXCESS)
                    outcome = "fits" if leaves else "runs, but leaves no headroom"
                case OutOfMemory() as out:
                    # The allocation that failed is a small part of what the trial lacks; its forecast knows more.
                    forecast = context.forecaster.forecast(answer.trial)
                    device = None if forecast is None else forecast.memory.get("device")
                    lacking = max(out.missing_bytes or 0, 0 if device is None else device.peak_bytes - limit_bytes)
                    outcome = f"out of {out.lacked}"
                case Failed() as failure:
                    proposal.set_user_attr("outcome", f"failed: {failure.failure}")
                    proposal.set_user_attr("failure", failure.evidence[:200])
                    self.study.tell(proposal, state=TrialState.FAIL)
                    return
        if margin is None:
            margin = context.settings.profile.memory.headroom + max(lacking / limit_bytes, _LEAST_EXCESS)
        proposal.set_user_attr("outcome", outcome)
        proposal.set_constraint("device_margin", margin)
        self.study.tell(proposal, score)


def has_converged(scores: Sequence[float | None], gain: float) -> bool:
    """Whether the last WAIT trials together gained less than the share `gain`; never with a gain of 0.

    A score is None where the trial did not fit. Only a profile of 14 proposals or more comes so far, such as thorough.
    """
    before = [score for score in scores[:-WAIT] if score is not None]
    if len(scores) < STARTUP + WAIT or not before or gain <= 0:
        return False
    return max(score for score in scores if score is not None) < max(before) * (1 + gain)


def _open_study(path: Path, name: str, space: Space) -> optuna.Study:
    """Begin the study in a new file at `path`, with the first two points queued. It is kept for readers alone."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for earlier in path.parent.glob(f"{path.name}*"):  # with the lock of a driver that was killed
        earlier.unlink(missing_ok=True)
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))
    study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
    for point in (space.start, space.usual):
        study.enqueue_trial(dict(point), skip_if_exists=True)
    return study


def _fitted(trial: optuna.trial.FrozenTrial) -> bool:
    """Whether the trial ran and left the headroom."""
    return trial.value is not None and all(excess <= 0 for excess in trial.constraints.values())


def _parameter_importances(study: optuna.Study) -> dict[str, float]:
    """Key → share of the score's variation among trials that fitted; an out-of-memory does not count."""
    import optuna

    fitted = [trial for trial in study.get_trials(deepcopy=False) if _fitted(trial)]
    if len(fitted) < _FEWEST_FOR_IMPORTANCE:
        return {}
    measured = optuna.create_study(direction="maximize")
    measured.add_trials(fitted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # when nothing mattered, equal shares say so
        shares = optuna.importance.get_param_importances(measured)
    return {key: float(share) for key, share in shares.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The keys to tune, and the first two points to try: the start, and DeepSpeed's usual settings moved inside.

    A choice among values begins with the start's. Numbers of elements are floats on a logarithmic scale: the GP sampler
    lists every value of an integer range, which takes gigabytes for 5e8 elements.
    """

    dimensions: Mapping[str, optuna.distributions.BaseDistribution]
    start: Mapping[str, Scalar]
    usual: Mapping[str, Scalar]

    def settings(self, proposal: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The settings to run. Ranges are rounded down to even, since ZeRO aligns partitions to two elements."""
        from optuna.distributions import FloatDistribution

        settings = {key: proposal[key] for key in self.dimensions}
        for key, dimension in self.dimensions.items():
            if isinstance(dimension, FloatDistribution):
                is_start = settings[key] == self.start[key]
                settings[key] = self.start[key] if is_start else max(2, int(settings[key]) // 2 * 2)
        return settings


def space_of(rung: Rung, settings: Mapping[str, Scalar], current: Mapping[str, Scalar]) -> Space:
    """The space of `rung.tune` around a start.

    `settings` are the start's; `current` has its config's values of other keys. A key without a value starts at its
    first choice; a range without a number to start from is not tuned.
    """
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    dimensions: dict[str, BaseDistribution] = {}
    start: dict[str, Scalar] = {}
    usual: dict[str, Scalar] = {}
    for key, row in rung.tune.items():
        value = settings.get(key, current.get(key))
        if row.choices:
            first = row.choices[0] if value is None else value
            options = (first, *(option for option in row.choices if option != first))
            if len(options) > 1:
                dimensions[key], start[key] = CategoricalDistribution(options), first
                usual[key] = first if row.usual is None else row.usual
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 2:
            number = int(value)
            # The start is always inside, also where the user's own value is beyond `most`.
            low = min(number, max(2, int(number * row.low)))
            high = max(number, int(min(number * row.high, row.most or number * row.high)))
            if low < high:
                dimensions[key], start[key] = FloatDistribution(low, high, log=True), number
                usual[key] = number if row.usual is None else min(max(int(row.usual), low), high)
    return Space(dimensions=dimensions, start=start, usual=usual)
