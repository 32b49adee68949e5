"""Schedules that a script steps by itself, in the process that saves and in the one that goes on."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

from autods.rank.training_run import schedules
from autods.rank.training_run.schedules import Schedules


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """As in a process of its own, which notes schedules."""
    monkeypatch.setattr(schedules, "_made", [])
    monkeypatch.setattr(schedules, "_listener", None)
    for patch in schedules._MADE.values():
        owner = getattr(lr_scheduler, patch.symbol.split(".")[-2])
        monkeypatch.setattr(owner, "__init__", owner.__init__)  # set back after the test
    schedules.watch()


class WithLambda(lr_scheduler.LRScheduler):
    """Its state cannot be pickled."""

    def __init__(self, optimizer):
        self.rate_at = lambda step: 0.5**step
        super().__init__(optimizer)

    def get_lr(self):
        return [base * self.rate_at(self.last_epoch) for base in self.base_lrs]


def make_engine():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 3.0}], lr=1.0)
    return SimpleNamespace(basic_optimizer=optimizer, optimizer=optimizer, lr_scheduler=None)


def warm_up_then_decay(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplied": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "sequence": warm_up_then_decay,
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=20, cycle_momentum=False),
}


def rates(engine, schedule, steps):
    made = []
    for _ in range(steps):
        made += [group["lr"] for group in engine.optimizer.param_groups]
        engine.optimizer.step()
        schedule.step()
    return made


@pytest.mark.parametrize("makes_late", [False, True])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_the_script_goes_on(kind, makes_late):
    engine = make_engine()
    schedule = SCHEDULES[kind](engine.optimizer)
    rates(engine, schedule, 5)
    saved, groups = copy.deepcopy((Schedules(engine, print).states(), engine.optimizer.state_dict()["param_groups"]))
    expected = rates(engine, schedule, 5)
    del schedule

    schedules._made.clear()
    engine = make_engine()
    kept = Schedules(engine, print)
    if makes_late:
        kept.restore(saved, groups)
    schedule = SCHEDULES[kind](engine.optimizer)
    if not makes_late:
        kept.restore(saved, groups)
    assert rates(engine, schedule, 5) == pytest.approx(expected)


def test_a_plateau_remembers_its_best_metric():
    engine = make_engine()
    plateau = lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
    plateau.step(1.0)
    saved, groups = copy.deepcopy((Schedules(engine, print).states(), engine.optimizer.state_dict()["param_groups"]))
    schedules._made.clear()
    engine = make_engine()
    plateau = lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
    Schedules(engine, print).restore(saved, groups)
    plateau.step(2.0)
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_deepspeed_s_and_other_optimizers_schedules_are_left():
    engine, other = make_engine(), make_engine()
    mine, deepspeeds, others = (SCHEDULES["lambda"](each.optimizer) for each in (engine, engine, other))
    engine.lr_scheduler = deepspeeds
    assert Schedules(engine, print).find() == [mine]
    assert others.last_epoch == 0


def test_a_schedule_that_cannot_be_saved_is_reported_once():
    engine, notes = make_engine(), []
    mine = [WithLambda(engine.optimizer), SCHEDULES["multiplied"](engine.optimizer)]
    kept = Schedules(engine, notes.append)
    for _ in range(2):
        assert [state is None for state in kept.states()] == [True, False]
    assert len(notes) == 1
    assert "WithLambda is not saved" in notes[0]
    assert len(mine) == 2
