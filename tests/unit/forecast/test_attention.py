"""The kernel that a card takes for attention, by hand from torch's sdp_utils.cpp."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autods.forecast.attention import FAMILIES, AttentionCall, Kernel, choose_kernel, find_family


def call(head: int = 64, value: int | None = None, *, heads: int = 4, kv_heads: int | None = None) -> AttentionCall:
    kv_heads, value = kv_heads or heads, value or head
    return AttentionCall(
        query=(2, heads, 128, head),
        key=(2, kv_heads, 128, head),
        value=(2, kv_heads, 128, value),
        dtype="bfloat16",
        causal=True,
    )


def choose(asked: AttentionCall, capability: tuple[int, int]) -> Kernel | None:
    return choose_kernel(asked, find_family(capability))


@pytest.mark.parametrize(
    ("capability", "head", "dropout", "expected"),
    [
        ((7, 0), 64, 0.0, False),
        ((7, 5), 128, 0.0, False),
        ((8, 0), 256, 0.1, True),
        ((9, 0), 264, 0.0, False),
        ((8, 6), 224, 0.0, False),
        ((8, 9), 256, 0.0, True),
        ((8, 9), 256, 0.1, False),
        ((12, 0), 224, 0.0, False),
    ],
)
def test_flash_needs_ampere_and_a_head_of_its_sizes(
    capability: tuple[int, int], head: int, dropout: float, expected: bool
) -> None:
    assert (choose(replace(call(head), dropout=dropout), capability) == "flash") == expected


def test_flash_trains_no_long_heads_on_ada_but_evaluates_them() -> None:
    assert choose(replace(call(224), trains=False), (8, 9)) == "flash"
    assert choose(call(224), (8, 9)) == "efficient"


def test_flash_takes_no_causal_mask_that_is_not_square() -> None:
    short = replace(call(), query=(2, 4, 1, 64))
    assert choose(short, (8, 0)) == "efficient"
    assert choose(replace(short, causal=False), (8, 0)) == "flash"


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), "math"), ((8, 0), "efficient"), ((8, 9), "efficient"), ((9, 0), "cudnn"), ((10, 3), "cudnn")],
)
def test_latent_attention_takes_a_fused_kernel_from_ampere_on(capability: tuple[int, int], expected: Kernel) -> None:
    assert choose(call(192, 128), capability) == expected  # DeepSeek's heads; Turing has no bf16


def test_volta_takes_latent_attention_in_fp16_and_fp32() -> None:
    assert choose(replace(call(192, 128), dtype="float16"), (7, 0)) == "efficient"
    assert choose(replace(call(192, 128), dtype="float32"), (7, 0)) == "efficient"


def test_cudnn_takes_no_other_pair_of_long_heads() -> None:
    assert choose(call(256, 128), (9, 0)) == "efficient"
    assert choose(call(96, 64), (9, 0)) == "cudnn"
    assert choose(replace(call(192, 128), dropout=0.1), (9, 0)) == "efficient"
    assert choose(replace(call(192, 128), dropout=0.125), (9, 0)) == "cudnn"


def test_heads_that_differ_take_the_math_kernel() -> None:
    assert choose(replace(call(128), key=(2, 4, 128, 64)), (9, 0)) == "math"
    assert choose(call(heads=8, kv_heads=1), (8, 0)) == "math"  # implicit broadcasting


def test_grouped_heads_take_flash_or_cudnn() -> None:
    grouped = replace(call(heads=8, kv_heads=2), grouped=True)
    masked = replace(grouped, mask=(2, 1, 128, 128), causal=False)
    assert (choose(grouped, (8, 0)), choose(grouped, (7, 0))) == ("flash", "math")
    assert (choose(masked, (8, 0)), choose(masked, (9, 0))) == ("math", "cudnn")
    assert choose(replace(call(heads=8), grouped=True, dtype="float32"), (8, 0)) == "efficient"  # none are shared


@pytest.mark.parametrize(
    ("mask", "changes", "expected"),
    [
        ((2, 1, 128, 128), {}, "cudnn"),
        ((128, 128), {}, "cudnn"),
        ((2, 128, 128), {}, "efficient"),
        ((2, 4, 128, 64), {}, "efficient"),
        ((2, 1, 128, 128), {"mask_trains": True}, "efficient"),
        ((2, 1, 128, 128), {"dense_rows": False}, "math"),
    ],
)
def test_hopper_takes_cudnn_with_a_mask_of_its_shapes(
    mask: tuple[int, ...], changes: dict[str, bool], expected: Kernel
) -> None:
    masked = replace(call(), mask=mask, causal=False, **changes)
    assert choose(masked, (9, 0)) == expected
    assert choose(masked, (8, 0)) == ("math" if expected == "math" else "efficient")


def test_the_efficient_kernel_asks_for_rows_of_16_bytes() -> None:
    assert choose(replace(call(20), dtype="float32"), (8, 0)) == "efficient"
    assert choose(replace(call(18), dtype="float32"), (8, 0)) == "math"
    assert choose(replace(call(18), dtype="float32"), (7, 5)) == "efficient"
    assert choose(replace(call(20), dtype="float16"), (7, 0)) == "math"
    assert choose(replace(call(20), dtype="float16"), (6, 1)) == "efficient"


def test_types_and_shapes_that_differ_take_the_math_kernel() -> None:
    assert choose(replace(call(), dtype=None), (9, 0)) == "math"
    assert choose(replace(call(), dtype="float64"), (9, 0)) == "math"
    flat = replace(call(), query=(8, 128, 64), key=(8, 128, 64), value=(8, 128, 64))
    assert choose(flat, (9, 0)) == "math"


def test_a_kernel_that_the_program_turned_off_is_not_taken() -> None:
    assert choose(replace(call(), enabled=("math",)), (9, 0)) == "math"
    assert choose(replace(call(), enabled=("cudnn", "math")), (9, 0)) == "cudnn"
    assert choose(replace(call(18), dtype="float32", enabled=("flash",)), (9, 0)) is None


def test_each_family_is_that_of_its_own_capability() -> None:
    assert [find_family(family) for family in FAMILIES] == list(FAMILIES)
    assert {find_family(each) for each in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))} == {(8, 6)}
    assert find_family((11, 0)) == find_family((8, 0))
