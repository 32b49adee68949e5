"""A simulator that answers by a function, for tests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from ..config.catalogue import Machine
from ..types import ModelFacts
from .simulate.protocol import SimulationFailed
from .values import Engine, EngineSpec, ForecastPhase, Simulation, Simulator, Trace

# From an engine and a micro batch to its simulation; it may raise SimulationFailed.
Script = Callable[[EngineSpec, int], Simulation]


def simulate_peaks(micro_batch: int, host: int = 0, **device: int) -> Simulation:
    """Return a simulation with one tensor in each phase: `simulate_peaks(1, init=4 * GIB, backward=6 * GIB)`."""
    peaks = {cast(ForecastPhase, phase): size for phase, size in device.items()}
    most = max(peaks.values(), default=0)
    trace = Trace(
        events=array("q", (event for block, size in enumerate(peaks.values()) for event in (size, ~block))),
        marks=tuple((2 * block, phase) for block, phase in enumerate(peaks)),
    )
    return Simulation(
        micro_batch=micro_batch,
        live_bytes={phase: {"device": size, "host": host} for phase, size in peaks.items()},
        traces={"device": trace},
        breakdown={"parameters": most // 2, "activations": most - most // 2},
    )


@dataclass(slots=True)
class ScriptedSimulator(Simulator):
    """A simulator that records the engines that it started, and each measurement as (rung, micro batch)."""

    known: ModelFacts
    script: Script
    engines: list[EngineSpec] = field(default_factory=list)
    measured: list[tuple[str, int]] = field(default_factory=list)

    def facts(self, device: str = "cuda", *, ranks: int = 1, machine: Machine | None = None) -> ModelFacts:
        return self.known

    @contextmanager
    def engine(self, spec: EngineSpec) -> Iterator[Engine]:
        def measure(micro_batch: int) -> Simulation:
            self.measured.append((spec.rung, micro_batch))
            return self.script(spec, micro_batch)

        self.engines.append(spec)
        yield SimpleNamespace(measure=measure)


def fail_with(kind: str, problem: str, *, place: str | None = None, hint: str | None = None) -> Script:
    def script(spec: EngineSpec, micro_batch: int) -> Simulation:
        raise SimulationFailed(kind=kind, problem=problem, place=place, hint=hint)

    return script
