"""Tune buckets and other knobs of a rung with Optuna."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.deepspeed import get_key
from ..config.profiles import TuneLimits
from ..config.strategies import Dimension, Rung
from ..errors import InputError
from ..forecast.values import RungForecast
from ..types import Failed, Fit, OutOfMemory, Record, Run, Scalar, Steps
from .candidates import config_name, without_fixed_keys
from .comparison import PRIOR_NOISE, Score, confirm_gain
from .context import FitContext
from .forecasts import NO_FORECASTER, Forecaster, lacking_bytes
from .race import RaceResult
from .trials import fit_steps_to_budget, fits_within, median_step_s, samples_per_second

if TYPE_CHECKING:
    import optuna

STARTUP = 5  # trials before it counts: the start, the usual settings, one at random, and the sampler's first two
WAIT = 10  # trials in a row that may gain nothing


def has_converged(scores: Sequence[float | None], gain: float) -> bool:
    """Whether the last WAIT trials together gained less than the share `gain`. None: it did not fit; 0: go on."""
    before = [one for one in scores[:-WAIT] if one is not None]
    if len(scores) < STARTUP + WAIT or not before or gain <= 0:
        return False
    return max(one for one in scores if one is not None) < max(before) * (1 + gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of some values, the start's first."""

    options: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements from low to high, both inclusive, searched in ratio."""

    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be tuned, and two points of it: the start, and DeepSpeed's usual settings as far as they are inside."""

    dimensions: Mapping[str, Choice | Range]
    start: Mapping[str, Scalar]
    usual: Mapping[str, Scalar]

    @property
    def seeds(self) -> tuple[Mapping[str, Scalar], ...]:
        """What is worth a trial before anything is known, the start first."""
        return (self.start,) if self.usual == self.start else (self.start, self.usual)

    def settings(self, proposal: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The settings to run: ranges rounded down to even, since ZeRO aligns partitions to two elements."""
        return {key: self._rounded(key, proposal[key]) for key in self.dimensions}

    def _rounded(self, key: str, value: Scalar) -> Scalar:
        if isinstance(self.dimensions[key], Choice):
            return value
        return self.start[key] if value == self.start[key] else max(2, int(value) // 2 * 2)


def space_of(rung: Rung, settings: Mapping[str, Scalar], current: Mapping[str, Scalar]) -> Space:
    """The space of `rung.tune` around a start.

    settings: what the start sets. current: what its config says anyway of keys that it does not set. A key of which
    neither says anything starts at its first choice; without a number to start from a range is left alone.
    """
    dimensions: dict[str, Choice | Range] = {}
    start: dict[str, Scalar] = {}
    usual: dict[str, Scalar] = {}
    for key, row in rung.tune.items():
        value = settings.get(key, current.get(key))
        found = _choice(row, value) if row.choices else _range(row, value)
        if found is not None:
            dimensions[key] = found
            start[key] = found.options[0] if isinstance(found, Choice) else int(value or 0)
            usual[key] = start[key] if row.usual is None else _inside(found, row.usual)
    return Space(dimensions=dimensions, start=start, usual=usual)


def _inside(found: Choice | Range, usual: Scalar) -> Scalar:
    return usual if isinstance(found, Choice) else min(max(int(usual), found.low), found.high)


def _choice(row: Dimension, value: Scalar | None) -> Choice | None:
    first = row.choices[0] if value is None else value
    options = (first, *(option for option in row.choices if option != first))
    return Choice(options=options) if len(options) > 1 else None


def _range(row: Dimension, value: Scalar | None) -> Range | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 2:
        return None
    start = int(value)
    # The start is always inside, also where the user's own value is beyond `most`.
    low = min(start, max(2, int(start * row.low)))
    high = max(start, int(min(start * row.high, row.most or start * row.high)))
    return Range(low=low, high=high) if low < high else None


_FAILURE = "failure"  # the user attribute of a trial that failed of itself, not because a kill cut it short
_STARTUP_TRIALS = 3  # the start, the usual settings and one at random; from then on the GP knows more than chance
_LEAST_FOR_IMPORTANCE = 5


def open_study(path: Path, name: str, space: Space) -> optuna.Study:
    """The study at `path`, new or gone on with: what was running when it was killed waits to be asked again."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _clear_leftovers(path)
    try:
        backend = JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path)))
        study = optuna.create_study(
            storage=JournalStorage(backend), study_name=name, direction="maximize", load_if_exists=True
        )
    except (ValueError, KeyError) as error:
        raise InputError(
            f"is damaged: it is no Optuna journal ({error})", where=str(path), hint="start over with --fresh"
        ) from None
    known = [trial.system_attrs.get("fixed_params") for trial in study.get_trials(deepcopy=False)]
    for seed in space.seeds:
        if seed not in known:
            study.enqueue_trial(dict(seed))
    _put_back(study, space)
    return study


