"""Optimizer steps are seen whichever way a script takes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autods.trial.job import RankJob
from autods.trial.script.engine_hooks import watch
from autods.trial.script.session import Session
from autods.types import WorkloadSource
from autods.workload import WorkloadError


class Optimizer:
    steps = 0

    def step(self):
        self.steps += 1


class Engine:
    """Of DeepSpeed, as far as it is watched; it steps its optimizer at each boundary."""

    training = True

    def __init__(self, accumulation=1):
        self.optimizer, self.accumulation, self.done = Optimizer(), accumulation, 0

    def is_gradient_accumulation_boundary(self):
        return (self.done + 1) % self.accumulation == 0

    def forward(self, x):
        return x

    def backward(self, loss):
        return loss

    def train(self, mode=True):
        self.training = mode

    def step(self):
        if self.is_gradient_accumulation_boundary():
            self.optimizer.step()
        self.done += 1


class Seen(Session):
    """A session that only notes the boundaries."""

    def stepped(self, *, boundary):
        self._backwards = 0
        self.stood_in.append(str(boundary))


def watched(engine, **said):
    source = WorkloadSource(kind="script", path="/train.py", name="train", digest="")
    job = RankJob(job="train", source=source, device="cpu", folder="/f", scratch="/s", ds_config={}, **said)
    session = Seen(job=job, slot=0, observer=lambda phase, step: None, leave=pytest.fail)
    watch(engine, session)
    return session


def test_a_step_of_the_engine_is_seen_once_though_it_steps_its_optimizer():
    engine = Engine(accumulation=2)
    session = watched(engine)
    for _ in range(4):
        engine.step()
    assert session.stood_in == ["False", "True", "False", "True"]
    assert engine.optimizer.steps == 2


def test_a_step_of_the_optimizer_alone_is_one_too():
    engine = Engine()
    session = watched(engine)
    engine.optimizer.step()
    assert session.stood_in == ["True"]
    assert engine.optimizer.steps == 1


def test_an_optimizers_step_stays_a_method_which_schedulers_wrap():
    engine = Engine()
    watched(engine)
    assert engine.optimizer.step.__func__ is not Optimizer.step
    assert engine.optimizer.step.__self__ is engine.optimizer


def test_a_script_that_never_steps_is_told_so():
    engine = Engine()
    watched(engine, accumulation=2)
    for _ in range(512):
        engine.backward(SimpleNamespace())
    with pytest.raises(WorkloadError, match="called the engine's backward 513 times and never its step"):
        engine.backward(SimpleNamespace())


def test_a_script_that_accumulates_by_itself_is_let_through():
    engine = Engine()
    session = watched(engine)
    for _ in range(3):
        for _ in range(200):
            engine.backward(SimpleNamespace())
        engine.step()
    assert session.stood_in == ["True"] * 3
