"""Which kernel torch takes on a card for scaled_dot_product_attention: each kernel's own rules.

After aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h. They are the same in torch 2.11 to 2.13
but for two rules of cuDNN since 2.12. It takes no dropout that is no multiple of 1/16. On Hopper it takes heads above
128 only in the pairs that it can train. Both leave those calls to flash or the efficient kernel here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Kernel = Literal["flash", "cudnn", "efficient", "math"]
KERNELS: tuple[Kernel, ...] = ("flash", "cudnn", "efficient", "math")
Capability = tuple[int, int]
_NO_TENSOR_CORES, _VOLTA, _AMPERE, _ADA, _HOPPER, _BLACKWELL = (6, 0), (7, 0), (8, 0), (8, 6), (9, 0), (10, 0)
FAMILIES: tuple[Capability, ...] = (_NO_TENSOR_CORES, _VOLTA, _AMPERE, _ADA, _HOPPER, _BLACKWELL)
FLASH_FROM = _AMPERE
UNKNOWN_FAMILY = _HOPPER  # of a card whose compute capability is not known
_HALVES = ("bfloat16", "float16")
_LARGEST_HEAD = 256  # elements of a head that the flash kernel takes
_CUDNN_HEAD, _CUDNN_LATENT = 128, (192, 128)  # the largest for cuDNN, and the one larger pair: latent attention


def find_family(capability: Capability | None) -> Capability:
    """Return the member of `FAMILIES` whose rules a card of this compute capability follows."""
    if capability is None:
        return UNKNOWN_FAMILY
    major = capability[0]
    if (8, 6) <= capability <= (8, 9) or major == 12:
        return _ADA
    if capability in ((9, 0), (10, 0), (10, 3)):
        return major, 0
    return _AMPERE if major >= 8 else _VOLTA if major == 7 else _NO_TENSOR_CORES


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What the rules ask of a call. Shapes are (batch, heads, sequence, head) where there are four dimensions.

    `dtype` is None where query, key and value differ in it. `dense_rows` are those of all three and of the mask: their
    last stride is 1. `grouped` is `enable_gqa`. `trains` says that one of the three gets a gradient. `enabled` are the
    kernels that the program has left on.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str | None
    dense_rows: bool = True
    mask: tuple[int, ...] | None = None
    mask_trains: bool = False
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    trains: bool = True
    enabled: tuple[Kernel, ...] = KERNELS

    @property
    def has_plain_shapes(self) -> bool:
        """Whether all have four dimensions and the same batch, and no sequence is empty."""
        tensors = (self.query, self.key, self.value)
        return all(len(shape) == 4 and shape[2] > 0 for shape in tensors) and len({shape[0] for shape in tensors}) == 1

    @property
    def has_same_heads(self) -> bool:
        return self.query[1] == self.key[1] == self.value[1]

    @property
    def heads(self) -> tuple[int, int]:
        """The elements of a head of query and key, and of value; (0, 0) where query and key differ."""
        return (self.query[-1], self.value[-1]) if self.query[-1] == self.key[-1] else (0, 0)


@cache
def choose_kernel(call: AttentionCall, family: Capability) -> Kernel | None:
    """Return the kernel that torch takes on a card of this family; None where it finds none and raises.

    cuDNN's goes first on Hopper and Blackwell. Where flash would do, "flash" stands for both: they hold the same bytes.
    """
    return next((kernel for kernel in KERNELS if kernel in call.enabled and _RULES[kernel](call, family)), None)


def _takes_flash(call: AttentionCall, family: Capability) -> bool:
    if family < FLASH_FROM or call.dtype not in _HALVES or call.mask is not None or not call.has_plain_shapes:
        return False
    size, value_size = call.heads
    if size != value_size or not 0 < size <= _LARGEST_HEAD or not (call.dense_rows or size == 1):
        return False
    if call.causal and call.query[2] != call.key[2]:
        return False
    if call.trains and family == _ADA and size > 192 and (size <= 224 or call.dropout):
        return False
    shares = call.grouped and call.key[1] == call.value[1] and call.query[1] % call.key[1] == 0
    return call.has_same_heads or shares


def _takes_cudnn(call: AttentionCall, family: Capability) -> bool:
    if family not in (_HOPPER, _BLACKWELL) or call.dtype not in _HALVES or not call.has_plain_shapes:
        return False
    size, value_size = call.heads
    if not (0 < max(size, value_size) <= _CUDNN_HEAD or (size, value_size) == _CUDNN_LATENT):
        return False
    if size % 8 or value_size % 8 or not call.dense_rows or call.key[2] == 1 or call.dropout * 16 % 1:
        return False
    if call.mask is not None and (call.mask_trains or not _spreads(call.mask, call)):
        return False
    shares = call.grouped and not (call.query[1] % call.key[1] or call.query[1] % call.value[1])
    return call.has_same_heads or shares


def _spreads(mask: tuple[int, ...], call: AttentionCall) -> bool:
    """Whether the mask's shape is that of all scores, with 1 in some places."""
    scores = (*call.query[:3], call.key[2])
    return len(mask) in (2, 4) and all(
        size in (1, whole) for size, whole in zip(mask, scores[-len(mask) :], strict=True)
    )


def _takes_efficient(call: AttentionCall, family: Capability) -> bool:
    halves = _HALVES if family >= _AMPERE else ("float16",)
    if call.dtype not in (*halves, "float32") or not call.has_plain_shapes or not call.has_same_heads:
        return False
    has_tensor_cores = family >= (_AMPERE if call.dtype == "float32" else _VOLTA)
    unit = (4 if call.dtype == "float32" else 8) if has_tensor_cores else 1  # they load 16 bytes
    return call.dense_rows and all(size > 0 and size % unit == 0 for size in call.heads)


_RULES: Mapping[Kernel, Callable[[AttentionCall, Capability], bool]] = {
    "flash": _takes_flash, "cudnn": _takes_cudnn, "efficient": _takes_efficient, "math": lambda call, family: True,
}  # fmt: skip
