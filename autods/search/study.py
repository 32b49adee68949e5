"""The Optuna study of a tuning search: on disk, so that a killed fit goes on with it. What Optuna is, is known here.

It is an Optuna journal: `optuna-dashboard study.jsonl` in the fit's folder (pip install optuna-dashboard) shows it in a
browser, also while the fit runs.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .space import Choice, Space

if TYPE_CHECKING:  # optuna is imported where it is used: reading this module stays cheap
    import optuna

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
            f"is damaged: it is no Optuna journal ({error})", where=str(path), mend="start over with --fresh"
        ) from None
    known = [trial.system_attrs.get("fixed_params") for trial in study.get_trials(deepcopy=False)]
    for seed in space.seeds:
        if seed not in known:
            study.enqueue_trial(dict(seed))
    _put_back(study, space)
    return study


def gp(seed: int) -> optuna.samplers.BaseSampler:
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


def told_of(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """The trials whose outcome is known, in order; not those that a kill cut short."""
    from optuna.trial import TrialState

    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state == TrialState.COMPLETE or (trial.state == TrialState.FAIL and _FAILURE in trial.user_attrs)
    ]


def scores_of(study: optuna.Study) -> list[float | None]:
    """What was told, in order; None for what did not leave the headroom or failed."""
    return [trial.value if _fitted(trial) else None for trial in told_of(study)]


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


def importances_of(study: optuna.Study) -> dict[str, float]:
    """Of the trials that fitted: the speed told for an out-of-memory is none."""
    import optuna

    fitted = [trial for trial in told_of(study) if _fitted(trial)]
    if len(fitted) < _LEAST_FOR_IMPORTANCE:
        return {}
    measured = optuna.create_study(direction="maximize")
    measured.add_trials(fitted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a search in which nothing mattered: equal shares say so
        shares = optuna.importance.get_param_importances(measured)
    return {key: float(share) for key, share in shares.items()}
