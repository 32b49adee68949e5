"""The Trainer's loop as a run sees it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

from autods.rank.script.adapters.hf_trainer import HfTrainerLoop, _set_arguments, train_from_start
from tests.support.script_trials import script_job


def _call_ours(ours: Any) -> Any:
    return lambda trainer, loss: ours(trainer, loss)


@pytest.mark.parametrize("calls_ours", [False, True])
def test_a_run_follows_a_method_that_the_script_replaced(monkeypatch: pytest.MonkeyPatch, calls_ours: bool) -> None:
    for name, value in list(vars(Trainer).items()):
        monkeypatch.setattr(Trainer, name, value) if callable(value) else None  # put back at the end
    monkeypatch.setattr("transformers.trainer.deepspeed_load_checkpoint", None)
    monkeypatch.setattr("transformers.trainer.rotate_checkpoints", None)
    monkeypatch.setattr(Trainer, "_maybe_log_save_evaluate", lambda trainer, loss: steps.append("logged"))
    steps: list[str] = []
    session = SimpleNamespace(report_step=lambda loss: steps.append("done"), end_loop_step=lambda: None)
    loop = HfTrainerLoop(SimpleNamespace(session=session, begin_loop=lambda loop: None))  # type: ignore[arg-type]
    loop.install()
    ours = Trainer._maybe_log_save_evaluate
    replaced = _call_ours(ours) if calls_ours else lambda trainer, loss: steps.append("logged")
    monkeypatch.setattr(Trainer, "_maybe_log_save_evaluate", replaced)
    trainer = Trainer.__new__(Trainer)
    trainer.args, trainer.optimizer, trainer.lr_scheduler = (
        SimpleNamespace(deepspeed="x", save_total_limit=None),
        None,
        None,
    )
    loop.train(lambda trainer, checkpoint: trainer._maybe_log_save_evaluate(torch.ones(())), trainer)
    assert steps == ["done", "logged"]


@pytest.mark.parametrize(("optimizer", "schedule", "notes"), [(None, None, 0), ("SGD", None, 1), ("SGD", "cosine", 1)])
def test_an_optimizer_that_the_trainer_drops_is_reported(optimizer: Any, schedule: Any, notes: int) -> None:
    noted: list[str] = []
    loop = HfTrainerLoop(SimpleNamespace(note=noted.append, begin_loop=lambda loop: None))  # type: ignore[arg-type]
    loop._wrappers["_maybe_log_save_evaluate"] = lambda *call: None
    trainer = Trainer.__new__(Trainer)
    trainer.args, trainer.optimizer, trainer.lr_scheduler = (
        SimpleNamespace(deepspeed="x", save_total_limit=None),
        optimizer,
        schedule,
    )
    loop.train(lambda trainer, checkpoint: None, trainer)
    assert len(noted) == notes
    told: list[str] = []  # to a fit
    train_from_start(told, lambda trainer, checkpoint: None, trainer, "last")
    assert [f"warning: {text}" for text in told] == noted


@pytest.mark.parametrize(
    ("limit", "metric", "kept"), [(1, "loss", 2), (1, None, 1), (3, "loss", 3), (None, "loss", None)]
)
def test_the_last_checkpoint_stays_beside_the_best(limit: int | None, metric: str | None, kept: int | None) -> None:
    loop = HfTrainerLoop(SimpleNamespace(begin_loop=lambda loop: None))  # type: ignore[arg-type]
    loop._wrappers["_maybe_log_save_evaluate"] = lambda *call: None
    trainer = Trainer.__new__(Trainer)
    trainer.args = SimpleNamespace(deepspeed="x", save_total_limit=limit, metric_for_best_model=metric)
    trainer.optimizer = trainer.lr_scheduler = None
    loop.train(lambda trainer, checkpoint: None, trainer)
    assert trainer.args.save_total_limit == kept


@pytest.mark.parametrize("config", [None, {"zero_optimization": {"stage": 2}}])
def test_sigterm_is_left_to_the_command(config: Any) -> None:
    job = script_job(ds_config={}, micro_batch=1, accumulation=1)
    injection: Any = SimpleNamespace(job=job, policy=SimpleNamespace(host=None, loads_in_ranks=False), stand_ins=[])
    arguments = SimpleNamespace(
        deepspeed=config,
        use_cpu=True,
        enable_jit_checkpoint=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
    )
    _set_arguments(injection, lambda arguments: None, arguments)
    assert not arguments.enable_jit_checkpoint


@pytest.mark.parametrize("how", ["path", True])
@pytest.mark.parametrize("older", [False, True])
def test_a_script_resumes_from_no_torn_checkpoint(tmp_path: Path, how: Any, older: bool) -> None:
    torn, whole = tmp_path / "checkpoint-20", tmp_path / "checkpoint-10"
    torn.mkdir()
    (torn / ".autods-unfinished").touch()  # an attempt was killed in its first save
    if older:
        whole.mkdir()  # of a training before the run
    loop = HfTrainerLoop(SimpleNamespace(begin_loop=lambda loop: loop.clean()))  # type: ignore[arg-type]
    loop._wrappers["_maybe_log_save_evaluate"] = lambda *call: None
    trainer = Trainer.__new__(Trainer)
    trainer.args = SimpleNamespace(deepspeed="x", save_total_limit=None, process_index=0, output_dir=str(tmp_path))
    trainer.optimizer = trainer.lr_scheduler = None
    resumed: list[Any] = []
    loop.train(lambda trainer, start: resumed.append(start), trainer, str(torn) if how == "path" else how)
    assert resumed == [str(whole) if older else None]
    assert not torn.exists()
