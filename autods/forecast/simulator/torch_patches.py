"""Patches of torch on the simulated GPU: fake tensors, attention, shortcuts."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...trial import lean
from .ledger import Ledger

# torch 2.11 and before: fake_device itself.
_DEVICE = "_fake_device" if "_fake_device" in FakeTensor.__annotations__ else "fake_device"


def install_fake_tensors(ledger: Ledger) -> None:
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


_aten = torch.ops.aten
_LARGEST_HEAD = 256  # of the flash kernel


def install_attention(*, cpu: bool) -> None:
    """Route calls to the fused operators."""
    functional = torch.nn.functional
    plain = functional.scaled_dot_product_attention
    route = _on_cpu if cpu else _on_cuda

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if query.dim() == 4 and key.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]:
            out = route(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if out is not None:
                return out
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = attention


def _on_cuda(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Any:
    if query.device.type != "cuda":
        return None
    half, size = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    if half and mask is None and size <= _LARGEST_HEAD:
        return _flash(query, key, value, dropout, causal, scale)
    if not gqa and (half or query.dtype == torch.float32) and size % (8 if half else 4) == 0:
        return _efficient(query, key, value, mask, dropout, causal, scale)
    return None


def _on_cpu(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Any:
    if query.device.type != "cpu" or dropout or (mask is not None and mask.requires_grad):
        return None
    mask = _as_bias(mask, query.dtype)
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )[0]


def _flash(query: Any, key: Any, value: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    size = query.shape[-1]
    if size % 8 == 0:
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)[0]
    # The kernel wants heads of a multiple of 8: torch pads copies of all three, and cuts the result.
    query, key, value = (torch.nn.functional.pad(one, (0, 8 - size % 8)) for one in (query, key, value))
    scale = scale if scale is not None else 1 / math.sqrt(size)
    out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)[0]
    return out[..., :size]


def _efficient(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    if mask is not None:
        mask = _aligned(_as_bias(mask, query.dtype)).expand(*query.shape[:-1], key.shape[-2])
    keep = any(one.requires_grad for one in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention(query, key, value, mask, keep, dropout, causal, scale=scale)[0]


def _aligned(mask: Any) -> Any:
    """The kernel wants rows of the mask to begin at multiples of 8 elements: else torch pads a copy."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]


def _as_bias(mask: Any, dtype: Any) -> Any:
    """What torch adds to the scores: a mask of true and false becomes a tensor of the query's type."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def install_shortcuts() -> None:
    """In this process, after DeepSpeed is imported and before the first operator runs."""
    _remember_dispatch_rules()
    _no_ranges()
    _duplicates_by_set()
    _no_compile_passes()
    _no_checked_distributions()


def _remember_dispatch_rules() -> None:
    """torch asks at every operator whether a rule is registered for it: it is looked up once for each."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch._library import simple_registry

        find = simple_registry.find_torch_dispatch_rule
        known: dict[Any, Any] = {}

        def remembered(op: Any, kind: type) -> Any:
            try:
                return known[op, kind]
            except KeyError:
                rule = known[op, kind] = find(op, kind)
                return rule

        simple_registry.find_torch_dispatch_rule = remembered  # type: ignore[assignment]


def _no_ranges() -> None:
    """DeepSpeed opens a range for the profiler around each of its functions."""
    from deepspeed.utils import nvtx

    nvtx.enable_nvtx = False


def _duplicates_by_set() -> None:
    """DeepSpeed looks for each parameter in lists of all of them, which takes minutes of a large model."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = getattr(DeepSpeedEngine, "_check_for_duplicates", None)
    if own is None:
        return

    def check(self: Any, optimizer: Any) -> None:
        listed = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if len(set(listed)) != len(listed):
            own(self, optimizer)

    DeepSpeedEngine._check_for_duplicates = check


def _no_compile_passes() -> None:
    """DeepSpeed imports torch's compiler to register passes that only `engine.compile` would use."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if hasattr(DeepSpeedEngine, "register_compile_pass"):
        DeepSpeedEngine.register_compile_pass = lambda *args, **kwargs: None


def _no_checked_distributions() -> None:
    """torch looks at the values of a distribution's arguments, which nothing here has; experts draw from one."""
    from torch.distributions import Distribution

    Distribution.set_default_validate_args(False)
