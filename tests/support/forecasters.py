"""A scripted forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autods.forecast.values import PartitionedBuild, RungForecast, TierForecast, Verdict
from autods.tuner.forecaster import StepForecast
from autods.types import Tier, Trial


def scripted_forecast(
    rung: str, verdict: Verdict, *, low: int = 1, limit: int = 1, tier: Tier = "device"
) -> RungForecast:
    held = TierForecast(peak_bytes=low, low_bytes=low, high_bytes=low, limit_bytes=limit)
    return RungForecast(rung=rung, verdict=verdict, reason="needs more", micro_batch=1, memory={tier: held})


@dataclass(slots=True)
class ScriptedForecaster:
    """Forecasts by a function. `asked` and `prepared` list the rungs of the calls."""

    answer: Callable[[Trial], RungForecast | None]
    batch: int | None = None
    asked: list[str] = field(default_factory=list)
    prepared: list[str] = field(default_factory=list)
    forecasts: dict[str, RungForecast] = field(default_factory=dict)
    own_batch: int | None = None
    ran_out: dict[str, Tier] = field(default_factory=dict)

    def prepare(self, trials: Iterable[Trial]) -> None:
        self.prepared += [trial.rung for trial in trials]

    def forecast(self, trial: Trial) -> RungForecast | None:
        self.asked.append(trial.rung)
        return self.answer(trial)

    def step_time(self, trial: Trial) -> StepForecast | None:
        return None

    def propose_partitioned_build(
        self, trials: Iterable[Trial], ran_out: Mapping[str, Tier]
    ) -> PartitionedBuild | None:
        self.ran_out = dict(ran_out)
        return None

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        return self.batch
