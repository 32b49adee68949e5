"""Batches: their size is the trial's, or an error names the line that sets another one."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from autods.rank.script.batches import Batches, Loader
from autods.system.stacks import Frame
from autods.workload import WorkloadError

PLACE = Frame("train.py", 31, "main", "loader = DataLoader(data, batch_size=8)")


def batches(*sizes: int) -> Batches:
    return Batches(loaders=[Loader(batch_size=size, place=PLACE) for size in sizes])


def test_a_batch_of_the_micro_batch_size_is_whole():
    assert batches(4).check([torch.ones(4, 7)], 4)
    assert batches().check([{"ids": torch.ones(4, 7), "scale": torch.tensor(1.0)}], 4)


def test_the_error_about_another_size_names_the_loader():
    with pytest.raises(WorkloadError, match="its batches hold 8 samples, where the config says 2") as error:
        batches(3, 8).check([torch.ones(8, 7)], 2)
    assert error.value.place == "train.py:31"
    assert "`loader = DataLoader(data, batch_size=8)`" in error.value.hint


@pytest.mark.parametrize(("takes_size", "own"), [(True, None), (False, 8)])
def test_a_batch_that_no_argument_changes_is_the_script_s_own(takes_size: bool, own: int | None):
    with pytest.raises(WorkloadError) as error:
        batches(8).check([torch.ones(8, 7)], 2, takes_size=takes_size)
    assert error.value.own_batch == own


def test_the_error_names_the_script_s_line_before_a_library_s():
    wrapper = Loader(batch_size=8, place=Frame("train.py", 90, "main", "loader = accelerator.prepare(loader)"))
    seen = Batches(loaders=[Loader(batch_size=8, place=PLACE), wrapper])
    with pytest.raises(WorkloadError) as error:
        seen.check([torch.ones(8, 7)], 2)
    assert error.value.place == "train.py:31"


def test_a_loader_is_noted_with_its_size(monkeypatch):
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)  # restored afterwards
    seen = Batches()
    seen.watch_loaders()
    DataLoader([1, 2], batch_size=2)
    assert [loader.batch_size for loader in seen.loaders] == [2]


def test_the_rest_at_the_end_of_the_data_is_not_whole():
    seen = batches(4)
    assert [seen.check([torch.ones(size, 7)], 4) for size in (4, 4, 2, 4)] == [True, True, False, True]


def test_data_for_less_than_one_batch_is_an_error():
    with pytest.raises(WorkloadError, match="its data ends before a micro batch of 16 is full: it holds 6 samples"):
        batches(16).check([torch.ones(6, 7)], 16)


def test_packed_and_time_first_batches_count_as_whole():
    packed = batches(4)
    assert packed.check([torch.ones(1, 96)], 4)
    assert packed.check([torch.ones(1, 64)], 4)
    assert batches(4).check([torch.ones(3, 4, 7)], 4)


def test_tokens_are_counted_over_all_forwards():
    seen = batches()
    for length in (128, 32):  # the texts of a pair, one after the other
        seen.check([{"input_ids": torch.ones(2, length, dtype=torch.long)}], 2)
    seen.end_step(is_whole=True)
    assert (seen.tokens, seen.whole_steps) == (2 * (128 + 32), 1)


def test_the_rest_at_the_end_of_the_data_has_no_tokens():
    seen = batches()
    for rows in (2, 1, 2):
        is_whole = seen.check([{"input_ids": torch.ones(rows, 32, dtype=torch.long)}], 2)
        seen.end_step(is_whole=is_whole)
    assert (seen.tokens, seen.whole_steps) == (2 * 2 * 32, 2)


def test_the_longest_batch_is_kept():
    seen = batches()
    for length in (3, 9, 5):
        seen.keep_longest((), {"ids": torch.ones(2, length)})
    assert seen.longest_shape == (2, 9)


def test_a_kept_batch_holds_no_graph():
    seen = batches()
    embedded = torch.ones(2, 9, requires_grad=True) * 2
    seen.keep_longest((), {"batch": [embedded]})
    evaluated: list[torch.Tensor] = []
    seen.forward = lambda batch: evaluated.extend(batch)
    seen.evaluate(torch.nn.Identity())
    assert evaluated[0].grad_fn is None
    assert torch.equal(evaluated[0], embedded)
