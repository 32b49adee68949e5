"""Correct forecasts by the measurements of trials, shrunk towards no correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...devices import find_device
from ...types import Fit, Outcome, OutOfMemory
from ..values import EngineSpec, Interval, Ratios, Simulation
from .memory_model import Overheads, compute_rank_memory, read_overheads
from .replay import replay

# Weights in samples of prior beliefs:
_WEIGHT_OF_ZERO = 1.0  # the simulation is right
_WEIGHT_OF_POOL = 1.0  # each rung errs as the others do
_WEIGHT_OF_SPREAD = 4.0  # the spread is the stated one
_WIDTH = 2.0  # standard errors each way: about 95 %
# Of step times: the variance of a forecast's relative error after calibration, over that of a machine's factors.
_STEP_RIDGE = (0.1 / 0.3) ** 2
_MOST_ROUNDS = 8
_LEAST_FACTOR, _MOST_FACTOR = 0.25, 4.0  # beyond these something else is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A step's forecast before calibration.

    `computed_s` is what the card computes, `launched_s` what it waits for the host to issue its operators, and
    `moved_s` what the step waits for links and the host's own work. Together they are the step.
    `copied_s` is the part of that for the host: its copies, its own work, and memory that the allocator gives back.
    `issued_s` is what the host needs to issue all operators, also while the card computes: no step is shorter.
    """

    computed_s: float
    launched_s: float
    moved_s: float
    copied_s: float = 0.0
    issued_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """A trial's median step, and its forecast before calibration."""

    parts: StepParts
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFactors:
    """By how much a machine is slower than its data sheet lets expect.

    `compute` is that of its card, `launch` that of Python and the driver on its processor, `link` that of its links.
    """

    compute: float = 1.0
    launch: float = 1.0
    link: float = 1.0

    def correct(self, parts: StepParts) -> float:
        """Return the seconds of a step with these parts."""
        return max(self._add(parts), self.launch * parts.issued_s)

    def is_bound_by_launches(self, parts: StepParts) -> bool:
        """Whether the host issues operators for longer than all else takes."""
        return self.launch * parts.issued_s > self._add(parts)

    def _add(self, parts: StepParts) -> float:
        return self.compute * parts.computed_s + self.launch * parts.launched_s + self.link * parts.moved_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A trial's peak on the device, of a card the allocator's part of it, and its forecast before calibration.

    `beside_bytes` is the other part: the CUDA context, NCCL and kernels.
    `at_least` means that the trial ran out of memory, so that the true peak is larger. Such a peak counts only if it
    contradicts the forecast. `step` is None where the trial timed no step or the machine has no rates.
    """

    rung: str
    predicted_bytes: int
    measured_bytes: int
    at_least: bool = False
    beside_bytes: int | None = None
    step: StepObservation | None = None

    @property
    def error(self) -> float:
        """The logarithm of measured over predicted bytes."""
        return math.log(max(1, self.measured_bytes) / max(1, self.predicted_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The errors of a machine's forecasts, as logarithms of measured over predicted bytes.

    `spread` is the standard error of one forecast, and `least` the smallest half-width.
    `outside_allocator` has the bytes that cards held beside torch's allocator in the trials, the least and the most.
    `mean` is the machine's error. `rungs` has that of each rung with trials, shrunk towards the machine's.
    """

    spread: float
    least: float
    mean: float = 0.0
    rungs: Mapping[str, float] = field(default_factory=dict)
    outside_allocator: Interval | None = None

    def ratios(self, rung: str) -> Ratios:
        error = self.rungs.get(rung, self.mean)
        half = max(_WIDTH * self.spread, self.least)
        return Ratios(low=math.exp(error - half), middle=math.exp(error), high=math.exp(error + half))


def calibrate_forecast(
    spec: EngineSpec, observations: Iterable[Observation], overheads: Overheads | None = None
) -> Calibration:
    """Return the calibration of a machine with this kind of device after its trials."""
    overheads, trials = overheads or read_overheads(), tuple(observations)
    constants = find_device(spec.device).constants
    calibration = fit_calibration(trials, spread=overheads.spread[constants], least=overheads.least[constants])
    sizes = [trial.beside_bytes for trial in trials if trial.beside_bytes is not None]
    if not sizes:
        return calibration
    return replace(
        calibration,
        outside_allocator=Interval(low_bytes=min(sizes), peak_bytes=max(sizes), high_bytes=max(sizes)),
    )


