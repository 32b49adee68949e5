"""What FakeTensor lacks to carry DeepSpeed's engine: `.data =` across devices, addresses, pinned memory, streams."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...trial import lean
from .ledger import Ledger

# torch 2.11 and before: fake_device itself.
_DEVICE = "_fake_device" if "_fake_device" in FakeTensor.__annotations__ else "fake_device"


def install(ledger: Ledger) -> None:
    """Patch this process's FakeTensor and nn.Module."""
    torch._C._set_only_lift_cpu_tensors(True)
    fake_tensor.init_gpu_context = lambda device=None: None  # type: ignore[assignment]
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment, method-assign]
    FakeTensor.data = property(torch.Tensor.data.__get__, _set_data)  # type: ignore[assignment, attr-defined]
    FakeTensor.data_ptr = _address  # type: ignore[method-assign, assignment]
    FakeTensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    FakeTensor.is_pinned = lambda self, device=None: ledger.is_pinned(self)  # type: ignore[method-assign]
    FakeTensor.numpy = _numpy  # type: ignore[method-assign, assignment]
    with contextlib.suppress(ImportError):
        from transformers.utils import import_utils

        # Models take other branches when they are traced: an explicit mask, and so another kernel of attention.
        import_utils.is_fake_tensor = lambda tensor: False
    with contextlib.suppress(ImportError):
        from transformers import masking_utils

        masking_utils.fast_all = lambda tensor: tensor.all()  # else a sum is read, and nobody knows of what
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    if not ledger.one_memory:
        torch._C._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes imports it
    _count_as_plain()
    _compile_nothing(ledger)


def _compile_nothing(ledger: Ledger) -> None:
    """What torch.compile made runs as it is written: there is no GPU to compile for."""
    lean.with_the_compiler(lambda: torch.compiler.set_stance("force_eager"))  # it would load the compiler
    own = torch.compile

    def noted(*args: Any, **kwargs: Any) -> Any:
        ledger.assume(
            "code under torch.compile was simulated as it is written: compiled, it keeps other activations and"
            " temporaries, mostly fewer"
        )
        return own(*args, **kwargs)

    torch.compile = noted


def _count_as_plain() -> None:
    """torch's optimizers and norms take their foreach form, the default on a GPU, for tensors of these types only."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if FakeTensor not in types:
            types.append(FakeTensor)


def _set_data(tensor: Any, value: Any) -> None:
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
        setattr(tensor, _DEVICE, getattr(value, _DEVICE))


def _address(tensor: Any) -> int:
    """Another one for each storage: DeepSpeed compares addresses."""
    return int((tensor.untyped_storage()._cdata << 12) + tensor.storage_offset() * tensor.element_size())


class NoValues(Exception):
    """A tensor's values are wanted, and it has none."""


def _numpy(tensor: Any, *, force: bool = False) -> Any:
    if tensor.constant is None:
        raise NoValues("a tensor is turned into a NumPy array, and a simulated tensor has no values")
    return tensor.constant.numpy(force=force)


def _apply(module: Any, function: Any, recurse: bool = True) -> Any:
    """`Module._apply` as it works on real tensors: by `.data =`. For fake ones torch would swap the objects."""
    if recurse:
        for child in module.children():
            child._apply(function)
    with torch.no_grad():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            parameter.data = function(parameter)
            if parameter.grad is not None:
                parameter.grad.data = function(parameter.grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module
