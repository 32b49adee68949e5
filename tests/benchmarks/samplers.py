"""Which sampler finds the fastest setting in few trials, and what ends a search well?

python tests/benchmarks/samplers.py [--surfaces 12] [--trials 24] [--noise 0.02 0.05] [--samplers gp tpe …]

Searches made-up rungs of 4, 5 and 7 dimensions (tuning_surfaces.py) with `autods.tuner.optuna_search` itself: the same
surfaces and seeds for each sampler, no forecast. The first table: the true speed of what the search would take after
so many trials, as a share of the best that leaves the headroom; the same when it was measured again in turn, on
average and at worst; the share of trials that ran out; the processor seconds that deciding took. The second: where a
rule would have ended the searches of the first sampler, and what that cost.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import optuna
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.terminator import BaseImprovementEvaluator, EMMREvaluator, RegretBoundEvaluator
from optuna.trial import FrozenTrial

sys.path.insert(0, str(Path(__file__).parents[2]))

from tuning_surfaces import HEADROOM, LIMIT, Surface, surface

from autods.config.profiles import TuneLimits
from autods.tuner.optuna_search import STARTUP, gp_sampler, has_converged, tune
from autods.tuner.trials import fits_within, samples_per_second
from autods.types import OutOfMemory, Record, Steps
from tests.support.contexts import make_context

SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "gp": gp_sampler,
    "gp-5": lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=5, warn_independent_sampling=False),
    "gp-8": lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=8, warn_independent_sampling=False),
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed),
    "tpe-5": lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=5, multivariate=True),
    "qmc": lambda seed: optuna.samplers.QMCSampler(seed=0, scramble=True, warn_independent_sampling=False),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
}


@dataclass(frozen=True)
class Searched:
    """One search. found: the share of the optimum that it would take after each trial, the start's first.

    trials: what the stop rules see.
    """

    sampler: str
    noise: float
    found: tuple[float, ...]
    final: float
    trials: tuple[FrozenTrial, ...]
    ran_out: float
    deciding_s: float

    @property
    def told(self) -> list[float | None]:
        """None for what did not leave the headroom."""
        return [score_of(trial) for trial in self.trials]


def main() -> None:
    asked = arguments()
    silence()
    began = time.monotonic()
    jobs = [(number, asked.noise, asked.samplers, asked.trials) for number in range(asked.surfaces)]
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        searched = [one for some in pool.starmap(searches, jobs, chunksize=1) for one in some]
        show_samplers(searched, asked)
        show_rules([one for one in searched if one.sampler == asked.samplers[0]], asked, pool.map)
    print(f"\n{len(searched)} searches in {time.monotonic() - began:.0f} s")


def searches(number: int, noises: Sequence[float], samplers: Sequence[str], trials: int) -> list[Searched]:
    """Of one surface, whose optimum is looked for once."""
    silence()
    optimum = surface(number, 0).optimum()
    return [search(sampler, number, noise, trials, optimum) for noise in noises for sampler in samplers]


def search(sampler: str, number: int, noise: float, trials: int, optimum: float) -> Searched:
    """A whole search, never ended early, then measured again in turn."""
    here = surface(number, noise)
    start = here.start()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.jsonl"
        began = time.process_time()
        context = make_context(
            here.run, study=path, headroom=HEADROOM, device_bytes=LIMIT, seed=1000 * number, ladder=(here.rung,),
            profile={"tune": TuneLimits(trials=trials, gain=1.03, turns=2), "timed": Steps()},
        )  # fmt: skip
        tuned = tune(start, context, stop_gain=0, sampler=SAMPLERS[sampler])
        deciding_s = time.process_time() - began
        told = trials_of(path)
    answers = [start, *(record for record in context.memory.records if record.trial.purpose == "tune")]
    return Searched(
        sampler=sampler,
        noise=noise,
        found=tuple(share(here, best, optimum) for best in bests(answers, here, told)),
        final=share(here, tuned.best, optimum),
        trials=tuple(told),
        ran_out=mean(isinstance(record.outcome, OutOfMemory) for record in answers[1:]),
        deciding_s=deciding_s / trials,
    )


def share(here: Surface, record: Record, optimum: float) -> float:
    return here.speed({**here.space.start, **record.trial.knobs.settings}) / optimum


def bests(answers: Sequence[Record], here: Surface, told: Sequence[FrozenTrial]) -> Iterable[Record]:
    """The fastest measured so far that leaves the headroom, after each trial that was told."""
    by_settings = {tuple(sorted(one.trial.knobs.settings.items())): one for one in answers}
    best = answers[0]
    for trial in told:
        one = by_settings[tuple(sorted(here.space.settings(trial.params).items()))]
        if fits_within(one, LIMIT * (1 - HEADROOM)) and samples_per_second(one) > samples_per_second(best):
            best = one
        yield best


def score_of(trial: FrozenTrial) -> float | None:
    return trial.value if all(one <= 0 for one in trial.constraints.values()) else None


def trials_of(path: Path) -> list[FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))
    (summary,) = storage.get_all_studies()
    return optuna.load_study(study_name=summary.study_name, storage=storage).trials


def by_regret(one: Searched) -> int:
    return by_evaluator(one, lambda: RegretBoundEvaluator(seed=0))


def by_mean_regret(one: Searched) -> int:
    return by_evaluator(one, lambda: EMMREvaluator(seed=0))


def by_evaluator(one: Searched, evaluator: Callable[[], BaseImprovementEvaluator]) -> int:
    """Optuna's own estimate of what more trials may gain is below 1 % of the best. It sees all that was told."""
    silence()
    for count in range(5, len(one.trials) + 1):
        best = max(value for value in one.told[:count] if value is not None)
        if evaluator().evaluate(list(one.trials[:count]), optuna.study.StudyDirection.MAXIMIZE) < 0.01 * best:
            return count
    return len(one.trials)


