"""Without a C++ compiler there is no simulated GPU: the formulas, over activations seen on a simulated CPU rank.

A CPU rank's engine needs no compiled part. One without any sharding is run at each micro batch; what its forward pass
adds to what already lives is the activations, and the rest follows from the number of parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.deepspeed import half_precision
from ..types import Device, ModelFacts
from .allocator import phases
from .formulas import estimated
from .simulator.client import SimulationFailed
from .values import Ask, Engine, Simulated, Simulator, Trace

_NO_DEVICE = ("no_compiler", "build_failed")


@dataclass(slots=True)
class WithFormulas(Simulator):
    """A `protocol.Simulator` that answers by another one, and by the formulas where that has no simulated GPU.

    Estimates have no traces, and say in `assumed` what they are and why. Calls raise SimulationFailed for the rest.
    """

    simulator: Simulator
    because: str | None = None  # why the simulated GPU cannot be had; None: it can, or nobody asked yet
    known: ModelFacts | None = field(default=None)
    _looked: bool = field(default=False)  # at the model, on the simulated GPU: among as many ranks as it needs

    def facts(self, device: Device = "cuda", *, ranks: int = 1) -> ModelFacts:
        """Of the workload's model."""
        if device == "cuda" and self.because is None:
            try:
                found = self.simulator.facts(device, ranks=ranks)
            except SimulationFailed as failed:
                self._remember(failed)
            else:
                self._looked = True
                return found
        if self.known is None:
            self.known = self.simulator.facts("cpu", ranks=ranks)
        return self.known

    @contextlib.contextmanager
    def engine(self, ask: Ask) -> Iterator[Engine]:
        """The real one, or an estimate's."""
        if ask.device == "cuda" and not self._looked:
            self.facts()  # finds out whether there is a simulated GPU
        if ask.device == "cpu" or self.because is None:
            with self.simulator.engine(ask) as engine:
                yield engine
        else:
            with self.simulator.engine(unsharded(ask)) as cpu:
                yield _Estimator(ask, self.facts(), cpu, self.because)

    def _remember(self, failed: SimulationFailed) -> None:
        if failed.kind not in _NO_DEVICE:
            raise failed
        self.because = f"{failed.what}: {failed.hint}" if failed.hint else str(failed.what)


@dataclass(frozen=True, slots=True)
class _Estimator:
    ask: Ask
    facts: ModelFacts
    cpu: Engine
    because: str

    def measure(self, micro_batch: int) -> Simulated:
        seen = self.cpu.measure(micro_batch)
        activations = activation_bytes(seen.traces["device"])
        found = estimated(self.ask, self.facts, micro_batch=micro_batch, activation_bytes=activations)
        return replace(found, assumed=(*found.assumed, self.because, *seen.assumed), seconds=seen.seconds)


def unsharded(ask: Ask) -> Ask:
    """The same model and precision as one CPU rank that holds everything."""
    config = ask.ds_config
    kept: Mapping[str, Any] = {key: config[key] for key in ("gradient_clipping",) if key in config}
    plain = {
        **kept,
        "bf16": {"enabled": half_precision(config) is not None},  # CPU ranks have no fp16; it is as large
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }
    return replace(ask, rung="ddp", ds_config=plain, world_size=1, ranks_per_node=1, device="cpu", zero_init=False)


def activation_bytes(trace: Trace) -> int:
    """The most that a forward pass adds to what lived when it began."""
    sizes: list[int] = []
    now = most = 0
    for first, stop, phase in phases(trace):
        began = now
        for event in trace.events[first:stop]:
            if event >= 0:
                sizes.append(event)
                now += event
                if phase == "forward" and now - began > most:
                    most = now - began
            else:
                now -= sizes[~event]
    return most
