"""Lightning: its arguments about GPUs mean CPU ranks, and its loader deals out whole steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from autods.rank.script.adapters.lightning import RankSamples, divide_once, rescale_batches, step_engine, use_cpu_ranks
from autods.rank.training_run.samples import WholeSteps


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({"accelerator": "gpu", "devices": 2}, {"accelerator": "cpu", "devices": 2}),
        ({"accelerator": "cuda", "devices": -1}, {"accelerator": "cpu", "devices": 4}),
        ({"accelerator": "auto", "devices": [0, 1]}, {"accelerator": "auto", "devices": 2}),
        ({"max_epochs": 3}, {"max_epochs": 3}),
    ],
)
def test_devices_count_ranks(monkeypatch, given, passed):
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments, stand_ins = {}, []
    use_cpu_ranks(stand_ins, lambda self, **kwargs: arguments.update(kwargs), None, **given)
    assert arguments == passed
    assert len(stand_ins) == (given.get("accelerator") in ("gpu", "cuda"))


def deal(ranks: int, micro_batch: int, *, trained: int = 0) -> list[list[list[int]]]:
    """The micro batches of an epoch of 20 samples on each rank, in steps of 8, behind those that it has trained on."""
    dealt = []
    for rank in range(ranks):
        samples = WholeSteps(SequentialSampler(range(20)), global_batch=8, drop_last=False, seed=0)
        sampler = RankSamples(samples, micro_batch=micro_batch, rank=rank, ranks=ranks, trained=trained)
        assert len(sampler) == 24 // ranks
        dealt.append(list(BatchSampler(sampler, micro_batch, drop_last=False)))
    return dealt


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 4), (2, 4), (2, 2), (4, 1)])
def test_each_step_has_the_same_samples_on_any_division(ranks, micro_batch):
    accumulation = 8 // (ranks * micro_batch)
    for step, expected in enumerate(([*range(8)], [*range(8, 16)], [*range(16, 20), *range(4)])):
        batches = [rank[step * accumulation : (step + 1) * accumulation] for rank in deal(ranks, micro_batch)]
        assert sorted(sample for rank in batches for batch in rank for sample in batch) == sorted(expected)


def test_a_resumed_epoch_begins_behind_what_was_trained():
    assert deal(2, 2, trained=4) == [rank[4:] for rank in deal(2, 2)]


def test_the_next_epoch_begins_at_its_begin():
    samples = WholeSteps(SequentialSampler(range(8)), global_batch=8, drop_last=False, seed=0)
    sampler = RankSamples(samples, micro_batch=2, rank=0, ranks=1, first_epoch=3, trained=3)
    assert list(sampler) == [6, 7]
    sampler.set_epoch(4)
    assert list(sampler) == list(range(8))


def test_progress_counts_the_micro_batches_of_another_accumulation():
    counts = {"ready": 8, "started": 8, "processed": 8, "completed": 7}
    fit_loop = {"epoch_loop.batch_progress": {"total": dict(counts), "current": dict(counts)}}
    rescale_batches(fit_loop, 2, 4)
    expected = {"ready": 16, "started": 16, "processed": 16, "completed": 15}
    assert fit_loop["epoch_loop.batch_progress"] == {"total": expected, "current": expected}


def test_the_loss_is_divided_by_the_accumulation_once():
    given = []
    for automatic in (True, False):
        divide_once(
            lambda *args, **kwargs: given.append(kwargs), None, 1.0, SimpleNamespace(automatic_optimization=automatic)
        )
    assert given == [{"scale_wrt_gas": False}, {}]


def test_fabric_steps_the_engine():
    stepped, engine = [], object()
    step_engine(lambda strategy, optimizer: stepped.append(optimizer), SimpleNamespace(model=engine), "optimizer")
    step_engine(lambda strategy, optimizer: stepped.append(optimizer), SimpleNamespace(model=None), "optimizer")
    assert stepped == [engine, "optimizer"]
