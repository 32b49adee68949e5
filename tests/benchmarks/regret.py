"""How near the search comes to the best: whole searches of made-up machines whose optimum is known.

python tests/benchmarks/regret.py [--seeds 200] [--first-seed 0] [--config default] [--blind] [--tune] [--quantised]
    [--rough] [--busy] [--json] [--time-error E,…]

Each seed draws a model and a machine (tests/support/surfaces.py): eight rungs, none of which is always the fastest,
with and without checkpointing; step times that are 5 % noise each; cliffs; a forecast that is a few percent wrong.
Share: the true speed of the answer over that of the best rung, micro batch and checkpointing within the memory, both
with the best settings; what tuning adds is shown beside it. --blind: no forecast. --tune: with Optuna, which takes
longer. --quantised: kernels run in whole waves, so that a size just above a full wave is slower than the next full one.
--rough: the same, with noisy peaks and models that need several samples (tests/support/true_answers.py), and each
answer is held beside what was measured: none may be slower than a measured config that leaves the headroom by more than
the profile's noise, and every reason has to follow from the trials. --busy: also with other work at times.
--time-error 0,0.3,1: the same seeds with forecasts of step time, whose logarithm errs by so much for each rung (0.3: by
about 30 %); "none" is without. A table compares the trials that each needs until one of them reaches 97 % of the best.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from autods.config.profiles import read_profile
from autods.tuner.fit import search
from autods.tuner.fit_report import NothingFits
from autods.types import Fit, OutOfMemory, Record
from tests.support.surfaces import Surface, SurfaceForecaster, searching
from tests.support.true_answers import RoughSurface, contradictions, slower_than_measured

_GOOD = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one search found. share: 1 is the optimum; tuned_share: with its own settings, beside the best ones.
    tried_share: of the best config that any trial ran. slower: than the best measured config that leaves the headroom.
    wrong: the reasons that do not follow from the trials."""

    seed: int
    found: str
    best: str
    share: float
    tuned_share: float
    tried_share: float
    trials: int
    out_of_memory: int
    deciding_s: float
    slower: float = 0.0
    wrong: tuple[str, ...] = ()
    until_good: int | None = None  # trials until one reached 97 % of the best; None: none did


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0, help="search settings were chosen on 0 to 199")
    parser.add_argument("--config", default="default")
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--quantised", action="store_true")
    parser.add_argument("--rough", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--time-error", default="none", help="standard errors of forecasts of step time; none")
    asked = parser.parse_args()
    errors = [None if word == "none" else float(word) for word in asked.time_error.split(",")]
    if len(errors) > 1:
        return _compare(errors, asked)
    jobs = [
        Job(seed, asked.config, asked.blind, asked.tune, asked.quantised, asked.rough or asked.busy, asked.busy)
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds)
    ]
    answers = _run([job._replace(time_error=errors[0]) for job in jobs])
    if asked.json:
        print(json.dumps([asdict(answer) for answer in answers], indent=1))
    else:
        _show(answers, asked.seeds)
    if asked.rough or asked.busy:
        noise = read_profile(asked.config).race.noise
        slower = sum(answer.slower > noise for answer in answers)
        wrong = [f"seed {answer.seed}: {reason}" for answer in answers for reason in answer.wrong]
        print(
            "\n".join((*wrong, f"slower than a measured config by more than {noise:.0%}: {slower} of {len(answers)}"))
        )
        print(f"reasons that do not follow from the trials: {len(wrong)}")
        return 1 if slower or wrong else 0
    return 0 if _good(answers) >= 0.95 * len(answers) and _full(answers) <= 0.10 else 1


def _run(jobs: list[Job]) -> list[Answer]:
    with ProcessPoolExecutor(2) as pool:
        return [answer for answer in pool.map(_answer, jobs, chunksize=4) if answer is not None]


