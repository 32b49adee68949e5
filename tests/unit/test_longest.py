"""The longest batch: the workload's own, or the largest of some draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from autods.trial.longest import DRAWS, longest_batch
from autods.workload import Workload, WorkloadError


def padded_to(lengths: Iterator[int]) -> Workload:
    return Workload(
        build_model=torch.nn.Module, build_batch=lambda n: {"x": torch.zeros(n, next(lengths)), "y": torch.zeros(n)}
    )


def test_the_largest_of_the_draws_is_taken() -> None:
    longest = longest_batch(padded_to(itertools.chain([3, 9, 4], itertools.repeat(5))), 2)
    assert longest.shape == (2, 9)
    assert longest.batch["x"].shape == (2, 9)
    assert longest.draws == DRAWS


def test_the_workloads_own_longest_batch_is_not_drawn() -> None:
    workload = Workload(
        build_model=torch.nn.Module,
        build_batch=lambda n: pytest.fail("drawn"),
        build_longest_batch=lambda n: (torch.zeros(n, 64),),
    )
    longest = longest_batch(workload, 4)
    assert (longest.shape, longest.draws) == ((4, 64), 0)


def test_a_longest_batch_of_another_size_is_refused_by_its_name() -> None:
    workload = Workload(
        build_model=torch.nn.Module,
        build_batch=lambda n: (torch.zeros(n),),
        build_longest_batch=lambda n: (torch.zeros(3, 4),),
    )
    with pytest.raises(WorkloadError, match=r"build_longest_batch\(2\) returned '0' of shape \(3, 4\)"):
        longest_batch(workload, 2)
