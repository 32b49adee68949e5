"""The search of a fit, step by step: walk, grow, race, tune, accumulate, certify. Each reads and returns values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..events import Note
from ..resume import Memory
from ..search.applies import check_ranks, idle, unforeseeable
from ..search.candidates import Candidate, candidates
from ..search.foresight import Foresight
from ..settings import Settings, with_config_of
from ..values import ModelFacts, Record
from .accumulating import accumulated_from
from .certifying import certified_from
from .found import Found, Nothing
from .means import Means, Runner, usable_bytes_of
from .racing import raced_from
from .tuning import tuned_from
from .walking import closest_of, recomputing, rivals_of, walked_down


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

    @property
    def usable_bytes(self) -> float:
        """Of the device, with the headroom left."""
        return usable_bytes_of(self.settings)

    def found(self) -> Found | Nothing:
        """Everything that runs trials."""
        facts, op_problems = self.runner.survey()
        check_ranks(facts, self.settings.gpus)
        if self.settings.forecast and (reason := unforeseeable(facts)) is not None:
            self.memory.listen(Note(text=f"{reason}; rungs are tried instead"))
        if (waiting := idle(facts, self.settings.global_batch)) is not None:
            self.memory.listen(Note(text=waiting))
        means = self._means(facts)
        return _found(candidates(means.settings, facts, op_problems), means, self.so_far)

    def _means(self, facts: ModelFacts) -> Means:
        return Means(
            settings=with_config_of(self.settings, facts),
            facts=facts,
            memory=self.memory,
            foresight=self.foresight,
            study=self.study,
            check=self.check,
            final_config=self.runner.final_config,
        )


def _found(rungs: Sequence[Candidate], means: Means, so_far: Callable[[Record], None]) -> Found | Nothing:
    """The steps, in order."""
    walked = walked_down(rungs, means)
    if walked.winner is None:
        return Nothing(facts=means.facts, walked=walked, closest=closest_of(walked, means))
    so_far(walked.winner)
    raced = raced_from(walked.winner, walked, rungs, means)
    so_far(raced.best)
    tuned = accumulated_from(tuned_from(raced, means), means)
    so_far(tuned.best)
    untried = (*recomputing(walked.winner, rungs, means), *rivals_of(rungs, walked))
    certified = certified_from(tuned, raced, walked.winner, untried, means)
    best = tuned.best if certified is None else certified.best
    return Found(
        facts=means.facts, walked=walked, raced=raced, tuned=tuned, certified=certified,
        ds_config=means.final_config(best.trial),
    )  # fmt: skip
