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

Sampler = Callable[[int], "optuna.samplers.BaseSampler"]
STARTUP = 5  # fewest trials before convergence counts: the start, the usual settings, a random one, two of the sampler
WAIT = 10  # trials in a row without gain that end the search
_RANDOM_UNTIL = 3  # trials: the start, the usual settings and a random one; then the GP knows more than chance
_MOST_LEADERS = 2  # that are measured again: a third costs more than it brings
_FEWEST_FOR_IMPORTANCE = 5  # trials that fitted
_LEAST_EXCESS = 0.01  # share of the limit by which an out-of-memory counts as too large, where the amount is unknown
_FAILURE = "failure"  # user attribute of a trial that failed by itself, in contrast to one that a kill cut short


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
    records: tuple[Record, ...]
    importances: Mapping[str, float]
    reason: str


def tune_winner(raced: RaceResult, context: FitContext) -> TuneResult:
    """Tune the winner of the race."""
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
        may_go_on=lambda: context.may_run(1 + 2 * profile.tune.turns),  # confirming the gain takes turns
    )


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
    """Search `rung.tune` around `start` for a higher score within the usable memory, in at most `limits.trials` trials.

    Proposals depend on the seed and the outcomes before them only, so that a search that was killed goes on alike.
    `current` has the values of the start's DeepSpeed config for keys that its settings leave out. A proposal that
    cannot fit by its forecast is not run. The score is larger for a better config, and above 0 for a fit. The search
    ends once it gains less than `stop_gain`, see `has_converged`; 0 spends all trials. `may_go_on` is called before
    each proposal. The best settings are measured again with the start. `sampler` is called with a seed for each
    proposal. Raises InputError when the study on disk is damaged.
    """
    space = space_of(rung, start.trial.knobs.settings, current or {})
    if not space.dimensions or limits.trials < 1:
        why = "no trials were allowed for tuning" if space.dimensions else f"{rung.name} has nothing to tune"
        return TuneResult(best=start, records=(), importances={}, reason=why)
    reporter = OutcomeReporter(
        start=start, limit_bytes=limit_bytes, headroom=headroom, forecaster=forecaster, score=score
    )
    knobs = start.trial.knobs
    name = config_name(rung.name, knobs, recomputes=True)
    study = open_study(study_path, f"{name}, micro batch {knobs.micro_batch} × {knobs.accumulation}", space)
    search = _Search(study=study, space=space, reporter=reporter, run=run, steps=steps, seed=seed, sampler=sampler)
    end = search.run_until(trials=limits.trials, stop_gain=stop_gain, may_go_on=may_go_on)
    records = tuple(answer for answer in search.answers.values() if isinstance(answer, Record) and answer is not start)
    not_run = sum(isinstance(answer, RungForecast) for answer in search.answers.values())
    importances = parameter_importances(study)
    summary = f"{len(records) or 'no'} other settings of {rung.name} were tried"
    summary += f" ({not_run} more cannot fit by the forecast)" if not_run else ""
    summary += end if records else end.replace(" until", ":", 1)
    usable_bytes = reporter.usable_bytes
    better = [record for record in records if fits_within(record, usable_bytes) and score(record) > score(start)]
    if not better:
        none = "none was faster" if score is samples_per_second else "none was better"
        reason = f"{summary}, {none}" if records else summary
        return TuneResult(best=start, records=records, importances=importances, reason=reason)
    final = confirm_gain(
        start, _leaders(better, score), run,
        gain=limits.gain, turns=limits.turns, usable_bytes=usable_bytes, score=score,
    )  # fmt: skip
    reason = f"{summary}; {final.reason}"
    return TuneResult(best=final.best, records=records + final.records, importances=importances, reason=reason)


def _leaders(better: Sequence[Record], score: Score) -> list[Record]:
    """The best records, without those that lie further behind than the noise of two measurements."""
    ranked = sorted(better, key=score, reverse=True)[:_MOST_LEADERS]
    return [record for record in ranked if score(record) * (1 + PRIOR_NOISE * sqrt(2)) >= score(ranked[0])]


