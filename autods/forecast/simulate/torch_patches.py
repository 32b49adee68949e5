"""Patches of torch for fake tensors: devices and addresses that DeepSpeed reads, and a GPU's attention kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.distributions import Distribution
from torch.utils._python_dispatch import _disable_current_modes

from ...rank.patching import declare, declare_all
from ..attention import FAMILIES, KERNELS, AttentionCall, Kernel, choose_kernel
from .known_values import find_value
from .ledger import Ledger

FAKE_DEVICE = (
    "_fake_device" if "_fake_device" in FakeTensor.__annotations__ else "fake_device"
)  # the latter: torch 2.11
_aten = torch.ops.aten
_INIT_GPU = declare(
    "torch._subclasses.fake_tensor.init_gpu_context", "a fake tensor on a GPU would initialise CUDA, and there is none"
)
_AVOID_INIT = declare(
    "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init", "the simulated GPU is not initialised"
)
_FALLBACK = declare(
    "torch._subclasses.fake_tensor.run_fallback_kernel",
    "it runs an operator without a fake implementation on zeros, and the simulated GPU has no kernels",
)
_FAKE_TENSOR = declare_all(
    "torch._subclasses.fake_tensor.FakeTensor",
    ("data", "data_ptr", "record_stream", "is_pinned", "numpy", "tolist", "__index__", "__new__"),
    "libraries move tensors by `.data =`, compare addresses, ask for pinned memory, make parameters by their type, and"
    " read known values",
)
_APPLY = declare("torch.nn.Module._apply", "it swaps fake parameters instead of setting their data")
_RAW_STREAM = declare("torch._C._cuda_getCurrentRawStream", "bitsandbytes imports it", adds=True)
_COMPILE = declare("torch.compile", "there is no GPU to compile for")
_FOREACH_TYPES = (
    declare("torch.optim.optimizer._foreach_supported_types", "fake tensors take the default of a GPU, foreach"),
    declare("torch.utils._foreach_utils._foreach_supported_types", "fake tensors take the default of a GPU, foreach"),
)
_ONE_HOT = declare("torch.nn.functional.one_hot", "how many tokens experts get follows from routers' masks")
_FINITE = [
    declare(f"{owner}.isfinite", "a script that trains on finite losses alone would train on none")
    for owner in ("torch", "torch.Tensor")
]
_LOSS = declare("torch.nn.functional.cross_entropy", "rows that values choose were all taken, of logits and of labels")
_OBJECTS = declare_all(
    "torch.distributed.distributed_c10d",
    ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    "objects of other ranks are not there, and tensors without values cannot be pickled",
)
# Ranks in a tensor of a mesh are values.
_MESHES = [
    declare("torch.distributed.device_mesh.init_device_mesh", "a mesh has real ranks"),
    *declare_all(
        "torch.distributed.device_mesh.DeviceMesh",
        ("__init__", "__getitem__", "_flatten", "_unflatten", "_concatenate", "from_group", "get_coordinate"),
        "a mesh has real ranks",
        optional=True,
    ).values(),
]
_ATTENTION = declare(
    "torch.nn.functional.scaled_dot_product_attention", "torch would ask the driver for the kernel, and there is none"
)


def install(ledger: Ledger) -> None:
    """Patch torch in this process, after DeepSpeed is imported."""
    # torch.tensor(…, device="cuda") needs the first, which holds in this thread alone: so backward runs in it as well.
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._set_multithreading_enabled(False)
    _INIT_GPU.install(lambda device=None: None)
    _AVOID_INIT.install(property(lambda self: True))
    _FAKE_TENSOR["data"].install(property(torch.Tensor.data.__get__, _set_data))  # type: ignore[attr-defined]
    _FAKE_TENSOR["data_ptr"].install(_distinct_address)
    _FAKE_TENSOR["record_stream"].install(lambda tensor, stream: ledger.use_on(tensor, stream))
    _FAKE_TENSOR["is_pinned"].install(lambda self, device=None: ledger.is_pinned(self))
    _FAKE_TENSOR["numpy"].install(_refuse_values)
    _FAKE_TENSOR["__index__"].wrap(_note_size)
    _FAKE_TENSOR["tolist"].wrap(functools.partial(_list_values, ledger))
    _FAKE_TENSOR["__new__"].wrap(_make_parameter)
    _APPLY.install(_apply_in_place)
    if not ledger.one_memory:
        _RAW_STREAM.install(lambda device: 0)
        _FALLBACK.wrap(_run_on_the_host)
    for patch in _FOREACH_TYPES:
        if FakeTensor not in (supported := patch.original()):
            supported.append(FakeTensor)
    torch.compiler.set_stance("force_eager")

    def note_compiled() -> None:
        ledger.assume(
            "code under torch.compile was simulated as it is written: compiled, it keeps other activations and"
            " temporaries, mostly fewer, and FlexAttention no scores",
            at_most=True,
        )

    def compile_and_note(compile_code: Any, *args: Any, **kwargs: Any) -> Any:
        """A decorated function may never be called: its call is noted, and a module at once."""
        compiled = compile_code(*args, **kwargs)
        code = args[0] if args else kwargs.get("model")
        if code is None:  # the decorator that is returned comes here with the code
            return compiled
        if isinstance(code, torch.nn.Module):
            note_compiled()
            return compiled

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            note_compiled()
            return compiled(*args, **kwargs)

        return call

    _COMPILE.wrap(compile_and_note)
    _route_attention(ledger)
    _share_objects()
    for patch in _MESHES:
        patch.wrap(_make_real, everywhere=True)

    def make_one_hot(one_hot: Any, tensor: Any, num_classes: int = -1) -> Any:
        mask = one_hot(tensor, num_classes)
        ledger.choices.note(mask, tensor)
        return mask

    def match_rows(cross_entropy: Any, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        """A loss of logits and labels that two masks chose: their numbers agree only where masks have values."""
        if ledger.is_upper_bound and labels.dim() == 1 and logits.dim() == 2 and len(logits) != len(labels):
            rows = min(len(logits), len(labels))
            logits, labels = logits[:rows], labels[:rows]
        return cross_entropy(logits, labels, *args, **kwargs)

    def mark_finite(isfinite: Any, tensor: Any, /) -> Any:
        mask = isfinite(tensor)
        mask.autods_is_all = True
        return mask

    for patch in _FINITE:
        patch.wrap(mark_finite)
    _ONE_HOT.wrap(make_one_hot)
    _LOSS.wrap(match_rows)
    Distribution.set_default_validate_args(False)  # it would look at values; routers of experts draw from one


def _run_on_the_host(original: Any, mode: Any, func: Any, values: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run an operator without a fake implementation on tensors of the host. Its name is the error of others."""
    if any(isinstance(value, FakeTensor) and getattr(value, FAKE_DEVICE).type != "cpu" for value in values):
        raise UnsupportedOperatorException(func)
    return original(mode, func, values, *args, **kwargs)