def _compare(errors: list[float | None], asked: argparse.Namespace) -> int:
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    jobs = [Job(seed, asked.config, asked.blind, asked.tune, asked.quantised, asked.rough, False) for seed in seeds]
    print(f"seeds {seeds[0]} to {seeds[-1]}: trials until one reaches {_GOOD:.0%} of the best, and of the whole search")
    print(f"{'error of step time':20}{'median':>8}{'nine in ten':>13}{'reached':>9}{'whole':>7}{'good answers':>14}")
    for error in errors:
        answers = _run([job._replace(time_error=error) for job in jobs])
        until = sorted(answer.until_good or 10**6 for answer in answers)
        reached = sum(answer.until_good is not None for answer in answers) / len(answers)
        tenth = until[int(0.9 * (len(until) - 1))]
        whole = median(answer.trials for answer in answers)
        name = "no forecast" if error is None else f"{error:.0%}"
        good = _good(answers) / len(answers)
        most = f"{tenth}" if tenth < 10**6 else "never"
        print(f"{name:20}{median(until):>8.0f}{most:>13}{reached:>9.0%}{whole:>7.0f}{good:>14.1%}")
    return 0


class Job(NamedTuple):
    """One search; the fields are those of the command."""

    seed: int
    config: str
    blind: bool
    tunes: bool
    quantised: bool
    rough: bool
    busy: bool
    time_error: float | None = None


def _answer(job: Job) -> Answer | None:
    seed = job.seed
    surface = RoughSurface(seed, busy=job.busy) if job.rough else Surface(seed, quantised=job.quantised)
    profile = read_profile(job.config)
    if not job.tunes:
        profile = replace(profile, tune=replace(profile.tune, trials=0))
    forecaster = SurfaceForecaster(surface, job.time_error)
    with searching(surface, profile=profile, forecaster=forecaster, blind=job.blind) as context:
        best, what = surface.optimum(context.usable_bytes, [name for name in surface.rungs if name != "zero3-nvme"])
        began = time.process_time()
        found = search(context)
        deciding_s = time.process_time() - began
        records = context.memory.records
        slower, wrong = 0.0, []
        if isinstance(surface, RoughSurface) and not isinstance(found, NothingFits):
            slower, wrong = slower_than_measured(surface, context, found), contradictions(surface, context, found)
    if isinstance(found, NothingFits) or not best:
        return None  # only NVMe, or nothing, holds this model: there is nothing to choose from
    trial = found.best.trial
    tuned = surface.rate(trial) / best
    shares = [_share(surface, record, best) if context.fits(record) else 0.0 for record in records]
    recomputes = "with" if trial.knobs.checkpointing else "without"
    return Answer(
        seed=seed,
        found=f"{trial.rung}, micro batch {trial.knobs.micro_batch}, {recomputes} checkpointing",
        best=what,
        share=tuned * (1 + surface.distaste(trial)),
        tuned_share=tuned,
        tried_share=max(_share(surface, record, best) for record in records),
        trials=len(records),
        out_of_memory=sum(isinstance(record.outcome, OutOfMemory) for record in records),
        deciding_s=deciding_s,
        slower=slower,
        wrong=tuple(wrong),
        until_good=next((number for number, share in enumerate(shares, 1) if share >= _GOOD), None),
    )


def _share(surface: Surface, record: Record, best: float) -> float:
    if not isinstance(record.outcome, Fit):
        return 0.0
    return surface.rate(record.trial) * (1 + surface.distaste(record.trial)) / best


def _show(answers: list[Answer], seeds: int) -> None:
    shares = [answer.share for answer in answers]
    for answer in answers:
        if answer.share < _GOOD:
            print(
                f"  seed {answer.seed}: {answer.share:.3f}, tried {answer.tried_share:.3f} in {answer.trials}:", end=" "
            )
            print(f"{answer.found}; best: {answer.best}")
    print(f"{_good(answers)} of {len(answers)} answers reach {_GOOD:.0%} of the optimum ({seeds} seeds)")
    print(f"share: mean {mean(shares):.4f}, least {min(shares):.3f}")
    print(f"with its settings beside the best ones: mean {mean(answer.tuned_share for answer in answers):.4f}")
    trials = [answer.trials for answer in answers]
    print(f"trials: median {median(trials):.0f}, most {max(trials)}; out of memory {_full(answers):.1%}")
    print(f"deciding: {sum(one.deciding_s for one in answers) / sum(trials) * 1000:.0f} ms of processor time a trial")


def _good(answers: list[Answer]) -> int:
    return sum(answer.share >= _GOOD for answer in answers)


def _full(answers: list[Answer]) -> float:
    return sum(answer.out_of_memory for answer in answers) / sum(answer.trials for answer in answers)


if __name__ == "__main__":
    sys.exit(main())