def gp_sampler(seed: int) -> optuna.samplers.BaseSampler:
    """The sampler that needs the fewest trials, by tests/benchmarks/samplers.py (44 searches, noise 2 % and 5 %).

    After 24 trials it is at 0.97 of the optimum, where TPE is at 0.95 and chance at 0.92; it runs out of memory in a
    tenth of them, TPE in a fourth, chance in a third.
    """
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS, warn_independent_sampling=False)


def _clear_leftovers(path: Path) -> None:
    """What a kill in the midst of writing leaves: a lock that nobody holds, a line without an end.

    One driver owns the output folder, so a lock that is there before the study is opened is a dead driver's; Optuna
    would wait 30 seconds for it. A torn line would be glued to the next one.
    """
    for leftover in path.parent.glob(f"{path.name}.lock*"):
        leftover.unlink(missing_ok=True)
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def _put_back(study: optuna.Study, space: Space) -> None:
    """Tell what was running as failed and enqueue its parameters, in the order that survives another kill."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    waiting = [trial.system_attrs.get("fixed_params") for trial in trials if trial.state == TrialState.WAITING]
    for trial in trials:
        if trial.state != TrialState.RUNNING:
            continue
        params = trial.system_attrs.get("fixed_params", trial.params)
        # Killed while it was being proposed, a trial lacks parameters: the next proposal will be the same one.
        if _FAILURE not in trial.user_attrs and params.keys() == space.dimensions.keys() and params not in waiting:
            study.enqueue_trial(params)
        study.tell(trial.number, state=TrialState.FAIL)


def tell_failed(study: optuna.Study, asked: optuna.Trial, why: str) -> None:
    """The trial failed of itself: the sampler learns nothing of it, and it is not asked again."""
    from optuna.trial import TrialState

    asked.set_user_attr(_FAILURE, why)
    study.tell(asked, state=TrialState.FAIL)


def finished_trials(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The trials whose outcome is known, in order; not those that a kill cut short."""
    from optuna.trial import TrialState

    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state == TrialState.COMPLETE or (trial.state == TrialState.FAIL and _FAILURE in trial.user_attrs)
    ]


def trial_scores(study: optuna.Study) -> list[float | None]:
    """What was told, in order; None for what did not leave the headroom or failed."""
    return [trial.value if _fitted(trial) else None for trial in finished_trials(study)]


def _fitted(trial: optuna.trial.FrozenTrial) -> bool:
    from optuna.trial import TrialState

    return trial.state == TrialState.COMPLETE and all(one <= 0 for one in trial.constraints.values())


def distributions(space: Space) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    # Floats, although elements are whole: the GP sampler lists every value of an integer range, gigabytes for 5e8.
    return {
        key: CategoricalDistribution(one.options)
        if isinstance(one, Choice)
        else FloatDistribution(one.low, one.high, log=True)
        for key, one in space.dimensions.items()
    }