def _share_objects() -> None:
    """Let other ranks send the same objects as this one."""

    def all_gather_object(object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any) -> None:
        if object_gather_list is not None:
            all_gather_object(object_gather_list, obj)

    def broadcast_object_list(*args: Any, **kwargs: Any) -> None:
        return None

    def scatter_object_list(output: Any, objects: Any = None, *args: Any, **kwargs: Any) -> None:
        output[0] = objects[0] if objects else None

    for function in (all_gather_object, gather_object, broadcast_object_list, scatter_object_list):
        _OBJECTS[function.__name__].install(function, everywhere=True)


class NoValues(Exception):
    """A tensor's values are needed, and a fake tensor has none."""


def _set_data(tensor: Any, value: Any) -> None:
    """`tensor.data = value`, which moves the tensor to the device of the value."""
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
        setattr(tensor, FAKE_DEVICE, getattr(value, FAKE_DEVICE))


def _distinct_address(tensor: Any) -> int:
    """An address that differs between storages: DeepSpeed compares addresses."""
    return int((tensor.untyped_storage()._cdata << 12) + tensor.storage_offset() * tensor.element_size())


def _note_size(as_index: Any, tensor: Any, /) -> Any:
    if (value := find_value(tensor)) is not None:
        with _disable_current_modes():
            return as_index(value)
    tensor.autods_is_size = True
    return as_index(tensor)