@dataclass(slots=True, kw_only=True)
class _Search:
    """A search under way. `answers` has the outcome of each proposal, the start first."""

    study: optuna.Study
    space: Space
    reporter: OutcomeReporter
    run: Run
    steps: Steps
    seed: int
    sampler: Sampler
    answers: dict[str, Record | RungForecast] = field(default_factory=dict)

    def run_until(self, *, trials: int, stop_gain: float, may_go_on: Callable[[], bool]) -> str:
        """Run the start and `trials` proposals. Returns why it ended earlier, as the end of a sentence; else ""."""
        self.answers = {_key(self.space.start): self.reporter.start}
        for past in finished_trials(self.study):
            self._answer(past.params)  # the journal has these records
        while (finished := len(scores := trial_scores(self.study))) <= trials:
            if has_converged(scores, stop_gain):
                return f" until {WAIT} in a row had gained less than {100 * stop_gain:g}%"
            if not may_go_on():
                return " until the budget was spent"
            # A new sampler each time, seeded by the number of trials: only the study's state has to survive a kill.
            self.study.sampler = self.sampler(self.seed + finished)
            proposal = self.study.ask(distributions(self.space))
            self.reporter.tell(self.study, proposal, self._answer(proposal.params))
        return ""

    def _answer(self, params: Mapping[str, Any]) -> Record | RungForecast:
        """The record of a proposal, or its forecast where that cannot fit. Equal proposals are run once."""
        settings = self.space.settings(params)
        key = _key(settings)
        if key not in self.answers:
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


def has_converged(scores: Sequence[float | None], gain: float) -> bool:
    """Whether the last WAIT trials together gained less than the share `gain`; never with a gain of 0.

    A score is None where the trial did not fit.
    """
    before = [score for score in scores[:-WAIT] if score is not None]
    if len(scores) < STARTUP + WAIT or not before or gain <= 0:
        return False
    return max(score for score in scores if score is not None) < max(before) * (1 + gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeReporter:
    """Reports outcomes to Optuna. Each one has a score; too much memory violates a constraint."""

    start: Record
    limit_bytes: int
    headroom: float
    forecaster: Forecaster
    score: Score

    @property
    def usable_bytes(self) -> float:
        """Device memory less the headroom."""
        return self.limit_bytes * (1 - self.headroom)

    def tell(self, study: optuna.Study, proposal: optuna.Trial, answer: Record | RungForecast) -> None:
        """Tell one outcome. The constraint is the share of the limit above the usable memory: ≤ 0 leaves headroom."""
        if isinstance(answer, Record):  # for readers of the study: the trial's number in the journal
            proposal.set_user_attr("trial", answer.id)
        proposal.set_user_attr("outcome", self._outcome(answer))
        if isinstance(answer, RungForecast):  # not run: it cannot fit
            self._tell_full(study, proposal, lacking_bytes(answer))
            return
        match answer.outcome:
            case Fit() as fit:
                margin = (fit.device_peak_bytes - self.usable_bytes) / self.limit_bytes
                proposal.set_constraint("device_margin", max(margin, _LEAST_EXCESS) if fit.alloc_retries else margin)
                study.tell(proposal, self.score(answer))
            case OutOfMemory() as out:
                # The allocation that failed is a small part of what the trial lacks; its forecast knows more.
                forecast = self.forecaster.forecast(answer.trial)
                device = None if forecast is None else forecast.memory.get("device")
                excess = 0 if device is None else device.peak_bytes - self.limit_bytes
                self._tell_full(study, proposal, max(out.missing_bytes or 0, excess))
            case Failed() as failure:
                tell_failed(study, proposal, failure.evidence[:200])

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

    def _tell_full(self, study: optuna.Study, proposal: optuna.Trial, lacking_bytes: int) -> None:
        excess = max(lacking_bytes / self.limit_bytes, _LEAST_EXCESS)
        proposal.set_constraint("device_margin", self.headroom + excess)
        # An out-of-memory has no speed. A speed of 0 would make the GP expect little of good points nearby; the start's
        # speed neither attracts nor repels, and the constraint keeps the search away. The GP ignores failed trials.
        study.tell(proposal, self.score(self.start))


def open_study(path: Path, name: str, space: Space) -> optuna.Study:
    """Create or resume the study at `path`. Proposals that were running when it was killed are queued again."""
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
            f"is damaged: it is no Optuna journal ({error})", place=str(path), hint="start over with --fresh"
        ) from None
    known = [trial.system_attrs.get("fixed_params") for trial in study.get_trials(deepcopy=False)]
    for seed in space.seeds:
        if seed not in known:
            study.enqueue_trial(dict(seed))
    _put_back(study, space)
    return study


