"""What the search is told before it tries: forecasts. It asks, and goes on as well where there is no answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from ..forecast.values import RungForecast
from ..types import Trial


class Foresight(Protocol):
    """Forecasts trials on this machine; `forecast.forecaster` is the real one, `Blind` has none."""

    @property
    def said(self) -> Mapping[str, RungForecast]:
        """The first forecast of each rung that was asked for."""

    def prepare(self, trials: Iterable[Trial]) -> None:
        """Forecasts of these will be asked for, in this order."""

    def settle(self) -> None:
        """What was prepared and not asked for is not needed; from here on trials are timed."""

    def forecast(self, trial: Trial) -> RungForecast | None:
        """What the trial will need; None when that cannot be said."""

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        """The largest of these micro batches (ascending) that is expected to leave the headroom; None: cannot be said.

        The accumulation may change with the micro batch, which costs no memory beyond the second.
        """


class Blind:
    """Foresees nothing."""

    said: Mapping[str, RungForecast] = MappingProxyType({})

    def prepare(self, trials: Iterable[Trial]) -> None:
        """Nothing to do."""

    def settle(self) -> None:
        """Nothing to do."""

    def forecast(self, trial: Trial) -> RungForecast | None:
        """None."""

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        """None."""


BLIND: Foresight = Blind()


def why_impossible(forecast: RungForecast | None) -> str | None:
    """Why a trial need not be run, if it is certain to run out: even the low end of its forecast does not fit."""
    if forecast is None or forecast.verdict != "cannot_fit":
        return None
    return f"cannot fit by the forecast: {forecast.reason}"


def lacking_bytes(forecast: RungForecast) -> int:
    """How much more than the device has the forecast needs, at least; 0 where another tier decides."""
    device = forecast.memory.get("device")
    if device is None or device.limit_bytes is None:
        return 0
    return max(0, device.low_bytes - device.limit_bytes)
