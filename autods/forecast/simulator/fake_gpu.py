"""The Python surface of torch.cuda, answered without a GPU: memory by the ledger, the rest as one quiet card."""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from .ledger import DEVICE, Ledger

_NAME = "simulated GPU"
# Of aten's operators that torch can take apart (CompositeImplicitAutograd), those for which a CUDA build has a kernel.
_WHOLE_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")
# What is registered goes when this goes.
_KERNELS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


class Event:
    """Over before it began."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As torch.cuda.Event."""

    def record(self, *args: Any) -> None:
        """Nothing to record."""

    wait = synchronize = record

    def query(self) -> bool:
        """Done."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds."""
        return 1.0


class Stream:
    """All streams are one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.device_index = self.cuda_stream = self.stream_id = 0

    def synchronize(self, *args: Any) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = synchronize

    def query(self) -> bool:
        """Idle."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """An event that is over."""
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 1


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """No GPU and no NVML while DeepSpeed is imported.

    It looks for nvcc if there is a GPU. If there is NVML, it asks later what is free on a real card, and fails, because
    CUDA_VISIBLE_DEVICES is empty (CUDA_Accelerator.available_memory).
    """
    real, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    absent = object()
    nvml = sys.modules.get("pynvml", absent)
    sys.modules["pynvml"] = None  # type: ignore[assignment]  # importing it raises ImportError
    try:
        yield
    finally:
        torch.cuda.is_available = real
        if nvml is absent:
            del sys.modules["pynvml"]
        else:
            sys.modules["pynvml"] = nvml  # type: ignore[assignment]


def install(ledger: Ledger) -> None:
    """Put the answers in place of torch.cuda's functions."""
    for name, value in (_quiet() | _memory(ledger)).items():
        setattr(torch.cuda, name, value)
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # else nn.GRU asks a CUDA build for cuDNN's version
    torch.nn.functional.scaled_dot_product_attention = _unfused_attention(
        torch.nn.functional.scaled_dot_product_attention
    )
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        for name in _WHOLE_ON_CUDA:
            _register(name)


def _unfused_attention(plain: Any) -> Any:
    """Attention by its parts, what a build without CUDA does: one with CUDA would ask the driver which kernel to take.

    `attention` lies above it and has taken the calls for which a GPU has a fused kernel.
    """

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if query.device.type != "cuda":
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            mask = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = mask.masked_fill_(attn_mask.logical_not(), -math.inf)
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attention


def _register(name: str) -> None:
    """A kernel that is never run, but without one autograd takes the operator apart: temporaries that no GPU has."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"aten::{name} on the simulated GPU, outside FakeTensorMode")

    with contextlib.suppress(RuntimeError):  # another version of torch may lack the operator
        _KERNELS.impl(name, kernel, "CUDA")  # type: ignore[no-untyped-call]


def _quiet() -> dict[str, Any]:
    stream = Stream()
    capability = (9, 0)

    def nothing() -> Any:
        return lambda *args, **kwargs: None  # one for each name: torch's compiler looks them up by identity

    def random_state(*args: Any) -> Any:
        return torch.zeros(16, dtype=torch.uint8)

    constants = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "initial_seed": 0,
        "_exchange_device": 0, "_maybe_exchange_device": 0,
        "current_stream": stream, "default_stream": stream, "get_device_name": _NAME,
        "get_device_capability": capability, "is_bf16_supported": True, "is_current_stream_capturing": False,
    }  # fmt: skip
    quiet = (
        "_lazy_init", "_lazy_call", "init", "set_device", "synchronize", "empty_cache", "set_rng_state", "manual_seed",
        "manual_seed_all", "seed", "seed_all", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated",
        "reset_max_memory_cached", "set_per_process_memory_fraction",
    )  # fmt: skip
    return {
        **{name: _always(value) for name, value in constants.items()},
        **{name: nothing() for name in quiet},
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": random_state,
        "nvtx": types.SimpleNamespace(range_push=nothing(), range_pop=nothing()),
    }


def _memory(ledger: Ledger) -> dict[str, Any]:
    def allocated(*args: Any) -> int:
        return ledger.current[DEVICE]

    def most(*args: Any) -> int:
        return max(ledger.highest[DEVICE], *(tops["device"] for tops in ledger.peaks().values()))

    def free_and_total(*args: Any) -> tuple[int, int]:
        return max(0, ledger.device_bytes - ledger.current[DEVICE]), ledger.device_bytes

    def properties(*args: Any) -> Any:
        return types.SimpleNamespace(
            total_memory=ledger.device_bytes, major=9, minor=0, name=_NAME, multi_processor_count=132, warp_size=32
        )

    return {
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), allocated),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), most),
        "memory_stats": lambda *args: collections.defaultdict(int),
        "mem_get_info": free_and_total,
        "empty_cache": ledger.empty_cache,
        "get_device_properties": properties,
    }


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value
