"""What real trials teach the forecast: predicted against measured, on one machine, with few samples.

The rule: the logarithm of measured over predicted is normal about a centre that the machine shares, and that each rung
shifts a little. Before any trial the centre is 0 with the spread that the constants state. Samples pull the machine's
centre away from 0 as if one sample had said 0, a rung's away from the machine's likewise, and the spread away from the
stated one as if that were four samples. So one odd trial moves little, and a steady error is learned within a few.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .interval import Ratios

_WEIGHT_OF_ZERO = 1.0  # samples that say: the simulation is right
_WEIGHT_OF_POOL = 1.0  # samples of each rung that say: it errs as the others do
_WEIGHT_OF_SPREAD = 4.0  # samples that say: the spread is the stated one
_WIDTH = 2.0  # standard errors each way: about 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One trial: what was forecast for its rung and knobs before calibration, and what it measured, bytes of one tier.

    at_least: the trial ran out there, so the truth is above; it counts only if it contradicts the forecast.
    """

    rung: str
    predicted_bytes: int
    measured_bytes: int
    at_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Centre:
    """Of one rung: how many trials, and the mean logarithm of measured over predicted."""

    samples: int
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a machine's trials say. JSON: `asdict`; back: `typed.read_as(Calibration, …)`.

    mean: the machine's centre, a logarithm; spread: standard error of one forecast; least: the narrowest half-width.
    """

    spread: float
    least: float
    samples: int = 0
    mean: float = 0.0
    rungs: Mapping[str, Centre] = field(default_factory=dict)

    def ratios(self, rung: str) -> Ratios:
        """What the forecast of a rung is multiplied by."""
        centre = self._centre(rung)
        half = max(_WIDTH * self.spread, self.least)
        return Ratios(low=math.exp(centre - half), middle=math.exp(centre), high=math.exp(centre + half))

    def _centre(self, rung: str) -> float:
        own = self.rungs.get(rung, Centre(samples=0, mean=0.0))
        return (own.samples * own.mean + _WEIGHT_OF_POOL * self.mean) / (own.samples + _WEIGHT_OF_POOL)


def calibrated(pairs: Iterable[Pair], *, spread: float, least: float) -> Calibration:
    """The calibration after these trials; `spread`, `least`: as the constants state them for the kind of device."""
    known = tuple(pairs)
    errors = [(pair.rung, _error(pair)) for pair in known if not pair.at_least]
    first = _fitted(errors, spread, least)
    # A bound says nothing where the forecast is above it, and where it is below, that the error is at least so much.
    beyond = [
        (pair.rung, error)
        for pair in known
        if pair.at_least and (error := _error(pair)) > math.log(first.ratios(pair.rung).middle)
    ]
    return _fitted([*errors, *beyond], spread, least) if beyond else first


def _error(pair: Pair) -> float:
    return math.log(max(1, pair.measured_bytes) / max(1, pair.predicted_bytes))


def _fitted(errors: Sequence[tuple[str, float]], spread: float, least: float) -> Calibration:
    by_rung: dict[str, list[float]] = {}
    for rung, error in errors:
        by_rung.setdefault(rung, []).append(error)
    centres = {rung: Centre(samples=len(found), mean=sum(found) / len(found)) for rung, found in by_rung.items()}
    mean = sum(error for _, error in errors) / (len(errors) + _WEIGHT_OF_ZERO)
    located = Calibration(spread=spread, least=least, samples=len(errors), mean=mean, rungs=centres)
    squares = sum((error - located._centre(rung)) ** 2 for rung, error in errors)
    variance = (_WEIGHT_OF_SPREAD * spread**2 + squares) / (_WEIGHT_OF_SPREAD + len(errors))
    return Calibration(spread=math.sqrt(variance), least=least, samples=len(errors), mean=mean, rungs=centres)
