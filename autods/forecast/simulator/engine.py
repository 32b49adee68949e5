"""One simulated engine: builds the model, initialises DeepSpeed and runs steps by the house's own act."""

from __future__ import annotations

import base64
import contextlib
import copy
import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...trial.batch import check_batch, place
from ...trial.model_facts import facts_of
from ...trial.pipeline import whole
from ...trial.training import build, initialize, optimizer_step
from ...types import Phase
from ...workload.protocol import Workload
from ..values import EngineSpec, ForecastPhase
from . import attribution, deepspeed_patches, dispatch, padding, protocol
from .ledger import DEVICE, PINNED, Ledger

_FIRST_STEPS = 2  # the second differs: optimizer states exist, stage 3 knows the order of its parameters


class Stage:
    """What a simulated rank stands on: the fake mode, the recorder and the ledger of this process."""

    def __init__(self, *, cpu: bool) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        from . import fake_gpu, torch_patches
        from .dispatch import Recorder

        self.ledger = Ledger(one_memory=cpu)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake.cache_enabled = False  # the recorder has one of its own, see `recipes`
        if not cpu:
            fake_gpu.install(self.ledger)
        torch_patches.install(self.ledger, self._fake)
        padding.install()
        deepspeed_patches.install(self.ledger)
        self._recorder = Recorder(self.ledger, self._fake)

    def look_at_masks(self, workload: Workload, batch: Any) -> None:
        """What the model is told when it asks whether there is padding."""
        self._recorder.masks = padding.look(workload.build_batch, batch)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Tensors made inside are fake and booked."""
        with self._fake, self._recorder:
            yield


class Rank:
    """What engines of one rank share until DeepSpeed sees the model: the world that was joined, and the model."""

    def __init__(self, stage: Stage, workload: Workload, ask: EngineSpec) -> None:
        self.error: BaseException | None = None  # what the user's code raised; every engine passes it on
        self.model: Any = None
        stand(stage.ledger, ask)
        with stage.on():
            try:
                self.model = build(workload, checkpointing=ask.checkpointing)
            except BaseException as error:
                self.error = error


class Engine:
    """Lives in a process of its own, forked from one that has built its rank."""

    def __init__(
        self, stage: Stage, workload: Workload, ask: EngineSpec, scratch: str, rank: Rank | None = None
    ) -> None:
        self._stage, self._workload, self._ask, self._rank = stage, workload, ask, rank
        self._config = in_scratch(ask.ds_config, scratch)
        self._accumulation = int(self._config.get("gradient_accumulation_steps", 1))
        self._engine: Any = None
        self._first_step_peaks: dict[Any, int] = {}
        stage.ledger.device_bytes = ask.device_bytes

    def measure(self, micro_batch: int) -> dict[str, Any]:
        """One micro batch; the first call builds the engine. What the user's code raises is passed on."""
        began = time.perf_counter()
        ledger = self._stage.ledger
        with self._stage.on():
            first = self._engine is None
            if first:
                batch = self._start(micro_batch)
            else:
                gc.collect()
                ledger.restart()
                batch = check_batch(self._workload.build_batch(micro_batch), micro_batch)
            self._stage.look_at_masks(self._workload, batch)
            batch = place(batch, self._engine)
            with protocol.of_the_optimizer(self._config):
                for index in range(_FIRST_STEPS if first else 1):
                    optimizer_step(self._workload, self._engine, batch, self._accumulation, index, self._observe)
            attribution.label(ledger, self._engine)
            elements = attribution.optimizer_elements(self._engine)
            del batch
        return self._report(micro_batch, elements, first, time.perf_counter() - began)

    def _start(self, micro_batch: int) -> Any:
        workload, rank = self._workload, self._rank
        if rank is None:
            if self._ask.zero_init:
                workload = replace(workload, build_model=self._under_zero_init)
            rank = Rank(self._stage, workload, self._ask)
        if rank.error is not None:
            raise rank.error
        batch = check_batch(workload.build_batch(micro_batch), micro_batch)
        attribution.watch_gradients(self._stage.ledger, rank.model)
        with protocol.of_the_optimizer(self._config):
            self._engine = initialize(workload, rank.model, self._config)
        if "Muon" in type(self._engine.basic_optimizer).__name__:
            self._stage.ledger.assume(
                "Muon's update is compiled by torch.compile and was simulated as it is written: compiled, its"
                " temporaries in the step are mostly fewer"
            )
        self._rank = None
        return batch

    def _under_zero_init(self) -> Any:
        import deepspeed

        with deepspeed.zero.Init(config_dict_or_path=self._config):
            return self._workload.build_model()

    def _observe(self, phase: Phase, step: int) -> None:
        found: dict[Phase, ForecastPhase] = {"forward": "forward", "backward": "backward", "step": "step"}
        self._stage.ledger.begin(found[phase])

    def _report(self, micro_batch: int, elements: int, first: bool, seconds: float) -> dict[str, Any]:
        ledger = self._stage.ledger
        peaks: dict[Any, dict[Any, int]] = ledger.peaks()
        if first:
            self._first_step_peaks = peaks["step"]
            self._init_peaks = peaks["init"]
        else:
            # The first step makes states; its peak and that of init do not depend on the micro batch.
            peaks["init"] = self._init_peaks
            peaks["step"] = {tier: max(size, self._first_step_peaks[tier]) for tier, size in peaks["step"].items()}
        return report_of(ledger, micro_batch, elements, seconds) | {"live_bytes": peaks}


