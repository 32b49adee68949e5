"""A simulator that answers by a function, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..types import Device, ModelFacts, Tier
from .simulator.client import SimulationFailed
from .values import Engine, EngineSpec, ForecastPhase, Simulation, Simulator, Trace

# From an engine and a micro batch to its simulation; it may raise SimulationFailed.
Script = Callable[[EngineSpec, int], Simulation]


def simulate_peaks(micro_batch: int, host: int = 0, nvme: int = 0, **device: int) -> Simulation:
    """Return a simulation with one tensor in each phase: `simulate_peaks(1, init=4 * GIB, backward=6 * GIB)`."""
    phases: Mapping[str, ForecastPhase] = {
        "init": "init", "forward": "forward", "backward": "backward", "step": "step",
    }  # fmt: skip
    live: dict[ForecastPhase, Mapping[Tier, int]] = {
        phases[phase]: {"device": size, "host": host} for phase, size in device.items()
    }
    most = max(device.values(), default=0)
    events = [event for number, size in enumerate(device.values()) for event in (size, ~number)]
    marks = tuple((2 * number, phases[phase]) for number, phase in enumerate(device))
    trace = Trace(events=events, marks=marks)
    shares = {"parameters": most // 2, "activations": most - most // 2}
    return Simulation(
        micro_batch=micro_batch, live_bytes=live, traces={"device": trace}, nvme_bytes=nvme, breakdown=shares
    )


@dataclass(slots=True)
class ScriptedSimulator(Simulator):
    """A simulator that records the engines that it started, and each measurement as (rung, micro batch)."""

    known: ModelFacts
    script: Script
    engines: list[EngineSpec] = field(default_factory=list)
    measured: list[tuple[str, int]] = field(default_factory=list)

    def facts(self, device: Device = "cuda", *, ranks: int = 1) -> ModelFacts:
        """Return the facts that it was made with."""
        return self.known

    @contextmanager
    def engine(self, spec: EngineSpec) -> Iterator[Engine]:
        """Yield an engine that answers by the script."""
        self.engines.append(spec)
        yield _ScriptedEngine(self, spec)


@dataclass(frozen=True, slots=True)
class _ScriptedEngine:
    simulator: ScriptedSimulator
    spec: EngineSpec

    def measure(self, micro_batch: int) -> Simulation:
        self.simulator.measured.append((self.spec.rung, micro_batch))
        return self.simulator.script(self.spec, micro_batch)


def fail_with(kind: str, problem: str, *, place: str | None = None, hint: str | None = None) -> Script:
    """Return a script that always fails."""

    def script(spec: EngineSpec, micro_batch: int) -> Simulation:
        raise SimulationFailed(kind=kind, problem=problem, place=place, hint=hint)

    return script
