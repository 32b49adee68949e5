"""scaled_dot_product_attention as CUDA would run it: under FakeTensor torch takes the math kernel, which keeps s² bytes."""

from __future__ import annotations

import math
from typing import Any

import torch

_aten = torch.ops.aten
_LARGEST_HEAD = 256  # of the flash kernel


def install() -> None:
    """Route calls with CUDA tensors to the fused operators."""
    functional = torch.nn.functional
    plain = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        shapes_fit = query.dim() == 4 and key.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
        half = query.dtype in (torch.bfloat16, torch.float16)
        if query.device.type == "cuda" and shapes_fit and query.shape[-1] <= _LARGEST_HEAD:
            if half and attn_mask is None:
                return _flash(query, key, value, dropout_p, is_causal, scale)
            if not enable_gqa and (half or query.dtype == torch.float32):
                return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = attention


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
        if mask.dtype == torch.bool:  # turned into a bias of the query's type
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    keep = any(one.requires_grad for one in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention(query, key, value, mask, keep, dropout, causal, scale=scale)[0]
