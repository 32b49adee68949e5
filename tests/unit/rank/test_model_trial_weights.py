"""Random weights that all threads draw."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autods.rank.model_trial import drawing_in_parallel

LEAST = 4 << 20  # elements that are drawn in parallel, in chunks
CHUNK = 1 << 20


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(size: int = LEAST, threads: int = 2, seed: int = 7, dtype: torch.dtype = torch.float32):
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    with drawing_in_parallel():
        return torch.nn.init.normal_(torch.nn.Parameter(torch.empty(size, dtype=dtype)), mean=0.5, std=0.02)


def plain(size: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.nn.init.normal_(torch.empty(size, dtype=dtype), mean=0.5, std=0.02)


def test_large_weights_are_normal_and_no_part_repeats_another() -> None:
    drawn = draw(LEAST + 12345).detach()
    assert drawn.mean().item() == pytest.approx(0.5, abs=1e-4)
    assert drawn.std().item() == pytest.approx(0.02, rel=1e-2)
    chunks = drawn[: 4 * CHUNK].view(4, -1)
    assert not any(torch.equal(chunks[0], chunk) for chunk in chunks[1:])
    assert drawn[-12345:].std().item() == pytest.approx(0.02, rel=0.05)


def test_the_seed_decides_and_the_number_of_threads_does_not() -> None:
    assert torch.equal(draw(threads=1), draw(threads=3))
    assert not torch.equal(draw(seed=7), draw(seed=8))


@pytest.mark.parametrize(("size", "dtype"), [(1000, torch.float32), (LEAST, torch.bfloat16)])
def test_small_tensors_and_other_types_are_torch_s_own(size: int, dtype: torch.dtype) -> None:
    assert torch.equal(draw(size, dtype=dtype), plain(size, dtype=dtype))


def test_uniform_weights_stay_within_their_bounds() -> None:
    torch.manual_seed(7)
    with drawing_in_parallel():
        drawn = torch.nn.init.uniform_(torch.empty(LEAST), -0.5, 0.1)
    assert -0.5 <= drawn.min().item() < -0.499
    assert 0.099 < drawn.max().item() <= 0.1


def test_torch_draws_again_afterwards() -> None:
    draw()
    size = LEAST
    assert torch.equal(plain(size), torch.empty(size).normal_(0.5, 0.02, generator=torch.Generator().manual_seed(7)))
