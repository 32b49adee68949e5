"""The search of a fit, step by step: walk, grow, race, tune, certify. Each step reads values and returns values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from .checks import precision_of
from .ds_config import get
from .events import Note
from .journal import key_of
from .outcomes import AFTER_THE_STEPS, Fit
from .resume import Memory
from .search.applies import check_ranks, idle, tunable, unforeseeable
from .search.ask import fits_within, is_alike, score_of
from .search.candidates import Candidate, candidates
from .search.certify import Certified, certify
from .search.climb import Rules
from .search.finals import finals
from .search.first_fit import first_fit
from .search.foresight import Foresight
from .search.grow import climbed
from .search.race import Raced, race
from .search.shortfall import Closest, shortfall
from .search.tune import Tuned, tune
from .search.variants import without_checkpointing
from .search.walk import Walked, first_trial, tried, walk
from .settings import Settings, with_config_of
from .values import ModelFacts, Record, Trial

# Losses of two configs that compute the same differ by rounding alone. Measured on CPU ranks, over rungs, cuts of the
# batch, buckets and checkpointing: up to 3e-7 in fp32, 5e-3 in bf16. A learning rate that is a tenth higher: 6e-3.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


# Of the trials of tuning, for a runner-up with the settings of the winner: what these are worth is known by then.
_SAME_KEYS = 1 / 3


class Runner(Protocol):
    """What a fit needs of a runner; `cluster.runner.RayRunner` is the real one."""

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]: ...

    def run(self, trial: Trial, *, id: int) -> Record: ...

    def final_config(self, trial: Trial) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A config that fits, and how each step came to it. ds_config: as the user gets it."""

    facts: ModelFacts
    walked: Walked
    raced: Raced
    tuned: Tuned
    certified: Certified | None
    ds_config: Mapping[str, Any]

    @property
    def best(self) -> Record:
        """The trial whose config is taken."""
        return self.tuned.best if self.certified is None else self.certified.best


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Nothing fits, or what stopped the walk says that nothing can be tried; the rung that came closest."""

    facts: ModelFacts
    walked: Walked
    closest: Closest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is given and stays. check: passes a record on, and raises when the machine has to be mended first.

    so_far: told of the best config that is known after each step, so that it is not lost when the rest is.
    """

    settings: Settings
    runner: Runner
    memory: Memory
    foresight: Foresight
    study: Path
    check: Callable[[Record], Record]
    so_far: Callable[[Record], None] = lambda record: None

    def found(self) -> Found | Nothing:
        """Everything that runs trials."""
        facts, op_problems = self.runner.survey()
        check_ranks(facts, self.settings.gpus)
        if self.settings.forecast and (reason := unforeseeable(facts)) is not None:
            self.memory.listen(Note(text=f"{reason}; rungs are tried instead"))
        if (waiting := idle(facts, self.settings.global_batch)) is not None:
            self.memory.listen(Note(text=waiting))
        return replace(self, settings=with_config_of(self.settings, facts))._found(facts, op_problems)

    def _found(self, facts: ModelFacts, op_problems: Mapping[str, str]) -> Found | Nothing:
        rungs = candidates(self.settings, facts, op_problems)
        steps = self.settings.profile.walk
        walked = walk(rungs, self.memory.run, steps, self.memory.listen, self.foresight, before=self._keeping)
        if walked.winner is None:
            closest = None if walked.stopped else self._closest(walked)
            return Nothing(facts=facts, walked=walked, closest=closest)
        self.so_far(walked.winner)
        raced = self._raced(walked.winner, walked, rungs, facts)
        self.so_far(raced.best)
        tuned = self._tuned(raced, facts)
        self.so_far(tuned.best)
        untried = (*self._recomputing(walked.winner, rungs), *rivals_of(rungs, walked))
        certified = self._certified(tuned, raced, walked.winner, untried, facts)
        best = tuned.best if certified is None else certified.best
        return Found(
            facts=facts, walked=walked, raced=raced, tuned=tuned, certified=certified,
            ds_config=self.runner.final_config(best.trial),
        )  # fmt: skip

    @property
    def usable_bytes(self) -> float:
        """Of the device, with the headroom left."""
        return self.settings.device_bytes * (1 - self.settings.profile.headroom)

    def run(self, trial: Trial) -> Record:
        """A trial after the walk: what a person has to mend ends the fit."""
        record = self.memory.run(trial)
        return record if trial.examined_from_s is not None and _is_of_the_exam(record) else self.check(record)

    def may_run(self, trials: int) -> bool:
        """Whether the budget lets race and tune run so many more; what the certificate needs is set aside."""
        budget, records = self.settings.budget, self.memory.records
        certify = self.settings.profile.certify
        aside = 0 if certify.most_trials < 1 else 1 if certify.parity is None else 3
        spent_s = sum(record.seconds for record in records)
        return not (budget.trials and len(records) + trials + aside > budget.trials) and not (
            budget.seconds and spent_s >= budget.seconds
        )

    def _keeping(self, candidate: Candidate) -> Candidate | None:
        """The rung without recomputing, where the first rung that fits is taken and this one fits by far: recomputing
        would cost it time, and a trial to see that."""
        race = self.settings.profile.race
        if race.stop != "first-fit" or not race.checkpointing or self.settings.objective == "memory":
            return None
        if not candidate.knobs.checkpointing or candidate.stand_in:
            return None
        lighter = without_checkpointing(candidate)
        trial = first_trial(lighter, self.settings.profile.walk)
        known = key_of(trial) in self.memory.past.records  # what ran out later, before a kill, changes no first look
        return lighter if known or self.foresight.is_obvious(trial) else None

    def _recomputing(self, winner: Record, rungs: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """The winner's rung with recomputing, where nobody looked at that: what it may back off to."""
        rung = winner.trial.rung
        known = [one for one in self.memory.records if one.trial.rung == rung and one.trial.knobs.checkpointing]
        return () if known else tuple(one for one in rungs if one.rung.name == rung and one.knobs.checkpointing)

    def _closest(self, walked: Walked) -> Closest | None:
        settings = self.settings
        return shortfall(
            walked.records,
            self.memory.run,
            settings.profile.walk,
            settings.device_bytes,
            can_unlimit=settings.device_bytes_asked,
        )

    def _rules(self, facts: ModelFacts) -> Rules:
        profile = self.settings.profile
        return Rules(
            run=self.run,
            limits=profile.grow,
            steps=profile.timed,
            usable_bytes=self.usable_bytes,
            world_size=facts.replicas(self.settings.gpus),
            global_batch=self.settings.global_batch,
            foresight=self.foresight,
            score=score_of(self.settings.objective),
            grows=self.settings.objective != "memory",
            examines=self._examines_at_once,
        )

    @property
    def _examines_at_once(self) -> bool:
        """Whether the first config that is grown is likely to be the answer; the exam of a script ends it."""
        profile = self.settings.profile
        alone = profile.race.stop == "first-fit" and profile.certify.parity is None
        return alone and profile.certify.most_trials > 0 and self.settings.source.kind != "script"

    def _raced(self, first: Record, walked: Walked, rungs: Sequence[Candidate], facts: ModelFacts) -> Raced:
        """The first rung that fits, grown; and the fastest of all, where that is what is wanted."""
        rules, limits = self._rules(facts), self.settings.profile.race
        rung = next(one for one in rungs if one.rung.name == first.trial.rung)
        winner = replace(rung, knobs=replace(rung.knobs, settings=first.trial.knobs.settings))
        if limits.stop == "first-fit":
            walk_steps = self.settings.profile.walk
            return first_fit(first, winner, rules, walk_steps=walk_steps, limits=limits, may_run=self.may_run)
        shorter = replace(rules.limits, most_trials=limits.most_trials)
        return race(
            climbed(first, rules),
            rivals_of(rungs, walked),
            replace(rules, limits=shorter, steps=limits.steps),
            winner=winner,
            walk_steps=self.settings.profile.walk,
            limits=limits,
            lessons=walked.lessons,
            precisions=self.settings.precisions,
            may_run=self.may_run,
        )

    def _tuned(self, raced: Raced, facts: ModelFacts) -> Tuned:
        """The winner, and the runner-up as well where it was as fast but for the noise."""
        score = score_of(self.settings.objective)
        noise = self.settings.profile.race.noise / 2
        tuned = self._tune(raced.best, facts)
        timed = [one for one in raced.others if one.trial.purpose != "walk"]
        close = [one for one in timed if score(one) >= (1 - noise) * score(raced.best)][:1]
        tunes = self.settings.profile.tune.trials > 0 and self.settings.objective != "memory"
        if not close or not tunes or not self._may_tune():
            return tuned
        share = 1.0
        if self._keys_of(close[0]) <= self._keys_of(raced.best):
            if is_alike(tuned.best, raced.best):
                return replace(
                    tuned, reason=f"{tuned.reason}; {close[0].trial.rung}, as fast, has no other settings to try"
                )
            share = _SAME_KEYS
        also = self._tune(close[0], facts, share)
        final = finals(
            [tuned.best, also.best],
            self.run,
            turns=self.settings.profile.tune.turns,
            usable_bytes=self.usable_bytes,
            score=score,
            purpose="tune",  # what confirmed the start has asked for its repeats already
        )
        first = also if is_alike(final.best, also.best) else tuned
        return replace(
            first,
            best=final.best,
            records=tuned.records + also.records + final.records,
            reason=f"{tuned.reason}; the runner-up: {also.reason}; {final.reason}",
        )

    def _keys_of(self, record: Record) -> set[str]:
        """What can be tuned of its rung."""
        return {key for one in self.settings.ladder if one.name == record.trial.rung for key in one.tune}

    def _may_tune(self) -> bool:
        """Whether one more trial leaves enough to confirm what it may find."""
        return self.may_run(1 + 2 * self.settings.profile.tune.turns)

    def _tune(self, start: Record, facts: ModelFacts, share: float = 1.0) -> Tuned:
        """share: of the trials that tuning may have."""
        settings, profile = self.settings, self.settings.profile
        limits = replace(profile.tune, trials=ceil(share * profile.tune.trials))
        rung = tunable(next(rung for rung in settings.ladder if rung.name == start.trial.rung), facts)
        config = self.runner.final_config(start.trial)
        return tune(
            start,
            self.run,
            rung=rung,
            limits=limits,
            steps=profile.timed,
            limit_bytes=settings.device_bytes,
            headroom=profile.headroom,
            seed=settings.seed,
            study_path=self.study,
            current={key: value for key in rung.tune if (value := get(config, key)) is not None},
            foresight=self.foresight,
            score=score_of(settings.objective),
            may_go_on=self._may_tune,
        )

    def _certified(
        self, tuned: Tuned, raced: Raced, reference: Record, untried: Sequence[Candidate], facts: ModelFacts
    ) -> Certified | None:
        settings, limits = self.settings, self.settings.profile.certify
        if limits.most_trials < 1:
            return None
        return certify(
            tuned.best,
            self._examine,
            alternates=(raced.best, *raced.others),
            reference=self._largest(reference) if limits.parity is not None else None,
            steps=limits.steps,
            parity_steps=limits.parity or limits.steps,
            tolerance=max(TOLERANCE[one] for one in (precision_of(settings.base), *settings.precisions)),
            limit_bytes=settings.device_bytes,
            headroom=settings.profile.headroom,
            world_size=facts.replicas(settings.gpus),
            global_batch=settings.global_batch,
            most_trials=limits.most_trials,
            longest_ratio=facts.longest_ratio,
            seen=tuple(self.memory.records),
            leaner=self._leaner(untried if settings.profile.race.stop == "first-fit" else ()),
            alike=settings.source.kind == "script",
        )

    def _largest(self, plain: Record) -> Record:
        """The same config at the largest micro batch that is known to fit: it trains on the winner's samples, and at
        micro batch 1 that would take many times as long."""

        def cut(record: Record) -> Trial:
            knobs = replace(record.trial.knobs, micro_batch=1, accumulation=1)
            usual = replace(record.trial, purpose="walk", steps=plain.trial.steps, repeat=0)
            return replace(usual, knobs=knobs)

        alike = [one for one in self.memory.records if cut(one) == cut(plain) and fits_within(one, self.usable_bytes)]
        return max([plain, *alike], key=lambda one: one.trial.knobs.micro_batch)

    def _examine(self, trial: Trial) -> Record:
        """A trial of the certificate: a disk too full for a checkpoint is said there, and ends no fit."""
        record = self.memory.run(trial)
        return record if _is_of_the_exam(record) else self.check(record)

    def _leaner(self, untried: Sequence[Candidate]) -> Iterator[Record]:
        """Rungs that nobody tried yet, one at a time, as far as they fit."""
        for candidate in untried:
            last = tried(candidate, self.run, self.settings.profile.walk)[-1]
            if isinstance(last.outcome, Fit):
                yield last


def _is_of_the_exam(record: Record) -> bool:
    """Whether a trial failed after its steps."""
    return not isinstance(record.outcome, Fit) and record.outcome.phase in AFTER_THE_STEPS


def rivals_of(rungs: Sequence[Candidate], walked: Walked) -> tuple[Candidate, ...]:
    """The rungs that the walk neither tried nor passed over. One that keeps states on NVMe moves them there and back in
    each step, and its op takes minutes to build: it only runs where nothing else fits."""
    known = {record.trial.rung for record in walked.records} | {skipped.rung for skipped in walked.skipped}
    return tuple(
        one
        for one in rungs
        if one.skip is None and one.rung.name not in known and "nvme" not in one.rung.places.values()
    )
