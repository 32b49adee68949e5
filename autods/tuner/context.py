"""What every step of a fit works with: the settings, the facts of the workload, and trials within the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..config.settings import Settings
from ..journal import TrialStore
from ..types import ModelFacts, Record, Trial
from .comparison import Score
from .forecasts import Forecaster
from .trials import score_function


class Runner(Protocol):
    """Runs trials on real ranks. `runner.runner.RayRunner` is the one of a fit, `runner.testing` has a scripted one."""

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]:
        """The facts of the model, and DeepSpeed op → the reason that it cannot be built here."""

    def run(self, trial: Trial, *, id: int) -> Record:
        """Run one trial to its end."""

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """The DeepSpeed config of a trial as the user gets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """The inputs that all steps share.

    `settings` include the config that the workload brings.
    `study` is the file of Optuna's study.
    `check` returns a record, or raises when the machine needs repair first.
    `final_config` returns a trial's DeepSpeed config as the user gets it.
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
        """Device memory less the headroom."""
        return usable_bytes_of(self.settings)

    @property
    def world_size(self) -> int:
        """Replicas of the model; each has a separate batch."""
        return self.facts.replicas(self.settings.gpus)

    @property
    def score(self) -> Score:
        """The score to maximise."""
        return score_function(self.settings.objective)

    def run(self, trial: Trial) -> Record:
        """Run a trial; raises when the machine fails."""
        return self.check(self.memory.run(trial))

    def may_run(self, trials: int) -> bool:
        """Whether the budget allows race and tuning so many more trials, besides those of the certificate."""
        budget, records = self.settings.budget, self.memory.records
        certify = self.settings.profile.certify
        reserved = 0 if certify.most_trials < 1 else 1 if certify.parity is None else 3
        if budget.trials and len(records) + trials + reserved > budget.trials:
            return False
        return not (budget.seconds and sum(record.seconds for record in records) >= budget.seconds)


def usable_bytes_of(settings: Settings) -> float:
    """Device memory less the headroom of the profile."""
    return settings.device_bytes * (1 - settings.profile.memory.headroom)
