"""Patches for scripts on the simulated device: weights without values, real sample indices, a world that is joined."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...rank.patching import declare, declare_all
from .dispatch import model_line
from .ledger import Ledger

_SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NO_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None}
_ACCELERATE_RANDOM = "accelerate.utils.random"
_SAFE_OPEN = declare("safetensors.safe_open", "weights are not read into tensors without values")
_VALUES = declare_all(
    "torch._subclasses.fake_tensor.FakeTensor",
    ("__deepcopy__", "__format__", "numpy", "tolist"),
    "scripts log and copy tensors, whose values are zeros here",
)
_LOADER = declare("torch.utils.data.DataLoader.__init__", "workers cannot hand over tensors without values")
_SAMPLERS = [
    declare(f"torch.utils.data.{sampler}.__iter__", "a list of as many zeros as there are samples takes long")
    for sampler in ("RandomSampler", "SubsetRandomSampler", "distributed.DistributedSampler")
]
_RANDOM_STATE = declare("torch.random.set_rng_state", "a generator takes no state without values")
_SYNCHRONIZED_STATES = declare_all(
    _ACCELERATE_RANDOM, ("synchronize_rng_state", "synchronize_rng_states"), "a generator takes no state without values"
)
_WORLD = declare_all(
    "torch.distributed.distributed_c10d",
    ("init_process_group", "destroy_process_group", "new_group"),
    "the simulated world is joined before the script starts",
)


def install(ledger: Ledger) -> None:
    """Patch the libraries in this process, before the script starts."""
    _give_zeros_for_values(ledger)
    _open_weights_without_values(ledger)
    _load_data_in_this_process(ledger)
    for patch in _SAMPLERS:
        patch.wrap(_draw_real_indices)
    _RANDOM_STATE.install(_nothing, everywhere=True)
    if _ACCELERATE_RANDOM in sys.modules:
        for patch in _SYNCHRONIZED_STATES.values():
            patch.install(_nothing, everywhere=True)
    _stay_in_the_joined_world()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _open_weights_without_values(ledger: Ledger) -> None:
    # transformers would load in threads, and the modes that make tensors fake are those of this thread.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    real = _SAFE_OPEN.original()

    def safe_open(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        file = real(filename, framework=framework, device="cpu", **kwargs)
        return _WeightsFile(file, torch.device(device), ledger) if framework in ("pt", "torch", "pytorch") else file

    _SAFE_OPEN.install(safe_open, everywhere=True)


class _Forwarding:
    """Forwards to an object of safetensors, whose tensors will lie on `device`."""

    def __init__(self, real: Any, device: torch.device, ledger: Ledger) -> None:
        self._real, self._device, self._ledger = real, device, ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _WeightsFile(_Forwarding):
    """A file of `safetensors.safe_open` that gives tensors without values."""

    def __enter__(self) -> _WeightsFile:
        self._real.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._real.__exit__(*raised)

    def get_slice(self, name: str) -> _WeightsSlice:
        return _WeightsSlice(self._real.get_slice(name), self._device, self._ledger)

    def get_tensor(self, name: str) -> Any:
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Any]:
        return {name: self.get_tensor(name) for name in self._real.keys()}  # noqa: SIM118


class _WeightsSlice(_Forwarding):
    def __getitem__(self, index: Any) -> Any:
        dtype = _SAFETENSORS_DTYPES.get(self._real.get_dtype())
        if dtype is None:
            return self._real[index]
        with _disable_current_modes():
            shape = torch.empty(tuple(self._real.get_shape()), dtype=dtype, device="meta")[index].shape
        with self._ledger.map_files():  # as safetensors does: a view of the file's pages
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)


def _give_zeros_for_values(ledger: Ledger) -> None:
    def zeros(tensor: Any) -> Any:
        if (place := model_line()) is not None:
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

    def copy(tensor: Any, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    _VALUES["__deepcopy__"].install(copy)
    _VALUES["numpy"].install(as_array)
    _VALUES["tolist"].install(as_list)
    _VALUES["__format__"].install(as_text)


def _load_data_in_this_process(ledger: Ledger) -> None:
    signature = inspect.signature(_LOADER.original())

    def init(real: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("num_workers"):
            ledger.assume("its DataLoader's workers were not started: the host memory that they hold is not counted")
        given.arguments.update({name: value for name, value in _NO_WORKERS.items() if name in given.arguments})
        real(*given.args, **given.kwargs)

    _LOADER.wrap(init)


def _draw_real_indices(real: Callable[[Any], Iterator[int]], sampler: Any) -> Iterator[int]:
    with _disable_current_modes():
        return iter(list(real(sampler)))


def _stay_in_the_joined_world() -> None:
    """Let a script join the world that this process is in already."""
    real_group = torch.distributed.new_group

    # CPU ranks look `backend` up among the parameters of these two.
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        return None

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real_group(ranks)

    for function in (init_process_group, new_group):
        _WORLD[function.__name__].install(function, everywhere=True)
    _WORLD["destroy_process_group"].install(_nothing, everywhere=True)
