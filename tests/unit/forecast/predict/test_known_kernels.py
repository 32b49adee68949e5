"""Kernels of other libraries have FLOPs by the shapes of their calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autods.forecast.predict.known_kernels import KnownKernel, find_kernel

_QUERY = torch.empty(2, 128, 8, 64)  # batch, length, heads, head
_PACKED = torch.empty(256, 8, 64)
_WHOLE = 4 * 2 * 8 * 128 * 128 * 64


def _count(name: str, **arguments: Any) -> float | None:
    kernel = find_kernel(name)
    assert kernel is not None
    return kernel.count_flops(arguments)


@pytest.mark.parametrize(
    ("name", "share", "arguments"),
    [
        ("flash_attn::_flash_attn_forward", 1, {"causal": False}),
        ("flash_attn::_flash_attn_forward", 0.5, {"causal": True, "window_size_left": -1}),
        ("flash_attn::_flash_attn_forward", 0.25, {"causal": True, "window_size_left": 31}),
        ("flash_attn::_flash_attn_backward", 1.25, {"causal": True}),
    ],
)
def test_flash_attention_counts_the_keys_that_it_sees(name: str, share: float, arguments: dict[str, Any]) -> None:
    assert _count(name, q=_QUERY, k=_QUERY[:, :, :2], **arguments) == share * _WHOLE


@pytest.mark.parametrize(("longest", "keys"), [(128, 128), (0, 256)])
def test_packed_sequences_count_as_their_longest(longest: int, keys: int) -> None:
    name = "flash_attn::_flash_attn_varlen_forward"
    assert _count(name, q=_PACKED, k=_PACKED, max_seqlen_k=longest, causal=False) == 4 * _PACKED.numel() * keys


@pytest.mark.parametrize(("name", "products"), [("flash_fwd", 4), ("flash_bwd", 10)])
def test_xformers_names_its_arguments_in_its_own_way(name: str, products: int) -> None:
    arguments = {"query": _PACKED, "key": _PACKED, "max_seqlen_k": 128, "is_causal": True, "window_left": -1}
    assert _count(f"xformers_flash::{name}", **arguments) == products * _PACKED.numel() * 64


def test_a_call_without_a_size_that_decides_is_not_counted() -> None:
    assert _count("_chunk_state_fwd_kernel", states_ptr=_PACKED) is None
    assert _count("_chunk_state_fwd_kernel", states_ptr=_PACKED, chunk_size=64) == 2 * _PACKED.numel() * 64


def test_flash_attention_s_backward_pass_holds_a_gradient_in_fp32() -> None:
    kernel = find_kernel("flash_attn::_flash_attn_backward")
    assert kernel is not None
    assert kernel.count_buffers({"q": _QUERY}) == 4 * _QUERY.numel()


@pytest.mark.parametrize(
    ("name", "shared_bytes"),
    [
        ("flash_attn::_flash_attn_backward", 2 * 2 * _QUERY.numel()),  # both expanded, in 16 bits
        ("flash_attn_3::_flash_attn_backward", 2 * 4 * _QUERY.numel() // 4),  # both summed up, in fp32
        ("flash_attn::_flash_attn_varlen_backward", 2 * 2 * _QUERY.numel()),
    ],
)
def test_gradients_of_shared_keys_and_values_take_buffers(name: str, shared_bytes: int) -> None:
    kernel = find_kernel(name)
    assert kernel is not None
    alone, shared = ({"q": _QUERY, "k": key} for key in (_QUERY, _QUERY[:, :, :2]))
    assert kernel.count_buffers(shared) - kernel.count_buffers(alone) == shared_bytes


@pytest.mark.parametrize(
    ("name", "passes"),
    [("liger_cross_entropy_kernel", 3), ("_swiglu_forward_kernel", 1), ("_rope_embedding_QK", 1), ("mine", None)],
)
def test_the_table_knows_kernels_by_name_or_pattern(name: str, passes: int | None) -> None:
    kernel = find_kernel(name)
    assert (None if kernel is None else kernel.passes) == passes


def test_an_unknown_kernel_has_no_row() -> None:
    assert find_kernel("mylib::attention") is None
    assert isinstance(find_kernel("causal_conv1d_cuda.fwd"), KnownKernel)
