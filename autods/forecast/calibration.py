"""Correct forecasts by what trials measured, shrunk towards no correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..types import Fit, Outcome, OutOfMemory
from .allocator import replay
from .memory_model import compute_rank_memory
from .overheads import Overheads, read_overheads
from .values import EngineSpec, Ratios, Simulation

_WEIGHT_OF_ZERO = 1.0  # samples that say: the simulation is right
_WEIGHT_OF_POOL = 1.0  # samples of each rung that say: it errs as the others do
_WEIGHT_OF_SPREAD = 4.0  # samples that say: the spread is the stated one
_WIDTH = 2.0  # standard errors each way: about 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One trial: what was forecast for its rung and knobs before calibration, and what it measured, bytes of one tier.

    at_least: the trial ran out there, so the truth is above; it counts only if it contradicts the forecast.
    """

    rung: str
    predicted_bytes: int
    measured_bytes: int
    at_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RungError:
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
    rungs: Mapping[str, RungError] = field(default_factory=dict)

    def ratios(self, rung: str) -> Ratios:
        """What the forecast of a rung is multiplied by."""
        centre = self._centre(rung)
        half = max(_WIDTH * self.spread, self.least)
        return Ratios(low=math.exp(centre - half), middle=math.exp(centre), high=math.exp(centre + half))

    def _centre(self, rung: str) -> float:
        own = self.rungs.get(rung, RungError(samples=0, mean=0.0))
        return (own.samples * own.mean + _WEIGHT_OF_POOL * self.mean) / (own.samples + _WEIGHT_OF_POOL)


def fit_calibration(pairs: Iterable[Observation], *, spread: float, least: float) -> Calibration:
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


def _error(pair: Observation) -> float:
    return math.log(max(1, pair.measured_bytes) / max(1, pair.predicted_bytes))


def _fitted(errors: Sequence[tuple[str, float]], spread: float, least: float) -> Calibration:
    by_rung: dict[str, list[float]] = {}
    for rung, error in errors:
        by_rung.setdefault(rung, []).append(error)
    centres = {rung: RungError(samples=len(found), mean=sum(found) / len(found)) for rung, found in by_rung.items()}
    mean = sum(error for _, error in errors) / (len(errors) + _WEIGHT_OF_ZERO)
    located = Calibration(spread=spread, least=least, samples=len(errors), mean=mean, rungs=centres)
    squares = sum((error - located._centre(rung)) ** 2 for rung, error in errors)
    variance = (_WEIGHT_OF_SPREAD * spread**2 + squares) / (_WEIGHT_OF_SPREAD + len(errors))
    return Calibration(spread=math.sqrt(variance), least=least, samples=len(errors), mean=mean, rungs=centres)


def observe_trial(
    ask: EngineSpec,
    simulated: Simulation,
    outcome: Outcome,
    *,
    constants: Overheads | None = None,
    expandable: bool = False,
) -> Observation | None:
    """The device's pair, or None where the trial says nothing of it: it failed, or another tier ran out.

    `ask` and `simulated` are of the config that the trial ran: one with torch's optimizer in place of DeepSpeed's is
    another. On CUDA a trial measures what was reserved within its limit, which is more than it needed.
    """
    need = compute_rank_memory(ask, simulated, constants or read_overheads(), expandable=expandable)
    predicted = need.device.peak_bytes
    match outcome:
        case Fit():
            use = outcome.memory["device"]
            trace = simulated.traces.get("device")
            if ask.device == "cuda" and trace is not None:
                limit = use.limit_bytes or ask.device_bytes - need.beside.peak_bytes
                beside_tensors = predicted - need.tensors_bytes
                tried = replay(trace, expandable=expandable, limit_bytes=limit - beside_tensors)
                if tried.ran_out is None:
                    predicted = max(tried.peak_reserved_bytes, need.live_bytes) + beside_tensors
            return Observation(rung=ask.rung, predicted_bytes=predicted, measured_bytes=use.peak_bytes)
        case OutOfMemory(tier="device") if outcome.limit_bytes is not None:
            return Observation(
                rung=ask.rung, predicted_bytes=predicted, measured_bytes=outcome.limit_bytes, at_least=True
            )
        case _:
            return None


def calibrate_forecast(
    ask: EngineSpec, pairs: Iterable[Observation], constants: Overheads | None = None
) -> Calibration:
    """The calibration of a machine with this kind of device after its trials."""
    rows = constants or read_overheads()
    return fit_calibration(pairs, spread=rows.spread[ask.device], least=rows.least[ask.device])
