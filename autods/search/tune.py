"""Tune a rung's buckets and switches with Optuna. The study lies on disk, so that a killed fit goes on with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..forecast.values import RungForecast
from ..ladder import Rung
from ..settings import TuneLimits
from ..values import Record, Run, Scalar, Steps
from .ask import fits_within, paced, samples_per_second, step_s_of
from .confirm import confirm
from .enough import WAIT, enough
from .finals import PRIOR_NOISE, Score
from .foresight import BLIND, Foresight
from .judge import Judge
from .space import Space, space_of
from .study import distributions, gp, importances_of, open_study, scores_of, told_of
from .variants import name_of

if TYPE_CHECKING:  # optuna is imported where it is used: reading this module stays cheap
    import optuna

Sampler = Callable[[int], "optuna.samplers.BaseSampler"]

_MOST_LEADERS = 2  # are measured again: of two the better is found more often, a third costs more than it brings


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What tuning found: `best` is the start unless another was confirmed to be faster.

    importances: key → share of the variation of the score, empty when there are too few trials to tell. accumulation:
    what more micro batches a step came to, a sentence; None: none were tried.
    """

    best: Record
    records: tuple[Record, ...]
    importances: Mapping[str, float]
    reason: str
    accumulation: str | None = None


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
    score: Score = samples_per_second,
    stop_gain: float = 0.01,
    may_go_on: Callable[[], bool] = lambda: True,
    sampler: Sampler = gp,
) -> Tuned:
    """Search `rung.tune` around `start` for a higher score within the usable memory, in up to limits.trials trials.

    The proposals are a function of the seed and of the outcomes before, so that a search that was killed and goes on
    proposes what it would have proposed. current: what the start's DeepSpeed config says of keys that its settings
    leave out. A proposal that cannot fit by its forecast is not run. score: larger is better, above 0 for a fit.
    stop_gain: the search ends once it no longer gains this share, see `enough`; 0 spends all trials. may_go_on: asked
    before each proposal; the leaders that it has found by then are still measured again. sampler: made anew for each
    proposal, from a seed. Raises InputError when the study on disk is damaged.
    """
    space = space_of(rung, start.trial.knobs.settings, current or {})
    if not space.dimensions or limits.trials < 1:
        why = "no trials were granted for tuning" if space.dimensions else f"{rung.name} has nothing to tune"
        return Tuned(best=start, records=(), importances={}, reason=why)
    judge = Judge(start=start, limit_bytes=limit_bytes, headroom=headroom, foresight=foresight, score=score)
    knobs = start.trial.knobs
    name = name_of(rung.name, knobs, recomputes=True)  # its variants have studies of their own
    study = open_study(study_path, f"{name}, micro batch {knobs.micro_batch} × {knobs.accumulation}", space)
    search = _Search(study=study, space=space, judge=judge, run=run, steps=steps, seed=seed, sampler=sampler)
    ended = search.until(trials=limits.trials, stop_gain=stop_gain, may_go_on=may_go_on)
    records = tuple(answer for answer in search.answers.values() if isinstance(answer, Record) and answer is not start)
    foretold = sum(isinstance(answer, RungForecast) for answer in search.answers.values())
    importances = importances_of(study)
    said = f"{len(records) or 'no'} other settings of {rung.name} were tried"
    said += f" ({foretold} more cannot fit by the forecast)" if foretold else ""
    said += ended if records else ended.replace(" until", ":", 1)
    better = [one for one in records if fits_within(one, judge.usable_bytes) and score(one) > score(start)]
    if not better:
        none = "none was faster" if score is samples_per_second else "none was better"
        reason = f"{said}, {none}" if records else said
        return Tuned(best=start, records=records, importances=importances, reason=reason)
    leaders = _leaders(better, score)
    final = confirm(
        start, leaders, run, gain=limits.gain, turns=limits.turns, usable_bytes=judge.usable_bytes, score=score
    )
    reason = f"{said}; {final.reason}"
    return Tuned(best=final.best, records=records + final.records, importances=importances, reason=reason)


def _leaders(better: Sequence[Record], score: Score) -> list[Record]:
    """The best, and those whose lead it has by less than the noise of two measurements: best first."""
    ranked = sorted(better, key=score, reverse=True)[:_MOST_LEADERS]
    return [one for one in ranked if score(one) * (1 + PRIOR_NOISE * sqrt(2)) >= score(ranked[0])]


@dataclass(slots=True, kw_only=True)
class _Search:
    """A search under way; what became of each proposal is in `answers`, the start first."""

    study: optuna.Study
    space: Space
    judge: Judge
    run: Run
    steps: Steps
    seed: int
    sampler: Sampler
    answers: dict[str, Record | RungForecast] = field(default_factory=dict)

    def until(self, *, trials: int, stop_gain: float, may_go_on: Callable[[], bool]) -> str:
        """Ask and tell until the start and `trials` more are told; what ended it before, as the end of a sentence."""
        self.answers = {_key(self.space.start): self.judge.start}
        for past in told_of(self.study):
            self._answer(past.params)  # from the journal: these were run
        while (told := len(scores := scores_of(self.study))) <= trials:
            if enough(scores, stop_gain):
                return f" until {WAIT} in a row had gained less than {100 * stop_gain:g}%"
            if not may_go_on():
                return " until the budget was spent"
            # A new sampler each time, seeded by the position: no state but the study's has to survive a kill.
            self.study.sampler = self.sampler(self.seed + told)
            asked = self.study.ask(distributions(self.space))
            self.judge.tell(self.study, asked, self._answer(asked.params))
        return ""

    def _answer(self, proposal: Mapping[str, Any]) -> Record | RungForecast:
        settings = self.space.settings(proposal)
        key = _key(settings)
        if key not in self.answers:  # rounding and a confident sampler propose the same again: told, not run
            first = self.judge.start.trial
            knobs = replace(first.knobs, settings={**first.knobs.settings, **settings})
            steps = paced(self.steps, step_s_of(self.judge.start))
            trial = replace(first, knobs=knobs, purpose="tune", steps=steps, repeat=0)
            forecast = self.judge.foresight.forecast(trial)
            cannot_fit = forecast is not None and forecast.verdict == "cannot_fit"
            self.answers[key] = forecast if forecast is not None and cannot_fit else self.run(trial)
        return self.answers[key]


def _key(settings: Mapping[str, Scalar]) -> str:
    return json.dumps(dict(settings), sort_keys=True)