def stand(ledger: Ledger, ask: EngineSpec) -> None:
    """This process becomes the rank that is asked about, and its books are opened."""
    ledger.device_bytes = ask.device_bytes
    dispatch.join(ask.world_size, ask.ranks_per_node)
    deepspeed_patches.install_large_worlds(ask.world_size)
    ledger.kind_of_new = attribution.KindOfNew(ledger)
    ledger.begin("init")


def report_of(ledger: Ledger, micro_batch: int, elements: int, seconds: float) -> dict[str, Any]:
    """`Simulated` as plain values. elements: those that this rank's optimizer updates."""
    return {
        "micro_batch": micro_batch,
        "live_bytes": ledger.peaks(),
        "traces": {"device": _packed(ledger, DEVICE), "pinned": _packed(ledger, PINNED)},
        "summed_peak_bytes": ledger.summed_peaks(),
        "nvme_bytes": sum(ledger.nvme.values()),
        "optimizer_elements": elements,
        "expert_groups": attribution.expert_groups(),
        "breakdown": attribution.named(ledger.at_the_peak()),
        "assumed": list(ledger.assumed),
        "seconds": seconds,
    }


def look(stage: Stage, workload: Workload) -> dict[str, Any]:
    """`ModelFacts` as a dict, from a model of fake tensors."""
    with stage.on():
        batch = check_batch(workload.build_batch(1), 1)
        return facts_of(workload, whole(workload.build_model), batch)


def in_scratch(config: Mapping[str, Any], scratch: str) -> dict[str, Any]:
    """The config with its swap folders in `scratch`: DeepSpeed makes and removes folders there."""
    changed = copy.deepcopy(dict(config))
    for part in ("offload_param", "offload_optimizer"):
        offload = (changed.get("zero_optimization") or {}).get(part)
        if offload and offload.get("nvme_path"):
            offload["nvme_path"] = scratch
    return changed


def _packed(ledger: Ledger, tier: int) -> dict[str, Any]:
    events, marks = ledger.trace(tier)
    packed = {"events": base64.b64encode(events.tobytes()).decode(), "marks": marks}
    return packed | (
        {"emptied": ledger.emptied, "copied": ledger.copied} if tier == DEVICE else {"unrounded": ledger.locked}
    )
