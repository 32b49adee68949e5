"""The longest batch: the workload's own, or the largest of some draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autods.rank.model_facts import DRAWS, largest_shape, longest_batch, survey, text_shapes
from autods.workload import Workload, WorkloadError


def padded_to(lengths: Iterator[int]) -> Workload:
    return Workload(
        build_model=torch.nn.Module, build_batch=lambda n: {"x": torch.zeros(n, next(lengths)), "y": torch.zeros(n)}
    )


def test_the_largest_of_the_draws_is_taken() -> None:
    longest, draws = longest_batch(padded_to(itertools.chain([3, 9, 4], itertools.repeat(5))), 2)
    assert largest_shape(longest) == (2, 9)
    assert longest["x"].shape == (2, 9)
    assert draws == DRAWS


def test_build_longest_batch_is_used_instead_of_draws() -> None:
    workload = Workload(
        build_model=torch.nn.Module,
        build_batch=lambda n: pytest.fail("drawn"),
        build_longest_batch=lambda n: (torch.zeros(n, 64),),
    )
    longest, draws = longest_batch(workload, 4)
    assert (largest_shape(longest), draws) == ((4, 64), 0)


def test_a_longest_batch_of_a_wrong_size_is_refused() -> None:
    workload = Workload(
        build_model=torch.nn.Module,
        build_batch=lambda n: (torch.zeros(n),),
        build_longest_batch=lambda n: (torch.zeros(3, 4),),
    )
    with pytest.raises(WorkloadError, match=r"build_longest_batch\(2\) returned '0' of shape \(3, 4\)"):
        longest_batch(workload, 2)


def of_lengths(usual: int, longest: int | None) -> Workload:
    return Workload(
        build_model=lambda: torch.nn.Linear(2, 2),
        build_batch=lambda n: {"x": torch.zeros(n, usual)},
        build_longest_batch=None if longest is None else lambda n: {"x": torch.zeros(n, longest)},
    )


@pytest.mark.parametrize(("longest", "ratio"), [(None, 1.0), (64, 8.0), (4, 1.0)])
def test_a_survey_reports_the_ratio_of_the_longest_batch(longest: int | None, ratio: float) -> None:
    assert survey(of_lengths(8, longest)).longest_ratio == ratio


def test_a_longest_batch_that_fails_does_not_fail_the_survey() -> None:
    def cannot(micro_batch_size: int) -> tuple[torch.Tensor, ...]:
        raise IndexError(micro_batch_size)

    assert survey(replace(of_lengths(8, None), build_longest_batch=cannot)).longest_ratio == 1.0


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


TEXT = {"input_ids": ids(2, 9), "attention_mask": ids(2, 9), "token_type_ids": ids(2, 9), "labels": ids(2, 9)}


@pytest.mark.parametrize(
    ("batch", "texts"),
    [
        (TEXT, [(2, 9)]),
        ((ids(2, 9), ids(2, 9)), [(2, 9)]),  # the second may be labels
        ([{"input_ids": ids(2, 9)}, {"input_ids": ids(2, 5), "attention_mask": ids(2, 5)}], [(2, 9), (2, 5)]),
        ({"query": {"input_ids": ids(2, 4)}, "passage": {"input_ids": ids(6, 8)}}, [(2, 4), (6, 8)]),
        ({"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 3), "labels": ids(2, 3)}, [(2, 9), (2, 3)]),
        ({"pixel_values": torch.zeros(2, 3, 8, 8), "labels": ids(2)}, []),
    ],
    ids=["masks and labels are no texts", "unnamed", "a pair", "groups", "encoder and decoder", "images"],
)
def test_every_text_of_a_sample_counts(batch: object, texts: list[tuple[int, int]]) -> None:
    assert text_shapes(batch) == texts


def test_a_decoder_reads_the_labels_that_its_model_shifts() -> None:
    batch = {"input_ids": ids(2, 9), "attention_mask": ids(2, 9), "labels": ids(2, 5)}
    assert text_shapes(batch, shifts_labels=True) == [(2, 9), (2, 5)]
    batch["decoder_input_ids"] = ids(2, 5)
    assert text_shapes(batch, shifts_labels=True) == [(2, 9), (2, 5)]
