"""Kernels that are launched past torch's dispatcher, on the simulated GPU: Triton's, and those of mamba_ssm."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from ...rank.patching import declare, when_imported
from .ledger import Ledger

_WHY = "there is no GPU to compile for, or to launch on"
_RUN = declare("triton.runtime.jit.JITFunction.run", _WHY)
_TUNE = declare("triton.runtime.autotuner.Autotuner.run", "it would time each config on the GPU")
_SCAN_CHUNK = 2048  # csrc/selective_scan/selective_scan.cpp, n_chunks
UNKNOWN = "the kernel {} is not known: its time was taken from the bytes of its tensors, with a wider interval"


def install(ledger: Ledger) -> None:
    """Patch Triton and mamba_ssm's extension in this process, if they are ever imported: launches are only recorded."""

    def launch(name: str, arguments: dict[str, Any]) -> None:
        if not ledger.work.launch(name, arguments).sure:
            ledger.assume(UNKNOWN.format(name))

    def run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        names = kernel.arg_names
        launch(kernel.fn.__name__, {**dict(zip(names, args, strict=False)), **kwargs})

    def run_first_config(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **{**tuner.configs[0].all_kwargs(), **kwargs})

    when_imported("triton.runtime.jit", lambda: _RUN.install(run))
    when_imported("triton.runtime.autotuner", lambda: _TUNE.install(run_first_config))
    for module, functions in _EXTENSIONS.items():
        when_imported(module, lambda module=module, functions=functions: _replace(module, functions, launch))  # type: ignore[misc]


def _replace(
    module: str, functions: dict[str, Callable[..., Any]], launch: Callable[[str, dict[str, Any]], None]
) -> None:
    """Let functions of an extension module only make their results."""
    for name, make in functions.items():

        def call(*args: Any, make: Callable[..., Any] = make, name: str = name) -> Any:
            results = make(*args)
            bound = inspect.signature(make).bind(*args).arguments
            launch(f"{module}.{name}", {**bound, **{f"result {i}": out for i, out in enumerate(results)}})
            return results

        setattr(sys.modules[module], name, call)


def _scan(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, delta_softplus: bool
) -> list[Any]:
    """The results of selective_scan_fwd: out, the states of each chunk, and out gated by z."""
    chunks = -(-u.shape[-1] // _SCAN_CHUNK)
    states = torch.empty(*u.shape[:2], chunks, 2 * A.shape[-1], dtype=A.dtype, device=u.device)
    return [torch.empty_like(delta), states] + ([] if z is None else [torch.empty_like(z)])


def _scan_backward(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, dout: Any, x: Any, out: Any, dz: Any,
    delta_softplus: bool, recompute_out_z: bool,
) -> list[Any]:  # fmt: skip
    """The results of selective_scan_bwd: gradients in the order of the arguments, and out_z again if asked for."""
    gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in (u, delta, A, B, C, D, delta_bias)]
    if z is not None:
        gradients.append(torch.empty_like(z) if dz is None else dz)
        gradients += [torch.empty_like(out)] if recompute_out_z else []
    return gradients


_EXTENSIONS: dict[str, dict[str, Callable[..., Any]]] = {"selective_scan_cuda": {"fwd": _scan, "bwd": _scan_backward}}