def parameter_importances(study: optuna.Study) -> dict[str, float]:
    """Of the trials that fitted: the speed told for an out-of-memory is none."""
    import optuna

    fitted = [trial for trial in finished_trials(study) if _fitted(trial)]
    if len(fitted) < _LEAST_FOR_IMPORTANCE:
        return {}
    measured = optuna.create_study(direction="maximize")
    measured.add_trials(fitted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a search in which nothing mattered: equal shares say so
        shares = optuna.importance.get_param_importances(measured)
    return {key: float(share) for key, share in shares.items()}


_LEAST_EXCESS = 0.01  # share of the limit by which an out-of-memory at least overshot, for want of a figure


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeReporter:
    """How an outcome is told to the sampler."""

    start: Record
    limit_bytes: int
    headroom: float
    forecaster: Forecaster
    score: Score

    @property
    def usable_bytes(self) -> float:
        return self.limit_bytes * (1 - self.headroom)

    def tell(self, study: optuna.Study, asked: optuna.Trial, answer: Record | RungForecast) -> None:
        """The constraint is the share of the limit beyond the usable memory: ≤ 0 leaves the headroom."""
        if isinstance(answer, Record):  # for whoever opens the study: which trial of the journal, and what it was
            asked.set_user_attr("trial", answer.id)
        asked.set_user_attr("outcome", self._outcome(answer))
        if isinstance(answer, RungForecast):  # not run: it cannot fit
            self._tell_full(study, asked, lacking_bytes(answer))
            return
        match answer.outcome:
            case Fit() as fit:
                margin = (fit.device_peak_bytes - self.usable_bytes) / self.limit_bytes
                asked.set_constraint("device_margin", max(margin, _LEAST_EXCESS) if fit.alloc_retries else margin)
                study.tell(asked, self.score(answer))
            case OutOfMemory() as out:
                # What the last allocation lacked says little of what the trial lacks; its forecast says more.
                forecast = self.forecaster.forecast(answer.trial)
                device = None if forecast is None else forecast.memory.get("device")
                forecast_limit = 0 if device is None else device.peak_bytes - self.limit_bytes
                self._tell_full(study, asked, max(out.missing_bytes or 0, forecast_limit))
            case Failed() as failure:
                tell_failed(study, asked, failure.evidence[:200])

    def _outcome(self, answer: Record | RungForecast) -> str:
        if isinstance(answer, RungForecast):
            return "not run: cannot fit by the forecast"
        match answer.outcome:
            case Fit():
                return "fits" if fits_within(answer, self.usable_bytes) else "runs, but leaves no headroom"
            case OutOfMemory() as out:
                return f"out of {out.tier} memory"
            case Failed() as failure:
                return f"failed: {failure.failure}"

    def _tell_full(self, study: optuna.Study, asked: optuna.Trial, lacking_bytes: int) -> None:
        excess = max(lacking_bytes / self.limit_bytes, _LEAST_EXCESS)
        asked.set_constraint("device_margin", self.headroom + excess)
        # Running out says nothing of speed. A speed of 0 would dig a hole into the GP's picture of samples/s and spoil
        # the good points beside it; the start's speed neither attracts nor repels, and the constraint alone keeps the
        # search away. (Told as failed, the GP would not see the point at all.)
        study.tell(asked, self.score(self.start))


Sampler = Callable[[int], "optuna.samplers.BaseSampler"]
_MOST_LEADERS = 2  # are measured again: of two the better is found more often, a third costs more than it brings


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What tuning found: `best` is the start unless another was confirmed to be faster.

    importances: key → share of the variation of the score, empty when there are too few trials to tell.
    """

    best: Record
    records: tuple[Record, ...]
    importances: Mapping[str, float]
    reason: str


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
    forecaster: Forecaster = NO_FORECASTER,
    score: Score = samples_per_second,
    stop_gain: float = 0.01,
    may_go_on: Callable[[], bool] = lambda: True,
    sampler: Sampler = gp_sampler,
) -> TuneResult:
    """Search `rung.tune` around `start` for a higher score within the usable memory, in up to limits.trials trials.

    The proposals are a function of the seed and of the outcomes before, so that a search that was killed and goes on
    proposes what it would have proposed. current: what the start's DeepSpeed config says of keys that its settings
    leave out. A proposal that cannot fit by its forecast is not run. score: larger is better, above 0 for a fit.
    stop_gain: the search ends once it no longer gains this share, see `has_converged`; 0 spends all trials. may_go_on:
    called before each proposal; the leaders found by then are still measured again. sampler: made anew for each
    proposal, from a seed. Raises InputError when the study on disk is damaged.
    """
    space = space_of(rung, start.trial.knobs.settings, current or {})
    if not space.dimensions or limits.trials < 1:
        why = "no trials were granted for tuning" if space.dimensions else f"{rung.name} has nothing to tune"
        return TuneResult(best=start, records=(), importances={}, reason=why)
    reporter = OutcomeReporter(
        start=start, limit_bytes=limit_bytes, headroom=headroom, forecaster=forecaster, score=score
    )
    knobs = start.trial.knobs
    name = config_name(rung.name, knobs, recomputes=True)  # its variants have studies of their own
    study = open_study(study_path, f"{name}, micro batch {knobs.micro_batch} × {knobs.accumulation}", space)
    search = _Search(study=study, space=space, reporter=reporter, run=run, steps=steps, seed=seed, sampler=sampler)
    ended = search.until(trials=limits.trials, stop_gain=stop_gain, may_go_on=may_go_on)
    records = tuple(answer for answer in search.answers.values() if isinstance(answer, Record) and answer is not start)
    foretold = sum(isinstance(answer, RungForecast) for answer in search.answers.values())
    importances = parameter_importances(study)
    said = f"{len(records) or 'no'} other settings of {rung.name} were tried"
    said += f" ({foretold} more cannot fit by the forecast)" if foretold else ""
    said += ended if records else ended.replace(" until", ":", 1)
    better = [one for one in records if fits_within(one, reporter.usable_bytes) and score(one) > score(start)]
    if not better:
        none = "none was faster" if score is samples_per_second else "none was better"
        reason = f"{said}, {none}" if records else said
        return TuneResult(best=start, records=records, importances=importances, reason=reason)
    leaders = _leaders(better, score)
    final = confirm_gain(
        start, leaders, run, gain=limits.gain, turns=limits.turns, usable_bytes=reporter.usable_bytes, score=score
    )
    reason = f"{said}; {final.reason}"
    return TuneResult(best=final.best, records=records + final.records, importances=importances, reason=reason)


def _leaders(better: Sequence[Record], score: Score) -> list[Record]:
    """The best, and those whose lead it has by less than the noise of two measurements: best first."""
    ranked = sorted(better, key=score, reverse=True)[:_MOST_LEADERS]
    return [one for one in ranked if score(one) * (1 + PRIOR_NOISE * sqrt(2)) >= score(ranked[0])]


@dataclass(slots=True, kw_only=True)
class _Search:
    """A search under way; what became of each proposal is in `answers`, the start first."""

    study: optuna.Study
    space: Space
    reporter: OutcomeReporter
    run: Run
    steps: Steps
    seed: int
    sampler: Sampler
    answers: dict[str, Record | RungForecast] = field(default_factory=dict)

    def until(self, *, trials: int, stop_gain: float, may_go_on: Callable[[], bool]) -> str:
        """Ask and tell until the start and `trials` more are told; what ended it before, as the end of a sentence."""
        self.answers = {_key(self.space.start): self.reporter.start}
        for past in finished_trials(self.study):
            self._answer(past.params)  # from the journal: these were run
        while (told := len(scores := trial_scores(self.study))) <= trials:
            if has_converged(scores, stop_gain):
                return f" until {WAIT} in a row had gained less than {100 * stop_gain:g}%"
            if not may_go_on():
                return " until the budget was spent"
            # A new sampler each time, seeded by the position: no state but the study's has to survive a kill.
            self.study.sampler = self.sampler(self.seed + told)
            asked = self.study.ask(distributions(self.space))
            self.reporter.tell(self.study, asked, self._answer(asked.params))
        return ""

    def _answer(self, proposal: Mapping[str, Any]) -> Record | RungForecast:
        settings = self.space.settings(proposal)
        key = _key(settings)
        if key not in self.answers:  # rounding and a confident sampler propose the same again: told, not run
            first = self.reporter.start.trial
            knobs = replace(first.knobs, settings={**first.knobs.settings, **settings})
            steps = fit_steps_to_budget(self.steps, median_step_s(self.reporter.start))
            trial = replace(first, knobs=knobs, purpose="tune", steps=steps, repeat=0)
            forecast = self.reporter.forecaster.forecast(trial)
            cannot_fit = forecast is not None and forecast.verdict == "cannot_fit"
            self.answers[key] = forecast if forecast is not None and cannot_fit else self.run(trial)
        return self.answers[key]


def _key(settings: Mapping[str, Scalar]) -> str:
    return json.dumps(dict(settings), sort_keys=True)


def tune_winner(raced: RaceResult, context: FitContext) -> TuneResult:
    """The winner of the race, tuned."""
    settings, profile = context.settings, context.settings.profile
    start = raced.best
    rung = without_fixed_keys(next(rung for rung in settings.ladder if rung.name == start.trial.rung), context.facts)
    config = context.final_config(start.trial)
    return tune(
        start,
        context.run,
        rung=rung,
        limits=profile.tune,
        steps=profile.timed,
        limit_bytes=settings.device_bytes,
        headroom=profile.memory.headroom,
        seed=settings.seed,
        study_path=context.study,
        current={key: value for key in rung.tune if (value := get_key(config, key)) is not None},
        forecaster=context.forecaster,
        score=context.score,
        may_go_on=lambda: context.may_run(1 + 2 * profile.tune.turns),  # what it may find has to be confirmed
    )
