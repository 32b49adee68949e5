"""Tune a rung's buckets and switches with Optuna. The study lies on disk, so that a killed fit goes on with it."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..ladder import Rung
from ..settings import TuneLimits
from ..values import Failed, Fit, OutOfMemory, Record, Run, Scalar, Steps
from .ask import fits_within, samples_per_second
from .confirm import confirm
from .space import Choice, Space, space_of

if TYPE_CHECKING:  # optuna is imported where it is used: reading this module stays cheap
    import optuna

_STARTUP_TRIALS = 3  # the start and two at random; from then on the GP knows more than chance
_LEAST_EXCESS = 0.01  # share of the limit by which an out-of-memory at least overshot, for want of a figure
_LEAST_FOR_IMPORTANCE = 5
_FAILURE = "failure"


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

    @property
    def usable_bytes(self) -> float:
        return self.limit_bytes * (1 - self.headroom)

    def tell(self, study: optuna.Study, asked: optuna.Trial, record: Record) -> None:
        """The constraint is the share of the limit beyond the usable memory: ≤ 0 leaves the headroom."""
        from optuna.trial import TrialState

        match record.outcome:
            case Fit() as fit:
                asked.set_constraint("device_margin", (fit.device_peak_bytes - self.usable_bytes) / self.limit_bytes)
                study.tell(asked, fit.samples_per_second)
            case OutOfMemory() as out:
                excess = max((out.missing_bytes or 0) / self.limit_bytes, _LEAST_EXCESS)
                asked.set_constraint("device_margin", self.headroom + excess)
                # Running out says nothing of speed. A speed of 0 would dig a hole into the GP's picture of samples/s
                # and spoil the good points beside it; the start's speed neither attracts nor repels, and the
                # constraint alone keeps the search away. (Told as failed, the GP would not see the point at all.)
                study.tell(asked, samples_per_second(self.start))
            case Failed() as failure:
                asked.set_user_attr(_FAILURE, failure.evidence[:200])
                study.tell(asked, state=TrialState.FAIL)


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
) -> Tuned:
    """Search `rung.tune` around `start` for more samples per second within the usable memory, in limits.trials trials.

    The proposals are a function of the seed and of the outcomes before, so that a search that was killed and goes on
    proposes what it would have proposed. current: what the start's DeepSpeed config says of keys that its settings
    leave out. Raises InputError when the study on disk is damaged.
    """
    space = space_of(rung, start.trial.knobs.settings, current or {})
    if not space.dimensions or limits.trials < 1:
        why = "no trials were granted for tuning" if space.dimensions else f"{rung.name} has nothing to tune"
        return Tuned(best=start, records=(), importances={}, reason=why)
    judge = _Judge(start=start, limit_bytes=limit_bytes, headroom=headroom)
    knobs = start.trial.knobs
    study = _study(study_path, f"{rung.name}, micro batch {knobs.micro_batch} × {knobs.accumulation}", space)
    answers = _search(study, space, judge, run, steps, trials=limits.trials, seed=seed)
    records = tuple(record for record in answers.values() if record is not start)
    faster = [
        record
        for record in records
        if fits_within(record, judge.usable_bytes) and samples_per_second(record) > samples_per_second(start)
    ]
    importances = _importances(study)
    said = f"{len(records)} other settings of {rung.name} were tried"
    if not faster:
        return Tuned(best=start, records=records, importances=importances, reason=f"{said}, none was faster")
    leader = max(faster, key=samples_per_second)
    final = confirm(start, leader, run, gain=limits.gain, turns=limits.turns, usable_bytes=judge.usable_bytes)
    reason = f"{said}; {final.reason}"
    return Tuned(best=final.best, records=records + final.records, importances=importances, reason=reason)


def _search(
    study: optuna.Study, space: Space, judge: _Judge, run: Run, steps: Steps, *, trials: int, seed: int
) -> dict[str, Record]:
    """Ask and tell until the start and `trials` more are told; each distinct proposal's record, the start first."""
    from optuna.samplers import GPSampler

    answers = {_key(space.start): judge.start}

    def answer(proposal: Mapping[str, Any]) -> Record:
        settings = space.settings(proposal)
        key = _key(settings)
        if key not in answers:  # rounding and a confident sampler propose the same again: told, not run
            knobs = replace(judge.start.trial.knobs, settings={**judge.start.trial.knobs.settings, **settings})
            trial = replace(judge.start.trial, knobs=knobs, purpose="tune", steps=steps, repeat=0)
            answers[key] = run(trial)
        return answers[key]

    for past in _told(study):
        answer(past.params)  # from the journal: these were run
    while (told := len(_told(study))) <= trials:
        # A new sampler each time, seeded by the position: no state but the study's has to survive a kill.
        study.sampler = GPSampler(seed=seed + told, n_startup_trials=_STARTUP_TRIALS, warn_independent_sampling=False)
        asked = study.ask(_distributions(space))
        judge.tell(study, asked, answer(asked.params))
    return answers


def _study(path: Path, name: str, space: Space) -> optuna.Study:
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
            f"is damaged: it is no Optuna journal ({error})", where=str(path), mend="start over with --fresh"
        ) from None
    if not study.get_trials(deepcopy=False):
        study.enqueue_trial(dict(space.start))
    _put_back(study, space)
    return study


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


def _told(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The trials whose outcome is known, in order; not those that a kill cut short."""
    from optuna.trial import TrialState

    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state == TrialState.COMPLETE or (trial.state == TrialState.FAIL and _FAILURE in trial.user_attrs)
    ]


def _distributions(space: Space) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    # Floats, although elements are whole: the GP sampler lists every value of an integer range, gigabytes for 5e8.
    return {
        key: CategoricalDistribution(one.options)
        if isinstance(one, Choice)
        else FloatDistribution(one.low, one.high, log=True)
        for key, one in space.dimensions.items()
    }


def _importances(study: optuna.Study) -> dict[str, float]:
    """Of the trials that fitted: the speed told for an out-of-memory is none."""
    import optuna

    fitted = [
        trial
        for trial in _told(study)
        if trial.state == optuna.trial.TrialState.COMPLETE and all(one <= 0 for one in trial.constraints.values())
    ]
    if len(fitted) < _LEAST_FOR_IMPORTANCE:
        return {}
    measured = optuna.create_study(direction="maximize")
    measured.add_trials(fitted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a search in which nothing mattered: equal shares say so
        shares = optuna.importance.get_param_importances(measured)
    return {key: float(share) for key, share in shares.items()}


def _key(settings: Mapping[str, Scalar]) -> str:
    return json.dumps(dict(settings), sort_keys=True)
