"""A made-up trainer is served by one new module, its adapter: in a trial and in a real run."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from autods.config.trainers import SCRIPT_KINDS, ScriptKind, find_library
from autods.rank.distributed import Traffic
from autods.rank.memory import Meter
from autods.rank.patching import declare
from autods.rank.script import inject
from autods.rank.script.adapters.deepspeed import watch_engine
from autods.rank.script.engine_config import EngineConfig, LibraryConfig
from autods.rank.script.policy import Policy, TrainerLoop
from autods.rank.script.trial_policy import TrialPolicy
from autods.rank.training_run import session as sessions
from autods.rank.training_run.checkpoints import list_checkpoints
from autods.rank.training_run.run_policy import RunPolicy
from autods.types import Steps
from autods.workload import make_source
from tests.support.run_jobs import run_job
from tests.support.script_trials import Left, leave, script_job


class Engine:
    """What is called of DeepSpeed's engine. Its loss is the number of its step."""

    world_size, data_parallel_group = 1, None
    training = True

    def __init__(self, config: Any) -> None:
        self._config = SimpleNamespace(_param_dict=config, world_size=1)
        self.global_steps, self.module = 0, torch.nn.Linear(1, 1)
        self.optimizer = self.basic_optimizer = SimpleNamespace(overflow=False, param_groups=[], state={})

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.tensor(float(self.global_steps + 1))

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None:
        self.global_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def train_micro_batch_size_per_gpu(self) -> int:
        return 2

    def gradient_accumulation_steps(self) -> int:
        return 1

    def zero_optimization_stage(self) -> int:
        return 0

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        Path(folder, "weights").write_text(str(self.global_steps))


class Trainer:
    """The made-up trainer: it makes its engine of its config, and owns its loop."""

    def __init__(self, config: Any, make_engine: Any) -> None:
        self.config, self.make_engine, self.saved, self.stops = config, make_engine, [], False

    def fit(self, steps: int, start: Path | None = None) -> None:
        self.engine = self.make_engine(self.config)
        while self.engine.global_steps < steps and not self.stops:
            loss = self.engine.forward(torch.ones(2, 3))
            self.engine.backward(loss)
            self.engine.step()
            self.after_step()

    def after_step(self) -> None:
        self.save()

    def save(self) -> None:
        self.saved.append(self.engine.global_steps)


class Loop(TrainerLoop):
    def __init__(self, host: RunPolicy) -> None:
        self.host, self.trainer = host, SimpleNamespace()

    def end(self) -> None:
        self.trainer.stops = True

    @property
    def ends(self) -> bool:
        return bool(self.trainer.stops)

    def fit(self, original: Any, trainer: Any, /, steps: int) -> None:
        self.trainer = trainer
        original(trainer, steps, self.host.begin_loop(self))

    def after_step(self, original: Any, trainer: Any, /) -> None:
        self.host.session.report_step()
        original(trainer)
        self.host.session.end_loop_step()


def install(injection: inject.Injection) -> None:
    """All that the adapter of this trainer has."""
    config = injection.config = LibraryConfig(injection.job)
    symbol = f"{__name__}.Trainer"

    def replace_config(original: Any, trainer: Any, /, given: Any, *args: Any) -> None:
        original(trainer, config.replace(given), *args)

    declare(f"{symbol}.__init__", "the trainer gets the chosen config").wrap(replace_config)
    injection.skip(symbol, "save")
    if injection.policy.host is not None:
        loop = Loop(injection.policy.host)
        declare(f"{symbol}.fit", "a run begins").wrap(loop.fit)
        declare(f"{symbol}.after_step", "a step of a run ends").wrap(loop.after_step)


class Observer:
    """What a policy uses of `worker.Observer`."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.meter = Meter()
        self.meter.device_peak = lambda: 0  # type: ignore[method-assign]

    def __call__(self, phase: str, step: int) -> None:
        self.phases.append(phase)

    touch = __call__


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that trains five steps under a policy, as DeepSpeed's adapter and the trainer's let it."""
    row = ScriptKind(name="toy", description="a script of a toy", packages=("toytrainer",), names="Trainer")
    monkeypatch.setitem(SCRIPT_KINDS, "toy", row)  # type: ignore[arg-type]
    toy = ModuleType("toy")
    toy.install = install  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autods.rank.script.adapters.toy", toy)
    monkeypatch.setattr("autods.rank.script.adapters.deepspeed.install", lambda injection: None)
    for name in ("__init__", "fit", "after_step", "save"):
        monkeypatch.setattr(Trainer, name, getattr(Trainer, name))
    monkeypatch.setattr(sessions, "current", None)
    for name in ("listen", "begin", "end"):
        monkeypatch.setattr(Traffic, name, lambda self: None)

    def run(policy: Policy) -> Trainer:
        inject.install_adapters(
            inject.Injection(job=policy.job, slot=0, policy=policy, config=EngineConfig(policy.job))
        )

        def make_engine(config: Any) -> Engine:
            engine = Engine(config)
            policy.start_training(engine)
            watch_engine(engine, policy)
            return engine

        trainer = Trainer({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}, make_engine)
        with contextlib.suppress(Left, *policy.ends):
            trainer.fit(5)
        return trainer

    return run


def test_a_script_is_of_the_new_kind_by_its_imports(train: Any, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("from toytrainer import Trainer\n")
    assert find_library(make_source(script, argv=("--x",))) == SCRIPT_KINDS["toy"]


def toy_job(**fields: Any) -> Any:
    job = script_job(ds_config={"zero_optimization": {"stage": 1}}, micro_batch=2, **fields)
    return replace(job, source=replace(job.source, script_kind="toy"))


class Saver:
    """A library's class that saves into a folder."""

    def save(self, folder: str | None = None) -> None:
        raise AssertionError("it is skipped")


def test_a_skipped_save_makes_the_folder_that_it_would(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Saver, "save", Saver.save)  # set back after the test
    phases: list[str] = []
    policy: Any = SimpleNamespace(host=None, begin_skipped=phases.append)
    job: Any = None
    inject.Injection(job=job, slot=0, policy=policy, config=job).skip(f"{__name__}.Saver", "save", folder="folder")
    saver: Any = Saver()
    saved = saver.save(tmp_path / "step" / "5")
    (saved / "meta.json").write_text("{}")
    assert saver.save() is None
    assert phases == ["save", "save"]


def test_a_trial_ends_a_new_trainer_after_its_steps(train: Any) -> None:
    policy = TrialPolicy(toy_job(steps=Steps(warmup=1, timed=2, most_timed=2)), 0, Observer(), leave)
    trainer = train(policy)
    assert trainer.config == {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    assert (policy.step, trainer.saved) == (3, [])
    assert policy.result().losses == (1.0, 2.0, 3.0)


def test_a_run_saves_a_new_trainer_and_ends_it(train: Any, tmp_path: Path, capsys: Any) -> None:
    job = run_job(tmp_path, ds_config={"zero_optimization": {"stage": 1}}, micro_batch=2, steps=4, checkpoint_every=2)
    job.write()
    order, source = job.order, replace(job.source, script_kind="toy")
    assert order is not None
    policy = RunPolicy(replace(job, source=source), observer := Observer())
    trainer = train(policy)
    assert trainer.config == {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    assert trainer.saved == [1, 2, 3, 4]
    assert [checkpoint.step for checkpoint in list_checkpoints(order.checkpoints).complete] == [2, 4]
    lines = [json.loads(line) for line in order.steps_file.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(step, step) for step in range(1, 5)]
    assert {"forward", "backward", "step", "save"} <= set(observer.phases)
    assert capsys.readouterr().err == ""
