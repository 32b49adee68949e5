from __future__ import annotations

import pytest
import torch

from autods.rank.training_run.consensus import Consensus


class Sum:
    """One collective: the sum is there when the last rank has sent its part."""

    def __init__(self, size):
        self.size, self.parts = size, []

    def add(self, part):
        self.parts.append(part)
        if len(self.parts) == self.size:
            total = sum(self.parts[1:], self.parts[0].clone())
            for each in self.parts:
                each.copy_(total)

    def wait(self):
        assert len(self.parts) == self.size, "a rank waits for another one"


class Member:
    """A rank's end of a group: its collectives are those of the other ranks in the same order."""

    def __init__(self, sums, size):
        self.sums, self.size, self.done = sums, size, 0

    def allreduce(self, tensors):
        if self.done == len(self.sums):
            self.sums.append(Sum(self.size))
        work = self.sums[self.done]
        self.done += 1
        work.add(*tensors)
        return work


class Ranks:
    """Ranks that report steps of `step_s` seconds in turn; `delivered` is what each got."""

    def __init__(self, count=2, step_s=0.1):
        self.now, self.step_s, self.step, self.stop = 0.0, step_s, 0, False
        self.sums, self.delivered, self.waits = [], [[] for _ in range(count)], 0
        self.all = [
            Consensus(
                deliver=self.delivered[rank].extend,
                start_copy=self.start_copy,
                find_stop=lambda: self.stop,
                clock=lambda: self.now,
                rank=rank,
                world_size=count,
                group=Member(self.sums, count),
            )
            for rank in range(count)
        ]

    def start_copy(self, losses):
        begun = self.step

        def read():
            self.waits += self.step == begun
            return losses

        return read

    def report(self, steps):
        for _ in range(steps):
            self.step += 1
            self.now += self.step_s
            for rank, consensus in enumerate(self.all):
                consensus.report({"step": self.step} if rank == 0 else None, float(self.step + rank))


def test_each_step_is_delivered_in_order_with_the_mean_loss():
    ranks = Ranks()
    ranks.report(100)
    steps = [line["step"] for line, _ in ranks.delivered[0]]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 85
    assert [loss for _, loss in ranks.delivered[0]] == [step + 0.5 for step in steps]
    assert {line for line, _ in ranks.delivered[1]} == {None}


def test_losses_are_summed_up_on_the_host_beside_a_default_card():
    ranks = Ranks()
    with torch.device("meta"):
        ranks.report(10)
    assert ranks.delivered[0][0] == ({"step": 1}, 1.5)


def test_losses_are_read_a_step_after_their_copy_began():
    ranks = Ranks()
    ranks.report(100)
    assert ranks.waits == 0


@pytest.mark.parametrize(("step_s", "every"), [(0.001, 32), (0.125, 8), (0.45, 2), (5.0, 1)])
def test_ranks_agree_about_once_a_second(step_s, every):
    ranks = Ranks(step_s=step_s)
    ranks.report(200)
    assert [consensus.every for consensus in ranks.all] == [every, every]
    before = len(ranks.sums)
    ranks.report(10 * every)
    assert len(ranks.sums) - before == 10


def test_steps_that_become_slow_are_agreed_on_each():
    ranks = Ranks(step_s=0.01)
    ranks.report(200)
    ranks.step_s = 20.0
    ranks.report(2 * 32)
    assert ranks.all[0].every == 1


def test_a_request_to_stop_reaches_all_ranks_at_the_same_step():
    ranks = Ranks()
    ranks.report(50)
    ranks.stop = True
    asked_s = ranks.now
    while not ranks.all[0].stop_agreed:
        ranks.report(1)
        assert ranks.all[0].stop_agreed == ranks.all[1].stop_agreed
    assert ranks.now - asked_s < 1.5


def test_a_loss_that_one_rank_does_not_know_has_no_mean():
    ranks = Ranks()
    for _ in range(4):
        ranks.all[0].report({}, 1.0)
        ranks.all[1].report(None, None)
    assert ranks.delivered[0][0] == ({}, None)


def test_a_flush_delivers_all_steps():
    ranks = Ranks(count=1)
    ranks.report(57)
    ranks.all[0].flush()
    assert [line["step"] for line, _ in ranks.delivered[0]] == list(range(1, 58))
