"""The context of a fit whose trials a function answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autods.config.profiles import MemoryLimits
from autods.tuner.forecaster import NO_FORECASTER, Forecaster
from autods.tuner.trials import FitContext
from autods.types import ModelFacts, Record, Run, Trial
from tests.support.walks import FACTS, SETTINGS


@dataclass
class ScriptedTrials:
    """Runs trials as a `TrialStore` does, without a journal."""

    answer: Run
    records: list[Record] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)

    @property
    def known_records(self) -> Sequence[Record]:
        return self.records

    def run(self, trial: Trial) -> Record:
        self.records.append(self.answer(trial))
        return self.records[-1]

    def listen(self, event: Any) -> None:
        self.events.append(event)


def make_context(
    run: Run,
    *,
    facts: ModelFacts = FACTS,
    forecaster: Forecaster = NO_FORECASTER,
    study: Path = Path("study.jsonl"),
    seen: Sequence[Record] = (),
    headroom: float = 0.05,
    profile: Mapping[str, Any] | None = None,
    **settings: Any,
) -> FitContext:
    """`profile` and `settings` replace parts of the shared settings; `seen` are trials that were run before."""
    changed = replace(SETTINGS.profile, memory=MemoryLimits(headroom=headroom), **(profile or {}))
    return FitContext(
        settings=replace(SETTINGS, profile=changed, **settings),
        facts=facts,
        memory=ScriptedTrials(run, list(seen)),  # type: ignore[arg-type]
        forecaster=forecaster,
        study=study,
        final_config=lambda trial: {},
    )
