"""The buffers of attention kernels, by hand from torch's sources."""

from __future__ import annotations

import random

import torch

from autods.forecast.simulate.kernel_buffers import (
    size_efficient_backward,
    size_efficient_forward,
    size_flash_backward,
    size_matmul_on_cpu,
)


def tensor(heads: int, length: int, head: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """As attention gets it: (batch, heads, sequence, head) of memory in which the sequence comes before the heads."""
    return torch.empty(2, length, heads, head, dtype=dtype, device="meta").transpose(1, 2)


def test_flash_sums_the_querys_gradient_in_fp32() -> None:
    query = tensor(8, 100, 80)
    # 100 rows are padded to 128, 80 columns to 96; softmax_d has a number for each row.
    assert size_flash_backward([query] * 5) == [2 * 8 * 128 * 4, 2 * 8 * 128 * 96 * 4]


def test_flash_expands_key_and_value_of_grouped_heads() -> None:
    query, key = tensor(8, 128, 64), tensor(2, 256, 64)
    sizes = size_flash_backward([query, query, key, key, query])
    assert sizes[2:] == 2 * [2 * 8 * 256 * 64 * 2]


def test_flash_copies_a_gradient_that_is_not_contiguous() -> None:
    query = tensor(8, 128, 64)
    gradient = torch.empty(2, 8, 128, 64, dtype=torch.bfloat16, device="meta")
    assert size_flash_backward([gradient, query, query, query, query])[0] == 2 * 8 * 128 * 64 * 2
    assert len(size_flash_backward([gradient, query, query, query, query])) == 3


def test_the_efficient_kernel_sums_long_heads_in_memory() -> None:
    short, long = tensor(4, 128, 64, torch.float16), tensor(4, 128, 192, torch.float16)
    assert size_efficient_backward([short, short, short, short, None, short])[-1] == 2 * 4 * 128 * 64 * 4
    assert size_efficient_backward([long, long, long, long, None, long])[-1] == 3 * 2 * 4 * 128 * 192 * 4
    assert size_efficient_forward([short, short, short]) == []
    assert size_efficient_forward([long, long, long]) == [2 * 4 * 128 * 192 * 4]


def test_the_efficient_kernels_sums_have_the_heads_sizes() -> None:
    query, value = tensor(4, 128, 192), tensor(4, 128, 128)
    columns = 192 + (192 + 128)  # the sums of the gradients of query, key and value
    assert size_efficient_backward([value, query, query, value, None, value])[-1] == 2 * 4 * 128 * columns * 4


def test_buffers_hold_copies_of_what_is_not_contiguous() -> None:
    """A contiguous gradient and result are what torch calls contiguous with the sequence before the heads."""
    draw = random.Random(7)
    for _ in range(300):
        made = torch.empty([draw.choice([1, 2, 3]) for _ in range(4)], dtype=torch.bfloat16)
        for _ in range(draw.choice([0, 1, 2])):
            made = made.transpose(*draw.sample(range(4), 2))
        made = made[:, ::2] if draw.random() < 0.3 else made
        copies = size_flash_backward([made, made, made, made, made[:, :0]])[:-2]
        assert copies == ([] if made.transpose(1, 2).is_contiguous() else [made.numel() * 2])


def test_a_cpu_sums_matmuls_of_16_bits_in_fp32() -> None:
    """The sizes are those measured by VmHWM: 16 MiB for 512 rows, and 4 for a bias."""
    left, right = torch.empty(512, 256, dtype=torch.bfloat16), torch.empty(256, 8192, dtype=torch.bfloat16)
    assert size_matmul_on_cpu([left, right]) == [16 << 20]
    assert size_matmul_on_cpu([right[0], left, right]) == [20 << 20]
    assert size_matmul_on_cpu([left.expand(8, -1, -1), right.expand(8, -1, -1)]) == [16 << 20]
    assert size_matmul_on_cpu([left.float(), right.float()]) == []