def fit_calibration(observations: Iterable[Observation], *, spread: float, least: float) -> Calibration:
    """Return the calibration after these trials; `spread` and `least` are those before any."""
    trials = tuple(observations)
    measured = [trial for trial in trials if not trial.at_least]
    first = _fit(measured, spread, least)
    # A bound below the forecast shows nothing. A bound above it shows that the error is at least so large.
    beyond = [trial for trial in trials if trial.at_least and trial.error > first.rungs.get(trial.rung, first.mean)]
    return _fit([*measured, *beyond], spread, least) if beyond else first


def _fit(trials: Sequence[Observation], spread: float, least: float) -> Calibration:
    by_rung: dict[str, list[float]] = {}
    for trial in trials:
        by_rung.setdefault(trial.rung, []).append(trial.error)
    mean = sum(trial.error for trial in trials) / (len(trials) + _WEIGHT_OF_ZERO)
    rungs = {
        rung: (sum(errors) + _WEIGHT_OF_POOL * mean) / (len(errors) + _WEIGHT_OF_POOL)
        for rung, errors in by_rung.items()
    }
    squares = sum((trial.error - rungs[trial.rung]) ** 2 for trial in trials)
    variance = (_WEIGHT_OF_SPREAD * spread**2 + squares) / (_WEIGHT_OF_SPREAD + len(trials))
    return Calibration(spread=math.sqrt(variance), least=least, mean=mean, rungs=rungs)


def observe_trial(
    spec: EngineSpec,
    simulation: Simulation,
    outcome: Outcome,
    *,
    expandable: bool = False,
) -> Observation | None:
    """Return the device's peak with its forecast; None when the trial does not show it.

    `spec` and `simulation` are those of the config that the trial ran. On CUDA both are what torch's allocator reserved
    within the limit, which may be more than the trial needed: the forecast adds what lies beside it.
    """
    need = compute_rank_memory(spec, simulation, read_overheads(), expandable=expandable)
    predicted, outside = need.device.peak_bytes, need.outside_allocator
    match outcome:
        case Fit(card=card):
            use = outcome.memory["device"]
            measured = use.peak_bytes - outside.peak_bytes if card is None else card.reserved_bytes
            if find_device(spec.device).has_caching_allocator:
                limit = (use.limit_bytes or spec.device_bytes) - (use.peak_bytes - measured)
                beside_tensors = predicted - need.tensors_bytes
                trace = simulation.traces["device"]
                limited = replay(trace, expandable=expandable, limit_bytes=limit - beside_tensors)
                if limited.ran_out is None:
                    predicted = max(limited.peak_reserved_bytes, need.live_bytes) + beside_tensors
            return Observation(
                rung=spec.rung,
                predicted_bytes=predicted,
                measured_bytes=measured,
                beside_bytes=None if card is None else use.peak_bytes - measured,
            )
        case OutOfMemory(tier="device", limit_bytes=int(limit)):
            least = max(0, limit - outside.high_bytes)
            return Observation(rung=spec.rung, predicted_bytes=predicted, measured_bytes=least, at_least=True)
        case _:
            return None


def fit_step_factors(observations: Iterable[Observation], prior: StepFactors) -> StepFactors:
    """Return the factors after these trials; `prior` are those before any.

    The relative errors of the corrected steps are squared and summed, with a ridge towards the prior. Which steps are
    bound by launches follows from the factors, so these are solved anew until that no longer changes.
    """
    import numpy  # a plan calibrates nothing

    steps = [each.step for each in observations if each.step is not None and each.step.measured_s > 0]
    before, factors = numpy.array([prior.compute, prior.launch, prior.link]), prior
    for _ in range(_MOST_ROUNDS):
        rows = [
            [0.0, step.parts.issued_s, 0.0]
            if factors.is_bound_by_launches(step.parts)
            else [step.parts.computed_s, step.parts.launched_s, step.parts.moved_s]
            for step in steps
        ]
        shares = numpy.reshape(rows, (-1, 3)) / numpy.reshape([step.measured_s for step in steps], (-1, 1))
        left = shares.T @ shares + _STEP_RIDGE * numpy.identity(3)
        solved = numpy.linalg.solve(left, shares.sum(axis=0) + _STEP_RIDGE * before).clip(_LEAST_FACTOR, _MOST_FACTOR)
        former, factors = factors, StepFactors(compute=float(solved[0]), launch=float(solved[1]), link=float(solved[2]))
        if factors == former:
            break
    return factors