def _list_values(ledger: Ledger, to_list: Any, tensor: Any, /) -> Any:
    """Known values are copied at once; FakeTensor would read them one by one."""
    if (value := find_value(tensor)) is None:
        return to_list(tensor)
    ledger.work.read_back(tensor)
    with _disable_current_modes():
        return value.tolist()


def _make_parameter(make: Any, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`type(parameter)(data)`, as accelerate makes parameters: the type of a simulated one is FakeTensor."""
    if not args or not isinstance(args[0], FakeTensor):
        return make(cls, *args, **kwargs)
    return torch.nn.Parameter(args[0], kwargs.get("requires_grad", True))


def _refuse_values(tensor: Any, *, force: bool = False) -> Any:
    if tensor.constant is None:
        raise NoValues("a tensor is turned into a NumPy array, and a simulated tensor has no values")
    return tensor.constant.numpy(force=force)


def _apply_in_place(module: Any, function: Any, recurse: bool = True) -> Any:
    """`Module._apply` as it works on real tensors: it sets `.data` and keeps the parameter objects."""
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


def _make_real(real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        return real(*args, **kwargs)


def _route_attention(ledger: Ledger) -> None:
    """Send calls of scaled_dot_product_attention to the operator that a real device would take."""

    def attend(*arguments: Any) -> Any:
        return _attend_on_cpu(*arguments) if ledger.one_memory else _attend_on_gpu(ledger, *arguments)

    real = _ATTENTION.original()

    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        out = attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if out is not None:
            return out
        return real(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    _ATTENTION.install(scaled_dot_product_attention)


def _attend_on_gpu(
    ledger: Ledger, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None,
    gqa: bool,
) -> Any:  # fmt: skip
    """The result of the kernel that the simulated card takes; None for nested tensors and those of the CPU.

    After torch 2.13's attention.cpp. Raises RuntimeError, as torch does, where the program has turned off all kernels
    that would take the call.
    """
    if not query.is_cuda or query.is_nested:
        return None
    if torch.is_autocast_enabled("cuda"):
        to_half = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(to_half) for tensor in (query, key, value))
        mask = mask.to(to_half) if mask is not None and mask.is_floating_point() else mask
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    call = AttentionCall(
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        dtype=str(query.dtype).removeprefix("torch.") if query.dtype == key.dtype == value.dtype else None,
        dense_rows=all(tensor.stride(-1) == 1 for tensor in (query, key, value, mask) if tensor is not None),
        mask=None if mask is None else tuple(mask.shape),
        mask_trains=mask is not None and mask.requires_grad,
        dropout=dropout,
        causal=causal,
        grouped=gqa,
        trains=trains,
        enabled=tuple(kernel for kernel in KERNELS if _IS_ENABLED[kernel]()),
    )
    kernel = choose_kernel(call, ledger.family)
    ledger.families &= {family for family in FAMILIES if choose_kernel(call, family) == kernel}
    pad, size = torch.nn.functional.pad, query.shape[-1]
    if kernel is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    if kernel == "flash":
        if size % 8:  # the kernel needs a multiple of 8: torch pads copies of all three and cuts the result
            query, key, value = (pad(tensor, (0, 8 - size % 8)) for tensor in (query, key, value))
            scale = scale if scale is not None else 1 / math.sqrt(size)
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)[0]
        return out[..., :size] if size % 8 else out
    mask = _as_bias(mask, query.dtype)
    if kernel == "math":
        return _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=gqa
        )[0]
    if kernel == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, trains, dropout, causal, False, scale=scale
        )[0]
    if mask is not None:
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            # The kernel needs rows that begin at multiples of 8 elements: torch pads a copy.
            mask = pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    return _aten._scaled_dot_product_efficient_attention(query, key, value, mask, trains, dropout, causal, scale=scale)[
        0
    ]


_IS_ENABLED: Mapping[Kernel, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


def _attend_on_cpu(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Any:
    """The result of the CPU's flash kernel; None where a CPU would not take it."""
    if not query.dim() == key.dim() == 4 or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return None
    if not query.is_cpu or dropout or (mask is not None and mask.requires_grad):
        return None
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=_as_bias(mask, query.dtype), scale=scale
    )[0]


def _as_bias(mask: Any, dtype: Any) -> Any:
    """The tensor that torch adds to the scores: a boolean mask becomes one of the query's type."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)
