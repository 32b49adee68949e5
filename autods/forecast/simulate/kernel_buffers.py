"""The buffers that kernels take for the time of one call: neither arguments nor results.

Attention on cards: after torch 2.13, aten/src/ATen/native/transformers/cuda. Tensors have the shape (batch, heads,
sequence, head). No card has confirmed the sizes. Matmuls on CPU ranks: measured, torch 2.13 with oneDNN's AVX512_CORE.
Copies between the device and the host: after the same torch, aten/src/ATen/native/cuda/Copy.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
_FLOAT = 4  # bytes
_ROWS = 128  # flash pads sequences to it; the efficient kernel's tiles, and a CPU's for a bias, have at most as many
_TILE_COLUMNS = 64  # of the efficient kernel's gradient of the query
_LARGEST_IN_REGISTERS = 128  # elements of a head; a longer one is summed up in memory


def size_flash_backward(arguments: Sequence[Any]) -> list[int]:
    """Return bytes of each buffer: flash_attn/flash_api.cpp, mha_bwd, and copies of attention_backward.cu.

    The gradient of the query is summed up in fp32. With fewer heads of keys than of queries, the gradients of key and
    value are first made for every head of the query.
    """
    gradient, query, key, _, out = arguments[:5]
    batch, heads, length, head = query.shape
    rows = _round_up(length, _ROWS)
    columns = _round_up(head, 32 if head <= 128 else 64)
    sizes = [batch * heads * rows * _FLOAT, batch * heads * rows * columns * _FLOAT]
    if key.shape[1] != heads:
        sizes += 2 * [batch * heads * key.shape[2] * head * key.element_size()]
    return [*_size_copies(gradient, out), *sizes]


def size_efficient_backward(arguments: Sequence[Any]) -> list[int]:
    """Return bytes of each buffer: mem_eff_attention/kernel_backward.h, workspace_size and kKernelComputesDelta."""
    gradient, query, key, value, _, out = arguments[:6]
    batch, heads, length, head = query.shape
    columns, value_columns = (_round_up(size, _TILE_COLUMNS) for size in (head, value.shape[-1]))
    workspace = _round_up(length, _ROWS) * columns
    if max(head, value.shape[-1]) > _LARGEST_IN_REGISTERS or query.element_size() == _FLOAT:
        workspace += _round_up(key.shape[2], _ROWS) * (columns + value_columns)
    sizes = [batch * heads * length * _FLOAT, batch * heads * workspace * _FLOAT]
    return [*_size_copies(gradient, out), *sizes]


def size_efficient_forward(arguments: Sequence[Any]) -> list[int]:
    """Return bytes of each buffer: attention.cu, kNeedsOutputAccumulatorBuffer."""
    query, _, value = arguments[:3]
    batch, heads, length, _ = query.shape
    if query.element_size() == _FLOAT or value.shape[-1] <= _LARGEST_IN_REGISTERS:
        return []
    return [batch * heads * length * value.shape[-1] * _FLOAT]


def size_matmul_on_cpu(arguments: Sequence[Any]) -> list[int]:
    """Return bytes of the buffer in which oneDNN's kernel for processors without bf16 sums up a product in fp32.

    It adds a bias to 128 rows at a time, in a buffer of their own. The products of a batch are made one at a time.
    """
    *bias, left, right = arguments
    rows, columns = left.shape[-2], right.shape[-1]
    rows += min(rows, _ROWS) * len(bias)
    return [rows * columns * _FLOAT] if left.dtype == torch.bfloat16 else []


def converts_first(source: Any, *, asynchronous: bool) -> bool:
    """Return whether a copy between the device and the host changes the type before it moves the bytes.

    An asynchronous copy changes it on the device, and one that the host waits for on the host.
    """
    return bool(source.is_cuda) == asynchronous


def size_copy(target: Any, source: Any, *, asynchronous: bool) -> tuple[int, int]:
    """Return bytes that a copy between the device and the host takes where its target lies, and where its source does.

    Only tensors of one type that are contiguous, or have the same strides, are copied as they are.
    """
    is_converted = target.dtype != source.dtype
    is_dense = source.shape == target.shape and source.is_contiguous()
    if not is_converted and (target.stride() == source.stride() or (is_dense and target.is_contiguous())):
        return 0, 0
    first = converts_first(source, asynchronous=asynchronous)
    size = target.numel() * (target if first else source).element_size()
    at_target = not target.is_contiguous() or (is_converted and not first)
    at_source = not is_dense or (is_converted and first)
    return size * at_target, size * at_source


BUFFERS_ON_CPU: Mapping[Any, Callable[[Sequence[Any]], list[int]]] = {
    _aten.mm.default: size_matmul_on_cpu,
    _aten.bmm.default: size_matmul_on_cpu,
    _aten.addmm.default: size_matmul_on_cpu,
    _aten.baddbmm.default: size_matmul_on_cpu,
}
BUFFERS: Mapping[Any, Callable[[Sequence[Any]], list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: size_flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: size_flash_backward,  # in want of its sources
    _aten._scaled_dot_product_efficient_attention_backward.default: size_efficient_backward,
    _aten._scaled_dot_product_efficient_attention.default: size_efficient_forward,
}


def _size_copies(*tensors: Any) -> list[int]:
    """Return bytes of the copies that make these contiguous as (batch, sequence, heads, head)."""
    return [tensor.numel() * tensor.element_size() for tensor in tensors if not _is_transposed(tensor)]


def _is_transposed(tensor: Any) -> bool:
    """Return whether it lies in memory as (batch, sequence, heads, head). A view of a fake tensor would cost more."""
    expected = 1
    for place in (3, 1, 2, 0):
        if tensor.shape[place] != 1 and tensor.stride(place) != expected:
            return bool(tensor.numel() == 0)
        expected *= tensor.shape[place]
    return True


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
