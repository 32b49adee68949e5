from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from autods.rank.training_run.samples import SampleOrder, Share, WholeSteps, deal_samples, deal_stream, derive_seed
from autods.workload.protocol import WorkloadError

GLOBAL_BATCH = 12
DIVISIONS = [
    (micro_batch, accumulation, replicas)
    for micro_batch, accumulation, replicas in itertools.product((1, 2, 3, 4, 6, 12), repeat=3)
    if micro_batch * accumulation * replicas == GLOBAL_BATCH
]


def make_shares(micro_batch, accumulation, replicas):
    return [
        Share(rank=rank, replicas=replicas, micro_batch=micro_batch, accumulation=accumulation)
        for rank in range(replicas)
    ]


def ids_by_step(order, division, first_step, steps):
    """The samples of each step, over all ranks and micro batches."""
    batches = [list(deal_samples(order, share, first_step, first_step + steps)) for share in make_shares(*division)]
    accumulation = division[1]
    return [
        sorted(
            number
            for rank in batches
            for batch in rank[step * accumulation : (step + 1) * accumulation]
            for number in batch
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize("count", [5, 12, 50, 101])
def test_a_step_has_the_same_samples_in_any_division(division, count):
    order = SampleOrder(count, seed=3)
    expected = [sorted(order.ids(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)) for step in range(4, 12)]
    assert ids_by_step(SampleOrder(count, seed=3), division, 4, 8) == expected


@pytest.mark.parametrize("count", [1, 7, 64])
def test_each_epoch_is_a_permutation_of_its_own(count):
    order = SampleOrder(count, seed=11)
    epochs = [order.ids(epoch * count, (epoch + 1) * count).tolist() for epoch in range(4)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert count < 8 or len({tuple(epoch) for epoch in epochs}) == 4


def test_a_stream_continues_where_another_stopped():
    order = SampleOrder(50, seed=1)
    whole = ids_by_step(order, (2, 3, 2), 0, 30)
    assert ids_by_step(SampleOrder(50, seed=1), (6, 1, 2), 17, 13) == whole[17:]


def test_the_order_of_samples_never_changes():
    assert SampleOrder(10, seed=5).ids(0, 12).tolist() == [6, 3, 5, 8, 9, 0, 1, 2, 7, 4, 6, 4]


def test_the_seed_decides_the_order():
    assert SampleOrder(50, seed=1).ids(0, 50).tolist() != SampleOrder(50, seed=2).ids(0, 50).tolist()
    assert SampleOrder(50, seed=1).ids(0, 50).tolist() != SampleOrder(50, seed=1 + 2**32).ids(0, 50).tolist()
    assert SampleOrder(5, seed=1, shuffle=False).ids(3, 8).tolist() == [3, 4, 0, 1, 2]


def test_a_late_step_makes_one_permutation_alone(monkeypatch):
    made, draw = [], numpy.random.RandomState
    monkeypatch.setattr(numpy.random, "RandomState", lambda words: made.append(words) or draw(words))
    dealt = deal_samples(SampleOrder(1000, seed=0), make_shares(4, 1, 2)[1], 10**9, None)
    assert len(next(dealt)) == 4
    assert len(made) == 1


def test_workers_of_a_loader_keep_the_order():
    order = SampleOrder(30, seed=2)
    expected = list(deal_samples(order, make_shares(2, 2, 2)[0], 3, 9))
    loader = DataLoader(torch.arange(30), batch_sampler=iter(expected), num_workers=2)
    assert [batch.tolist() for batch in loader] == expected
    assert len(expected) == 12


def test_a_stream_that_is_read_in_order_is_dealt_out_alike():
    for division in DIVISIONS:
        dealt = [deal_stream(range(1000), share, 5) for share in make_shares(*division)]
        for step in (5, 6, 7):
            batches = [batch for rank in dealt for batch in itertools.islice(rank, division[1])]
            assert sorted(itertools.chain(*batches)) == list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))


def test_a_stream_is_read_again_at_its_end():
    share = make_shares(4, 1, 1)[0]
    assert list(itertools.islice(deal_stream([0, 1, 2], share, 0), 2)) == [[0, 1, 2, 0], [1, 2, 0, 1]]


def test_a_dataset_without_samples_is_refused():
    with pytest.raises(WorkloadError, match="no samples"):
        SampleOrder(0, seed=0)
    with pytest.raises(WorkloadError, match="no samples"):
        next(deal_stream(iter(()), make_shares(1, 1, 1)[0], 0))


def test_derived_seeds_are_the_same_in_every_process():
    assert derive_seed(1, 23) == derive_seed(1, 23) != derive_seed(12, 3)


def steps_of(count, ranks, micro_batch, *, drop_last=False, epoch=0):
    """The samples of each step of an epoch, as accelerate and the Trainer deal them out to all ranks."""
    from accelerate.data_loader import BatchSamplerShard

    global_batch = 8
    accumulation = global_batch // (ranks * micro_batch)
    sampler = WholeSteps(RandomSampler(range(count)), global_batch=global_batch, drop_last=drop_last, seed=1)
    sampler.set_epoch(epoch)
    batches = [
        list(BatchSamplerShard(BatchSampler(sampler, micro_batch, drop_last), ranks, rank)) if ranks > 1
        else list(BatchSampler(sampler, micro_batch, drop_last))
        for rank in range(ranks)
        if sampler.set_epoch(epoch) is None
    ]  # fmt: skip
    length = len(batches[0])
    return [
        sorted(sample for rank in batches for batch in rank[first : first + accumulation] for sample in batch)
        for first in range(0, length, accumulation)
    ]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [24, 29, 5])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 2), (2, 1), (1, 8), (1, 4), (4, 2)])
def test_steps_are_the_same_on_any_division(count, ranks, micro_batch, drop_last):
    expected = steps_of(count, 2, 4, drop_last=drop_last)
    assert steps_of(count, ranks, micro_batch, drop_last=drop_last) == expected
    assert len(expected) == (count // 8 if drop_last else -(-count // 8))


def test_each_epoch_has_its_own_order_in_every_attempt():
    first, second = steps_of(24, 2, 4), steps_of(24, 2, 4, epoch=1)
    assert first != second
    torch.manual_seed(99)
    assert steps_of(24, 2, 2, epoch=1) == second
