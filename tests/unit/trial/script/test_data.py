"""A script's batches have the config's size, or the script is told which line says otherwise."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from autods.trial.script.callsite import Place
from autods.trial.script.data import Batches, Loader
from autods.workload import WorkloadError

PLACE = Place("train.py", 31, "loader = DataLoader(data, batch_size=8)")


def batches(*sizes: int) -> Batches:
    return Batches(loaders=[Loader(batch_size=size, place=PLACE) for size in sizes])


def test_a_batch_of_the_right_size_is_whole():
    assert batches(4).saw([torch.ones(4, 7)], 4)
    assert batches().saw([{"ids": torch.ones(4, 7), "scale": torch.tensor(1.0)}], 4)


def test_a_batch_of_another_size_names_the_loader_that_made_it():
    with pytest.raises(WorkloadError, match="its batches hold 8 samples, where the config says 2") as error:
        batches(3, 8).saw([torch.ones(8, 7)], 2)
    assert error.value.where == "train.py:31"
    assert "`loader = DataLoader(data, batch_size=8)`" in error.value.hint


def test_the_line_that_says_the_size_is_named_and_not_the_one_that_wraps_its_loader():
    wrapped = Loader(batch_size=8, place=Place("train.py", 90, "loader = accelerator.prepare(loader)"), own=False)
    seen = Batches(loaders=[Loader(batch_size=8, place=PLACE), wrapped])
    with pytest.raises(WorkloadError) as error:
        seen.saw([torch.ones(8, 7)], 2)
    assert error.value.where == "train.py:31"


def test_a_loader_is_the_script_s_own_where_its_line_makes_it(monkeypatch):
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)  # put back afterwards
    seen = Batches()
    seen.watch_loaders()
    DataLoader([1, 2], batch_size=2)
    assert [(one.batch_size, one.own) for one in seen.loaders] == [(2, True)]


def test_a_rest_at_the_end_of_the_data_is_not_whole():
    seen = batches(4)
    assert [seen.saw([torch.ones(size, 7)], 4) for size in (4, 4, 2, 4)] == [True, True, False, True]


def test_data_that_does_not_fill_one_batch_is_too_little():
    with pytest.raises(WorkloadError, match="its data ends before a micro batch of 16 is full: it holds 6 samples"):
        batches(16).saw([torch.ones(6, 7)], 16)


def test_packed_and_time_first_batches_are_taken_at_the_loader_s_word():
    packed = batches(4)
    assert packed.saw([torch.ones(1, 96)], 4)
    assert packed.saw([torch.ones(1, 64)], 4)
    assert batches(4).saw([torch.ones(3, 4, 7)], 4)


def test_tokens_of_a_sample_are_those_of_whole_numbers():
    seen = batches()
    seen.saw([{"input_ids": torch.ones(2, 128, dtype=torch.long)}], 2)
    assert seen.tokens_per_sample == 128


def test_the_longest_batch_is_kept_for_the_certificate():
    seen = batches()
    for length in (3, 9, 5):
        seen.keep((), {"ids": torch.ones(2, length)})
    assert seen.longest_shape == (2, 9)
