"""What a search asks of the forecasts of its trials, and what it reads in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..forecast.largest_batch import Fills
from ..forecast.values import PartitionedBuild, RungForecast
from ..types import Tier, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """The seconds of a trial's optimizer step: what is expected, and the low end of the forecast's interval.

    `low_seconds` is no less than the machine's peak rates allow, and 0 where the simulation is an upper bound.
    `computed_seconds` are those in which the card computes; in the others it waits for links, the host or launches.
    `copied_seconds` are those in which it waits for copies to and from the host and NVMe, and for the host's own work.
    """

    seconds: float
    low_seconds: float
    computed_seconds: float
    copied_seconds: float = 0.0


class Forecaster:
    """Forecasts trials on this machine. This one knows nothing; `TrialForecaster` simulates them."""

    forecasts: Mapping[str, RungForecast] = MappingProxyType({})  # by rung: of its first trial, else of the least batch
    own_batch: int | None = None  # of a script whose command line cannot change it, where a simulation has shown it

    def prepare(self, trials: Iterable[Trial]) -> None:
        """Simulate these trials side by side, so that their forecasts are at hand."""

    def forecast(self, trial: Trial) -> RungForecast | None:
        """The memory that the trial will need; None when it cannot be simulated."""
        return None

    def largest_calm(self, trial: Trial, sizes: Sequence[int]) -> int | None:
        """The largest of these micro batches (ascending) at which the trial's allocator should not run full.

        None where it should at all of them, and where nothing is known.
        """
        return None

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        """The largest of these micro batches (ascending) that should fit in `usable_bytes`; None when unknown.

        It should not run full in each step either, unless all of them do.
        """
        return None

    def find_fills(self, trial: Trial, micro_batch: int, usable_bytes: float) -> Fills | None:
        """The peaks of the trial at a micro batch over their limits, the device's `usable_bytes`; None when unknown.

        Two simulations tell them for any micro batch.
        """
        return None

    def choose_allocator(self, trial: Trial) -> Trial:
        """The trial with the settings of torch's allocator that its forecast asks for."""
        return trial

    def step_time(self, trial: Trial) -> StepForecast | None:
        """The seconds of the trial's optimizer step; None when they cannot be forecast."""
        return None

    def propose_partitioned_build(
        self, trials: Iterable[Trial], ran_out: Mapping[str, Tier]
    ) -> PartitionedBuild | None:
        """What `--zero-init` gives those of the trials that lack memory to build; None where that helps none.

        `ran_out` has the rungs whose trials lacked a tier in that phase.
        """
        return None


NO_FORECASTER = Forecaster()


def describe_own_batch(micro_batch: int) -> str:
    """The sentence for the user of a script whose command line cannot change its micro batch."""
    return f"micro batch {micro_batch}, which the script fixes; no other one is tried"


def why_impossible(forecast: RungForecast | None) -> str | None:
    """The reason to skip a trial whose forecast exceeds a limit even at its low end; None when it may fit."""
    if forecast is None or forecast.verdict != "cannot_fit":
        return None
    return f"cannot fit by the forecast: {forecast.reason}"


def lacking_bytes(forecast: RungForecast) -> int | None:
    """Bytes that the device lacks at the low end of the forecast; None where a tier that others use too lacks some."""
    lacking = {
        tier: max(0, held.low_bytes - held.limit_bytes)
        for tier, held in forecast.memory.items()
        if held.limit_bytes is not None
    }
    device_bytes = lacking.pop("device", 0)
    return None if any(lacking.values()) else device_bytes