def _clear_leftovers(path: Path) -> None:
    """Remove the leftovers of a driver that was killed during a write: a lock, and a torn last line.

    One driver owns the output folder, so a lock found before the study is opened belongs to a dead driver. Optuna would
    wait 30 seconds for it. A torn line would be joined with the next one.
    """
    for leftover in path.parent.glob(f"{path.name}.lock*"):
        leftover.unlink(missing_ok=True)
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def _put_back(study: optuna.Study, space: Space) -> None:
    """Queue the parameters of running trials again, then mark these as failed: this order survives another kill."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    waiting = [trial.system_attrs.get("fixed_params") for trial in trials if trial.state == TrialState.WAITING]
    for trial in trials:
        if trial.state != TrialState.RUNNING:
            continue
        params = trial.system_attrs.get("fixed_params", trial.params)
        # A trial that was killed while it was proposed lacks parameters; the next proposal will be the same.
        if _FAILURE not in trial.user_attrs and params.keys() == space.dimensions.keys() and params not in waiting:
            study.enqueue_trial(params)
        study.tell(trial.number, state=TrialState.FAIL)


def tell_failed(study: optuna.Study, proposal: optuna.Trial, reason: str) -> None:
    """Mark a trial as failed by itself: the sampler ignores it, and it is not run again."""
    from optuna.trial import TrialState

    proposal.set_user_attr(_FAILURE, reason)
    study.tell(proposal, state=TrialState.FAIL)


def finished_trials(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The trials with an outcome, in order, without those that a kill cut short."""
    from optuna.trial import TrialState

    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state == TrialState.COMPLETE or (trial.state == TrialState.FAIL and _FAILURE in trial.user_attrs)
    ]


def trial_scores(study: optuna.Study) -> list[float | None]:
    """The scores of finished trials, in order; None for one that failed or left no headroom."""
    return [trial.value if _fitted(trial) else None for trial in finished_trials(study)]


def _fitted(trial: optuna.trial.FrozenTrial) -> bool:
    from optuna.trial import TrialState

    return trial.state == TrialState.COMPLETE and all(excess <= 0 for excess in trial.constraints.values())


def distributions(space: Space) -> dict[str, Any]:
    """The space as Optuna's distributions."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    # Floats, because the GP sampler lists every value of an integer range: gigabytes for 5e8 elements.
    return {
        key: CategoricalDistribution(dimension.options)
        if isinstance(dimension, Choice)
        else FloatDistribution(dimension.low, dimension.high, log=True)
        for key, dimension in space.dimensions.items()
    }


def parameter_importances(study: optuna.Study) -> dict[str, float]:
    """Key → share of the score's variation among trials that fitted; an out-of-memory does not count."""
    import optuna

    fitted = [trial for trial in finished_trials(study) if _fitted(trial)]
    if len(fitted) < _FEWEST_FOR_IMPORTANCE:
        return {}
    measured = optuna.create_study(direction="maximize")
    measured.add_trials(fitted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # when nothing mattered, equal shares say so
        shares = optuna.importance.get_param_importances(measured)
    return {key: float(share) for key, share in shares.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice among values, the start's first."""

    options: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A number of elements from low to high, both inclusive, on a logarithmic scale."""

    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The keys to tune, and two points among them: the start, and DeepSpeed's usual settings moved inside."""

    dimensions: Mapping[str, Choice | Range]
    start: Mapping[str, Scalar]
    usual: Mapping[str, Scalar]

    @property
    def seeds(self) -> tuple[Mapping[str, Scalar], ...]:
        """The first points to try."""
        return (self.start,) if self.usual == self.start else (self.start, self.usual)

    def settings(self, proposal: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The settings to run. Ranges are rounded down to even, since ZeRO aligns partitions to two elements."""
        return {key: self._rounded(key, proposal[key]) for key in self.dimensions}

    def _rounded(self, key: str, value: Scalar) -> Scalar:
        if isinstance(self.dimensions[key], Choice):
            return value
        return self.start[key] if value == self.start[key] else max(2, int(value) // 2 * 2)


def space_of(rung: Rung, settings: Mapping[str, Scalar], current: Mapping[str, Scalar]) -> Space:
    """The space of `rung.tune` around a start.

    `settings` are the start's; `current` has its config's values of other keys. A key without a value starts at its
    first choice; a range without a number to start from is not tuned.
    """
    dimensions: dict[str, Choice | Range] = {}
    start: dict[str, Scalar] = {}
    usual: dict[str, Scalar] = {}
    for key, row in rung.tune.items():
        value = settings.get(key, current.get(key))
        dimension = _choice(row, value) if row.choices else _range(row, value)
        if dimension is not None:
            dimensions[key] = dimension
            start[key] = dimension.options[0] if isinstance(dimension, Choice) else int(value or 0)
            usual[key] = start[key] if row.usual is None else _inside(dimension, row.usual)
    return Space(dimensions=dimensions, start=start, usual=usual)


def _inside(dimension: Choice | Range, usual: Scalar) -> Scalar:
    return usual if isinstance(dimension, Choice) else min(max(int(usual), dimension.low), dimension.high)


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
