"""What a plan needs of a simulator; `simulator.client.Simulator` is the real one, `scripted.Scripted` a made-up one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ..values import Device, ModelFacts, WorkloadSource
from .values import Ask, Simulated


class Engine(Protocol):
    """A simulated engine that is initialised and stays so."""

    def measure(self, micro_batch: int) -> Simulated: ...


class Simulator(Protocol):
    """Calls raise SimulationFailed, with what went wrong in the user's terms. It may be called from two threads."""

    def facts(self, device: Device = "cuda", *, ranks: int = 1) -> ModelFacts: ...

    def engine(self, ask: Ask) -> AbstractContextManager[Engine]: ...

    def simulate(self, ask: Ask, micro_batches: Sequence[int]) -> tuple[Simulated, ...]:
        """Each micro batch in turn on one engine."""
        with self.engine(ask) as engine:
            return tuple(engine.measure(micro_batch) for micro_batch in micro_batches)


Start = Callable[[WorkloadSource], AbstractContextManager[Simulator]]
