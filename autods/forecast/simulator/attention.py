"""scaled_dot_product_attention by the kernel that the device would take: for FakeTensor torch takes the math one.

The math kernel keeps the whole matrix of scores, which the fused ones do not. On a GPU the flash kernel takes no mask:
with one it is the memory-efficient kernel, whose mask torch turns into a tensor of the query's type. Where torch
prefers cuDNN's kernel, as newer versions do on some GPUs, it keeps the same tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_aten = torch.ops.aten
_LARGEST_HEAD = 256  # of the flash kernel


def install(*, cpu: bool) -> None:
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
