"""A simulator that answers from a script: for tests of everything that asks one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..types import Device, ModelFacts, Tier
from .simulator.client import SimulationFailed
from .values import Engine, EngineSpec, ForecastPhase, Simulation, Simulator, Trace

# Engine and micro batch → what it allocates; raises SimulationFailed.
Script = Callable[[EngineSpec, int], Simulation]


def simulate_peaks(micro_batch: int, host: int = 0, nvme: int = 0, **device: int) -> Simulation:
    """`allocates(1, init=4 * GIB, backward=6 * GIB)`: one tensor in each phase, of these bytes a rank."""
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
    """Shipped beside the real one, see `protocol.Simulator`. engines, measured: what it was asked for, in order."""

    known: ModelFacts
    script: Script
    engines: list[EngineSpec] = field(default_factory=list)
    measured: list[tuple[str, int]] = field(default_factory=list)

    def facts(self, device: Device = "cuda", *, ranks: int = 1) -> ModelFacts:
        """What it was made with."""
        return self.known

    @contextmanager
    def engine(self, ask: EngineSpec) -> Iterator[Engine]:
        """An engine that answers by the script."""
        self.engines.append(ask)
        yield _ScriptedEngine(self, ask)


@dataclass(frozen=True, slots=True)
class _ScriptedEngine:
    simulator: ScriptedSimulator
    ask: EngineSpec

    def measure(self, micro_batch: int) -> Simulation:
        self.simulator.measured.append((self.ask.rung, micro_batch))
        return self.simulator.script(self.ask, micro_batch)


def fail_with(kind: str, what: str, *, where: str | None = None, hint: str | None = None) -> Script:
    """A script that fails so."""

    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        raise SimulationFailed(kind=kind, what=what, where=where, hint=hint)

    return script