@dataclass(frozen=True)
class Patience:
    """The last `wait` trials gained less than 1 %; counted from the `first` one on."""

    wait: int
    first: int

    def __call__(self, one: Searched) -> int:
        for count in range(self.first + self.wait, len(one.told) + 1):
            before = [value for value in one.told[: count - self.wait] if value is not None]
            if max(value for value in one.told[:count] if value is not None) < 1.01 * max(before):
                return count
        return len(one.told)


def ours(one: Searched) -> int:
    counts = range(1, len(one.told) + 1)
    return next((count for count in counts if has_converged(one.told[:count], 0.01)), len(one.told))


def never(one: Searched) -> int:
    return len(one.told)


def show_samplers(searched: Sequence[Searched], asked: argparse.Namespace) -> None:
    looks = [count for count in (4, 8, 12, 16, 24, 32) if count <= asked.trials]
    print(f"{'sampler':8} noise " + "".join(f"{f'after {look}':>10}" for look in looks), end="")
    print(f"{'confirmed':>11}{'worst':>8}{'ran out':>9}{'s/trial':>9}")
    for noise in asked.noise:
        for sampler in asked.samplers:
            mine = [one for one in searched if (one.sampler, one.noise) == (sampler, noise)]
            print(f"{sampler:8} {noise:5.0%} ", end="")
            print("".join(f"{mean(one.found[look] for one in mine):10.3f}" for look in looks), end="")
            print(f"{mean(one.final for one in mine):11.3f}{min(one.final for one in mine):8.3f}", end="")
            print(f"{mean(one.ran_out for one in mine):9.0%}{mean(one.deciding_s for one in mine):9.2f}")


def show_rules(searched: Sequence[Searched], asked: argparse.Namespace, each: Callable[..., list[int]]) -> None:
    rules: dict[str, Callable[[Searched], int]] = {"never": never, "autods": ours}
    rules |= {
        f"patience {wait} from {first}": Patience(wait, first) for first in (1, STARTUP) for wait in (4, 6, 8, 10)
    }
    if asked.evaluators:
        rules |= {"RegretBoundEvaluator": by_regret, "EMMREvaluator": by_mean_regret}
    print(f"\n{'rule':22} noise  trials  found   lost")
    for noise in asked.noise:
        mine = [one for one in searched if one.noise == noise]
        for name, rule in rules.items():
            stops = [count - 1 for count in each(rule, mine)]  # less the start, which costs nothing
            found = mean(one.found[stop] for one, stop in zip(mine, stops, strict=True))
            lost = mean(one.found[-1] for one in mine) - found
            print(f"{name:22} {noise:5.0%} {mean(stops):7.1f} {found:6.3f} {lost:6.3f}", flush=True)


def silence() -> None:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(logging.ERROR)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--surfaces", type=int, default=12)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.02, 0.05])
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=["gp", "tpe", "tpe-5", "qmc", "random"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--evaluators", action="store_true", help="Optuna's own stop rules too, minutes more")
    return parser.parse_args()


if __name__ == "__main__":
    main()
