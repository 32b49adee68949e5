"""The functions of torch.cuda without a GPU: the ledger answers for memory, an idle card for the rest."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

from ...rank.patching import declare, declare_all
from .ledger import DEVICE, Ledger
from .work_log import WorkLog

_NAME = "simulated GPU"
# aten operators that torch can decompose (CompositeImplicitAutograd) and for which a CUDA build has a kernel.
_WHOLE_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")
_KERNELS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # unregisters when collected
_NO_GPU = "there is no GPU to ask"
_CONSTANTS: dict[str, Any] = {
    "is_available": True, "is_initialized": True, "can_device_access_peer": True, "current_device": 0,
    "initial_seed": 0, "_exchange_device": 0, "_maybe_exchange_device": 0,
    "is_current_stream_capturing": False,
}  # fmt: skip
_NO_OPS = (
    "_lazy_init", "_lazy_call", "set_device", "set_rng_state", "ipc_collect", "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
)  # fmt: skip
_CONSTANT_PATCHES = declare_all("torch.cuda", _CONSTANTS, _NO_GPU)
_NO_OP_PATCHES = declare_all("torch.cuda", _NO_OPS, _NO_GPU)
_STREAM_PATCHES = declare_all(
    "torch.cuda",
    ("Stream", "Event", "stream", "current_stream", "default_stream", "synchronize", "nvtx"),
    "streams need a GPU",
)
_BF16 = declare("torch.cuda.is_bf16_supported", "it makes a tensor on a card before Ampere")
_COUNT = declare("torch.cuda.device_count", "a rank sees the cards of its node")
_RANDOM_STATE = declare("torch.cuda.get_rng_state", "random states need a GPU")
_MEMORY_PATCHES = declare_all(
    "torch.cuda",
    ("memory_stats", "mem_get_info", "empty_cache", "get_device_properties"),  # torch's other functions ask these
    "the ledger knows the memory of the simulated GPU",
)
_AVAILABLE = declare(
    "deepspeed.accelerator.cuda_accelerator.CUDA_Accelerator.available_memory",
    "it asks NVML, which counts the CUDA context and NCCL as used, and there is no card",
)
_NCCL_VERSION = declare("torch.cuda.nccl.version", _NO_GPU)
_CUDA_VERSION = declare("torch.version.cuda", "a build without CUDA has none, and DeepSpeed reads it")
_CUDNN_ACCEPTS = declare("torch.backends.cudnn.is_acceptable", "nn.GRU would ask a CUDA build for cuDNN's version")


class Event:
    """A torch.cuda.Event. The log keeps when it was recorded, and whether the host knows that it happened."""

    log = WorkLog()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._record = 0  # never recorded: nobody waits for it

    def record(self, stream: Any = None) -> None:
        self._record = self.log.record(self.log.current if stream is None else stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        if self._record:
            self.log.wait(self._record, self.log.current if stream is None else stream.stream_id)

    def synchronize(self) -> None:
        if self._record:
            self.log.host_waits_for_record(self._record)

    def query(self) -> bool:
        return self.log.order.query(self._record)

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Stream:
    """A torch.cuda.Stream: a number. The log keeps its work; to the program it is always idle."""

    log = WorkLog()

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.device_index, self.priority = 0, priority
        self.stream_id = self.cuda_stream = self.log.new_stream() if stream_id is None else stream_id
        self._former: list[int] = []

    def synchronize(self) -> None:
        self.log.host_waits_for_stream(self.stream_id)

    def wait_stream(self, stream: Any) -> None:
        """Let this stream wait for all work of another so far."""
        if stream.stream_id != self.stream_id:
            self.log.wait(self.log.record(stream.stream_id), self.stream_id)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._former.append(self.log.switch(self.stream_id))
        return self

    def __exit__(self, *args: object) -> None:
        self.log.switch(self._former.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


def install(ledger: Ledger) -> None:
    """Replace the functions of torch.cuda: the ledger answers for memory, and a single idle card for the rest."""

    def free_and_total(*args: Any, **kwargs: Any) -> tuple[int, int]:
        return max(0, ledger.device_bytes - ledger.outside_bytes - ledger.current[DEVICE]), ledger.device_bytes

    def properties(*args: Any, **kwargs: Any) -> Any:
        return types.SimpleNamespace(
            total_memory=ledger.device_bytes,
            major=ledger.capability[0],
            minor=ledger.capability[1],
            name=_NAME,
            multi_processor_count=132,
            warp_size=32,
        )

    def statistics(*args: Any, **kwargs: Any) -> Mapping[str, int]:
        allocated = ledger.current[DEVICE]
        peak = max(ledger.highest[DEVICE], *(peaks["device"] for peaks in ledger.peaks().values()))
        counts: dict[str, int] = collections.defaultdict(int, num_ooms=0, num_alloc_retries=0)
        for name in ("allocated", "active", "reserved"):
            counts |= {f"{name}_bytes.all.current": allocated, f"{name}_bytes.all.peak": peak}
        return counts

    memory: Mapping[str, Any] = {
        "memory_stats": statistics,
        "mem_get_info": free_and_total,
        "empty_cache": ledger.empty_cache,
        "get_device_properties": properties,
    }
    _BF16.install(lambda including_emulation=True: including_emulation or ledger.capability[0] >= 8)
    _COUNT.install(lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")), everywhere=True)
    for name, value in _CONSTANTS.items():
        _CONSTANT_PATCHES[name].install(_always(value))
    for patch in _NO_OP_PATCHES.values():
        # A function each, because torch's compiler looks them up by identity; also in the module that defines it.
        patch.install(_always(None), everywhere=True)
    for name, patch in _MEMORY_PATCHES.items():
        patch.install(memory[name], everywhere=True)
    _AVAILABLE.install(lambda accelerator, device_index=None: free_and_total()[0])
    install_streams(ledger.work)
    _RANDOM_STATE.install(lambda *args: torch.zeros(16, dtype=torch.uint8), everywhere=True)
    _NCCL_VERSION.install(_always((2, 27, 0)))
    _CUDA_VERSION.install(torch.version.cuda or "12.8")
    _CUDNN_ACCEPTS.install(lambda tensor: False)
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        for name in _WHOLE_ON_CUDA:
            _register_kernel(name)
    for name, make in _WITHOUT_SHAPES.items():
        _register(name, make, "Meta")
    _forget_answers()


def _forget_answers() -> None:
    """Let transformers ask anew what it asked before there was this GPU: where flash-attn is installed, at import."""
    library = sys.modules.get("transformers.utils.import_utils")
    for function in [] if library is None else list(vars(library).values()):
        if (forget := getattr(function, "cache_clear", None)) is not None:
            forget()


def install_streams(log: WorkLog) -> None:
    """Replace streams and events of torch.cuda by those of a card that works at once; the log keeps who waits."""
    Stream.log = Event.log = log
    default = Stream(stream_id=0)

    def current_stream(*args: Any) -> Stream:
        return Stream(stream_id=log.current) if log.current else default

    replacements: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "current_stream": current_stream,
        "default_stream": _always(default),
        "synchronize": lambda *args, **kwargs: log.host_waits_for_all(),
        "nvtx": types.SimpleNamespace(range_push=_always(None), range_pop=_always(None)),
    }
    for name, patch in _STREAM_PATCHES.items():
        patch.install(replacements[name], everywhere=True)


def _register_kernel(name: str) -> None:
    """Register a kernel that never runs; without one autograd decomposes the operator into temporaries."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"aten::{name} on the simulated GPU, outside FakeTensorMode")

    _register(name, kernel, "CUDA")


def _register(name: str, kernel: Any, key: str) -> None:
    with contextlib.suppress(RuntimeError):  # another version of torch may lack the operator, or have the kernel
        _KERNELS.impl(name, kernel, key)  # type: ignore[no-untyped-call]


def _gru_cell(input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    return hx.new_empty(hx.shape), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad_hy: Any, workspace: Any, has_bias: bool) -> Any:
    rows, gates = workspace.shape[0], 3 * (workspace.shape[1] // 5)
    of_gates = [workspace.new_empty(rows, gates) for _ in range(2)]
    of_biases = [workspace.new_empty(gates) if has_bias else None for _ in range(2)]
    return *of_gates, grad_hy.new_empty(grad_hy.shape), *of_biases


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value


# aten operators of CUDA for which torch has no shapes: what they return (aten/src/ATen/native/cuda/RNN.cu).
_WITHOUT_SHAPES = {"_thnn_fused_gru_cell": _gru_cell, "_thnn_fused_gru_cell_backward": _gru_cell_backward}
