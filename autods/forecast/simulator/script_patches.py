"""Patches that give scripts real values for batches and checkpoints on the simulated GPU."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ...trial.patching import declare, declare_all
from .dispatch import outside_frame
from .ledger import Ledger

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_SAFE_OPEN = declare("safetensors.safe_open", "weights are opened without their values")
_SYNCHRONIZED_STATES = declare_all(
    "accelerate.utils.random",
    ("synchronize_rng_state", "synchronize_rng_states"),
    "a generator's state has no values",
    optional=True,
)


def install_weights() -> None:
    """For the rest of this process."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the modes that make tensors fake are those of this thread
    real = _SAFE_OPEN.original()

    def opened(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        file = real(filename, framework=framework, device="cpu", **kwargs)
        return _File(file, torch.device(device)) if framework in ("pt", "torch", "pytorch") else file

    _SAFE_OPEN.install(opened, everywhere=True)


class _File:
    """`safetensors.safe_open`, whose tensors have no values."""

    def __init__(self, real: Any, device: torch.device) -> None:
        self._real, self._device = real, device

    def __enter__(self) -> _File:
        self._real.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._real.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_slice(self, name: str) -> _Slice:
        """Of a tensor that is not read yet."""
        return _Slice(self._real.get_slice(name), self._device)

    def get_tensor(self, name: str) -> Any:
        """One tensor."""
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Any]:
        """All of them."""
        return {name: self.get_tensor(name) for name in self._real.keys()}  # noqa: SIM118


class _Slice:
    """What `get_slice` returns."""

    def __init__(self, real: Any, device: torch.device) -> None:
        self._real, self._device = real, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __getitem__(self, index: Any) -> Any:
        dtype = _DTYPES.get(self._real.get_dtype())
        if dtype is None:
            return self._real[index]
        with _disable_current_modes():
            shape = torch.empty(tuple(self._real.get_shape()), dtype=dtype, device="meta")[index].shape
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)


_SAMPLERS = ("RandomSampler", "SubsetRandomSampler", "DistributedSampler")
_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}
# Of torch.cuda: what `torch_cuda` answers, asked by way of the module that defines it.
_OF_MEMORY = (
    "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "memory_stats",
    "mem_get_info", "empty_cache", "reset_peak_memory_stats", "set_per_process_memory_fraction",
)  # fmt: skip


def install_plain_values(ledger: Ledger) -> None:
    """For the rest of this process."""
    _answer_values(ledger)
    install_weights()
    _load_in_this_process(ledger)
    _draw_real_samples()
    _keep_random_states()
    _stay_joined(torch.distributed)
    if not ledger.one_memory:
        for name in _OF_MEMORY:
            setattr(torch.cuda.memory, name, getattr(torch.cuda, name))
        torch.cuda.memory_summary = torch.cuda.memory.memory_summary = lambda *args, **kwargs: ""


def _answer_values(ledger: Ledger) -> None:
    def zeros(tensor: Any) -> Any:
        if (place := outside_frame()) is not None:
            ledger.assume(f"{place}: values were not computed: 0 stood for them")
        dtype = torch.empty((), dtype=tensor.dtype, device="meta")
        kind = numpy.float32 if dtype.dtype == torch.bfloat16 else str(dtype.dtype).removeprefix("torch.")
        return numpy.zeros(tuple(tensor.shape), dtype=kind)

    def as_array(tensor: Any, *, force: bool = False) -> Any:
        return zeros(tensor) if tensor.constant is None else tensor.constant.numpy(force=force)

    def as_list(tensor: Any) -> Any:
        return as_array(tensor.detach()).tolist()

    def as_text(tensor: Any, spec: str) -> str:
        return format(tensor.item(), spec) if spec and not tensor.dim() else object.__format__(tensor, "")

    def copied(tensor: Any, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    FakeTensor.__deepcopy__ = copied  # type: ignore[method-assign]
    FakeTensor.numpy = as_array  # type: ignore[method-assign, assignment]
    FakeTensor.tolist = as_list  # type: ignore[method-assign, assignment]
    FakeTensor.__format__ = as_text  # type: ignore[method-assign]


def _load_in_this_process(ledger: Ledger) -> None:
    """A DataLoader's workers could not hand tensors without values over."""
    loader = torch.utils.data.DataLoader
    real = loader.__init__
    signature = inspect.signature(real)

    @functools.wraps(real)
    def made(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("num_workers"):
            ledger.assume("its DataLoader's workers were not started: the host memory that they hold is not counted")
        given.arguments.update({name: value for name, value in _WORKERS.items() if name in given.arguments})
        real(*given.args, **given.kwargs)

    loader.__init__ = made  # type: ignore[method-assign]


def _draw_real_samples() -> None:
    """Which samples are drawn is no question of memory, and a list of as many zeros as there are samples takes long."""
    from torch.utils import data

    for name in _SAMPLERS:
        sampler = getattr(data, name, None) or getattr(data.distributed, name)
        sampler.__iter__ = _without_modes(sampler.__iter__)


def _without_modes(real: Callable[[Any], Iterator[int]]) -> Callable[[Any], Iterator[int]]:
    from torch.utils._python_dispatch import _disable_current_modes

    @functools.wraps(real)
    def drawn(sampler: Any) -> Iterator[int]:
        with _disable_current_modes():
            order = list(real(sampler))
        return iter(order)

    return drawn


def _keep_random_states() -> None:
    """A generator takes no state without values."""
    for module in (torch, torch.random):
        setattr(module, "set_rng_state", lambda state: None)  # noqa: B010
    if "accelerate.utils.random" in sys.modules:
        for patch in _SYNCHRONIZED_STATES.values():
            patch.install(lambda *args, **kwargs: None, everywhere=True)


def _stay_joined(distributed: Any) -> None:
    """The world is joined before the script starts: it need not be again. Other ranks send what this one does."""
    real_group = distributed.new_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        return None

    def destroy_process_group(group: Any = None) -> None:
        return None

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real_group(ranks)

    def all_gather_object(object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any) -> None:
        if object_gather_list is not None:
            all_gather_object(object_gather_list, obj)

    def broadcast_object_list(object_list: Any, *args: Any, **kwargs: Any) -> None:
        return None

    def scatter_object_list(output: Any, objects: Any = None, *args: Any, **kwargs: Any) -> None:
        output[0] = objects[0] if objects else None

    for ours in (
        init_process_group, destroy_process_group, new_group, all_gather_object, gather_object, broadcast_object_list,
        scatter_object_list,
    ):  # fmt: skip
        for module in (distributed, distributed.distributed_c10d):
            setattr(module, ours.__name__, ours)
