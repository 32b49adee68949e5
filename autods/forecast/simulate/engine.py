"""DeepSpeed's real engine on the simulated device: it is built and stepped as in a trial, and the ledger records it."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from ...config.catalogue import Machine
from ...devices import Device
from ...rank.model_facts import check_batch, describe_model, place
from ...rank.model_trial import build, initialize, optimizer_step, share_sequences
from ...rank.pipeline import build_whole
from ...rank.zero_init import partition_at_build
from ...types import ModelFacts, Phase
from ...workload.protocol import Workload
from ..attention import UNKNOWN_FAMILY, find_family
from ..predict.memory_model import estimate_outside_bytes
from ..values import EngineSpec, ForecastPhase, Simulation
from . import (
    attribution,
    custom_kernels,
    deepspeed_patches,
    fake_gpu,
    known_values,
    packed_weights,
    torch_patches,
    unknown_values,
)
from .dispatch import Recorder, join_world
from .ledger import DEVICE, PINNED, Ledger
from .protocol import explain_optimizer_errors

_STEPS = 2  # the second differs: optimizer states exist, and stage 3 knows the order of its parameters
_PHASES: Mapping[Phase, ForecastPhase] = {
    "build": "build", "init": "init", "forward": "forward", "backward": "backward", "step": "step",
    "evaluate": "forward",
}  # fmt: skip


class SimulationContext:
    """The simulated device of this process: patched libraries, and the modes that make tensors fake and record them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ledger = Ledger(one_memory=device.shares_host_memory)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake.cache_enabled = False  # the recorder has its own, see `shape_cache`
        if device.has_cards:
            fake_gpu.install(self.ledger)
            custom_kernels.install(self.ledger)
        torch_patches.install(self.ledger)
        packed_weights.install()
        unknown_values.install(self.ledger.assume)
        deepspeed_patches.install(self.ledger)
        self.recorder = Recorder(self.ledger, self._fake)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Tensors that are made inside the block are fake and recorded."""
        with self._fake, self.recorder:
            yield

    def take_card(self, spec: EngineSpec) -> None:
        """Simulate the card of `spec`."""
        self.ledger.device_bytes = spec.device_bytes
        self.show_card(spec.machine)
        self.ledger.outside_bytes = estimate_outside_bytes(spec)

    def show_card(self, machine: Machine | None) -> None:
        """Let the model see which card it is: one of `machine`."""
        capability = None if machine is None else machine.capability
        self.ledger.capability, self.ledger.family = capability or UNKNOWN_FAMILY, find_family(capability)

    def begin(self, phase: Phase, step: int) -> None:
        """Begin a phase of an optimizer step. The ledger leaves out what no forecast has."""
        if phase in _PHASES:
            self.ledger.begin(_PHASES[phase])
            self.ledger.work.begin(phase, step)

    def become_rank(self, spec: EngineSpec) -> None:
        """Make this process rank 0 of the world in `spec`, and begin to record."""
        self.take_card(spec)
        join_world(spec.world_size, spec.ranks_per_node)
        deepspeed_patches.install_rank_zero(self.ledger)
        self.ledger.kind_of_new = attribution.kind_by_caller
        self.ledger.begin("build")


class RankEngine:
    """The model and DeepSpeed's engine on it, in a separate process.

    Initialise it once, and measure each micro batch in a fork of that process: so no answer depends on others.
    """

    def __init__(self, context: SimulationContext, workload: Workload, spec: EngineSpec, scratch: str) -> None:
        self._context, self._workload, self._spec = context, workload, spec
        self._config = swap_into(scratch, spec.ds_config)
        self._accumulation = int(self._config.get("gradient_accumulation_steps", 1))
        self._engine: Any = None

    def initialize(self) -> None:
        """Build the model, and DeepSpeed's engine on it. Passes on errors of user code."""
        context, spec = self._context, self._spec
        workload = self._workload = share_sequences(self._workload, self._config)
        context.become_rank(spec)
        if spec.zero_init:
            workload = partition_at_build(workload, self._config)
        with context.active():
            model = build(workload, self._config, checkpointing=spec.checkpointing)
        attribution.label_gradients(context.ledger, model)
        context.ledger.begin("init")
        with context.active(), explain_optimizer_errors(self._config):
            self._engine = initialize(workload, model, self._config)
        if "Muon" in type(self._engine.basic_optimizer).__name__:
            context.ledger.assume(
                "Muon's update is compiled by torch.compile and was simulated as it is written: compiled, its"
                " temporaries in the step are mostly fewer",
                at_most=True,
            )

    def measure(self, micro_batch: int) -> Simulation:
        """Run two steps on the initialised engine. Errors of user code pass through."""
        began = time.perf_counter()
        ledger, engine = self._context.ledger, self._engine
        with self._context.active():
            batch = check_batch(self._workload.build_batch(micro_batch), micro_batch)
            build_batch, recorder = self._workload.build_batch, self._context.recorder
            recorder.masks = unknown_values.inspect_masks(build_batch, batch)
            recorder.has_known_values = known_values.attach(batch, build_batch, micro_batch)
            batch = place(batch, engine)
            with explain_optimizer_errors(self._config):
                for index in range(_STEPS):
                    optimizer_step(self._workload, engine, batch, self._accumulation, index, self._context.begin)
            return read_ledger(ledger, engine, micro_batch, time.perf_counter() - began)


def read_ledger(ledger: Ledger, engine: Any, micro_batch: int, seconds: float) -> Simulation:
    """What the ledger has recorded of this micro batch on DeepSpeed's engine."""
    attribution.label_persistent(ledger, engine)
    device = ledger.trace(DEVICE)
    return Simulation(
        micro_batch=micro_batch,
        live_bytes=ledger.peaks(),
        traces={"device": device, "pinned": ledger.trace(PINNED)},
        summed_peak_bytes=ledger.summed_peaks(),
        nvme_bytes=sum(ledger.nvme.values()),
        optimizer_elements=attribution.optimizer_elements(engine),
        further_groups=attribution.further_groups(),
        modules=sum(1 for _ in engine.module.modules()),
        communicators=ledger.work.communicators,
        families=frozenset(ledger.families),
        breakdown=device.split_peak(),
        assumed=(*ledger.assumed, *((unknown_values.UPPER_BOUND,) if ledger.is_upper_bound else ())),
        is_upper_bound=ledger.is_upper_bound,
        schedule=None if ledger.one_memory else ledger.work.schedule(),
        seconds=seconds,
    )


def look_at_model(context: SimulationContext, workload: Workload, machine: Machine | None) -> ModelFacts:
    """Facts of the model, built of fake tensors on the card of `machine`."""
    context.show_card(machine)
    with context.active():
        batch = check_batch(workload.build_batch(1), 1)
        return describe_model(workload, build_whole(workload.build), batch)


def swap_into(scratch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config whose swap folders are in `scratch`: DeepSpeed makes and removes folders there."""
    changed = copy.deepcopy(dict(config))
    for part in ("offload_param", "offload_optimizer"):
        offload = (changed.get("zero_optimization") or {}).get(part)
        if offload and offload.get("nvme_path"):
            offload["nvme_path"] = scratch
    return changed
