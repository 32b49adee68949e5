"""Correct forecasts by the measurements of trials, shrunk towards no correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..types import Fit, Outcome, OutOfMemory
from .allocator import replay
from .memory_model import Overheads, compute_rank_memory, read_overheads
from .values import EngineSpec, Ratios, Simulation

# Weights in samples of prior beliefs:
_WEIGHT_OF_ZERO = 1.0  # the simulation is right
_WEIGHT_OF_POOL = 1.0  # each rung errs as the others do
_WEIGHT_OF_SPREAD = 4.0  # the spread is the stated one
_WIDTH = 2.0  # standard errors each way: about 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A trial's peak on the device, and its forecast before calibration.

    `at_least` means that the trial ran out of memory, so that the true peak is larger. Such a peak counts only if it
    contradicts the forecast.
    """

    rung: str
    predicted_bytes: int
    measured_bytes: int
    at_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RungError:
    """The number of a rung's trials, and their mean logarithm of measured over predicted bytes."""

    samples: int
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The errors of a machine's forecasts, as logarithms of measured over predicted bytes.

    `mean` is the machine's error, `spread` the standard error of one forecast, `least` the smallest half-width.
    """

    spread: float
    least: float
    samples: int = 0
    mean: float = 0.0
    rungs: Mapping[str, RungError] = field(default_factory=dict)

    def ratios(self, rung: str) -> Ratios:
        """Return the factors of a rung's forecast."""
        error = self.expected_error(rung)
        half = max(_WIDTH * self.spread, self.least)
        return Ratios(low=math.exp(error - half), middle=math.exp(error), high=math.exp(error + half))

    def expected_error(self, rung: str) -> float:
        """Return the mean error of the rung, shrunk towards the machine's."""
        known = self.rungs.get(rung, RungError(samples=0, mean=0.0))
        return (known.samples * known.mean + _WEIGHT_OF_POOL * self.mean) / (known.samples + _WEIGHT_OF_POOL)


def calibrate_forecast(
    spec: EngineSpec, observations: Iterable[Observation], overheads: Overheads | None = None
) -> Calibration:
    """Return the calibration of a machine with this kind of device after its trials."""
    overheads = overheads or read_overheads()
    return fit_calibration(observations, spread=overheads.spread[spec.device], least=overheads.least[spec.device])


def fit_calibration(observations: Iterable[Observation], *, spread: float, least: float) -> Calibration:
    """Return the calibration after these trials; `spread` and `least` are those before any."""
    known = tuple(observations)
    errors = [(trial.rung, _error(trial)) for trial in known if not trial.at_least]
    first = _fit(errors, spread, least)
    # A bound below the forecast shows nothing. A bound above it shows that the error is at least so large.
    beyond = [
        (trial.rung, error)
        for trial in known
        if trial.at_least and (error := _error(trial)) > math.log(first.ratios(trial.rung).middle)
    ]
    return _fit([*errors, *beyond], spread, least) if beyond else first


def observe_trial(
    spec: EngineSpec,
    simulation: Simulation,
    outcome: Outcome,
    *,
    overheads: Overheads | None = None,
    expandable: bool = False,
) -> Observation | None:
    """Return the device's peak with its forecast; None when the trial does not show it.

    `spec` and `simulation` are those of the config that the trial ran. On CUDA a trial measures the bytes that were
    reserved within its limit, which may be more than it needed.
    """
    need = compute_rank_memory(spec, simulation, overheads or read_overheads(), expandable=expandable)
    predicted = need.device.peak_bytes
    match outcome:
        case Fit():
            use = outcome.memory["device"]
            if spec.device == "cuda":
                limit = use.limit_bytes or spec.device_bytes - need.outside_allocator.peak_bytes
                beside_tensors = predicted - need.tensors_bytes
                trace = simulation.traces["device"]
                limited = replay(trace, expandable=expandable, limit_bytes=limit - beside_tensors)
                if limited.ran_out is None:
                    predicted = max(limited.peak_reserved_bytes, need.live_bytes) + beside_tensors
            return Observation(rung=spec.rung, predicted_bytes=predicted, measured_bytes=use.peak_bytes)
        case OutOfMemory(tier="device") if outcome.limit_bytes is not None:
            limit = outcome.limit_bytes
            return Observation(rung=spec.rung, predicted_bytes=predicted, measured_bytes=limit, at_least=True)
        case _:
            return None


def _error(trial: Observation) -> float:
    return math.log(max(1, trial.measured_bytes) / max(1, trial.predicted_bytes))


def _fit(errors: Sequence[tuple[str, float]], spread: float, least: float) -> Calibration:
    by_rung: dict[str, list[float]] = {}
    for rung, error in errors:
        by_rung.setdefault(rung, []).append(error)
    rungs = {
        rung: RungError(samples=len(samples), mean=sum(samples) / len(samples)) for rung, samples in by_rung.items()
    }
    mean = sum(error for _, error in errors) / (len(errors) + _WEIGHT_OF_ZERO)
    located = Calibration(spread=spread, least=least, samples=len(errors), mean=mean, rungs=rungs)
    squares = sum((error - located.expected_error(rung)) ** 2 for rung, error in errors)
    variance = (_WEIGHT_OF_SPREAD * spread**2 + squares) / (_WEIGHT_OF_SPREAD + len(errors))
    return Calibration(spread=math.sqrt(variance), least=least, samples=len(errors), mean=mean, rungs=rungs)
