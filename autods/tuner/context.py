"""What every step of a search works with: the question, the workload's facts, and trials within the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..journal import TrialStore
from ..settings import Settings
from ..types import ModelFacts, Record, Trial
from .comparison import Score
from .forecasts import Forecaster
from .trials import score_function


class Runner(Protocol):
    """What a fit needs of a runner; `runner.runner.RayRunner` is the real one."""

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]: ...

    def run(self, trial: Trial, *, id: int) -> Record: ...

    def final_config(self, trial: Trial) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """settings: with the config that the workload brings. final_config: of a trial, as the user gets it.

    check: passes a record on, and raises when the machine has to be mended first.
    """

    settings: Settings
    facts: ModelFacts
    memory: TrialStore
    forecaster: Forecaster
    study: Path
    check: Callable[[Record], Record]
    final_config: Callable[[Trial], Mapping[str, Any]]

    @property
    def usable_bytes(self) -> float:
        """Of the device, with the headroom left."""
        return usable_bytes_of(self.settings)

    @property
    def world_size(self) -> int:
        """Replicas of the model, each with a batch of its own."""
        return self.facts.replicas(self.settings.gpus)

    @property
    def score(self) -> Score:
        """What is wanted of a config: larger is better."""
        return score_function(self.settings.objective)

    def run(self, trial: Trial) -> Record:
        """A trial after the walk: what a person has to mend ends the fit."""
        return self.check(self.memory.run(trial))

    def may_run(self, trials: int) -> bool:
        """Whether the budget lets race and tune run so many more; what the certificate needs is set aside."""
        budget, records = self.settings.budget, self.memory.records
        certify = self.settings.profile.certify
        aside = 0 if certify.most_trials < 1 else 1 if certify.parity is None else 3
        spent_s = sum(record.seconds for record in records)
        return not (budget.trials and len(records) + trials + aside > budget.trials) and not (
            budget.seconds and spent_s >= budget.seconds
        )


def usable_bytes_of(settings: Settings) -> float:
    """Of the device, with the headroom left."""
    return settings.device_bytes * (1 - settings.profile.headroom)
