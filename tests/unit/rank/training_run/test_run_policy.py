"""A script in a run: what it hears without a session, and what the run does with the Trainer's checkpoints."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autods.rank.script.adapters.hf_trainer import FOLDER, HfTrainerLoop
from autods.rank.training_run import session as sessions
from autods.rank.training_run.checkpoints import (
    STATE,
    Layout,
    Manifest,
    checkpoint_folder,
    list_checkpoints,
    list_files,
    remove_checkpoint,
    write_manifest,
)
from autods.rank.training_run.run_policy import LoopSession, RunPolicy
from autods.workload import WorkloadError
from tests.support.run_jobs import run_job


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """The policy of rank 0 in a process that has no session."""
    monkeypatch.setattr(sessions, "current", None)
    monkeypatch.setenv("RANK", "0")
    return RunPolicy(run_job(tmp_path, steps=None, checkpoint_every=1), lambda phase, step: None)


def test_a_script_without_a_session_hears_of_it_once(policy, capsys):
    for _ in range(3):
        policy.end_step(boundary=True)
    assert capsys.readouterr().err.count("calls no autods.session(engine)") == 1


def test_a_script_with_a_session_hears_nothing(policy, capsys):
    sessions.current = SimpleNamespace()
    policy.end_step(boundary=True)
    assert capsys.readouterr().err == ""


def test_an_engine_of_one_rank_alone_is_refused(policy):
    policy.start_training(SimpleNamespace(world_size=1))
    policy.job = replace(policy.job, world_size=2)
    with pytest.raises(WorkloadError, match="its engine has 1 ranks, and the run has 2"):
        policy.start_training(SimpleNamespace(world_size=1))


def test_a_run_lets_its_script_save_the_whole_model(policy):
    gather = "stage3_gather_16bit_weights_on_model_save"
    assert policy.adapt_config({"zero_optimization": {"stage": 3}})["zero_optimization"] == {"stage": 3, gather: True}
    refused = {"zero_optimization": {"stage": 3, gather: False}}
    assert policy.adapt_config(refused) == refused


def test_a_run_without_a_step_of_deepspeed_fails(policy):
    with pytest.raises(WorkloadError, match=r"it ended and never called deepspeed\.initialize"):
        policy.conclude()
    policy.start_training(engine := SimpleNamespace(world_size=1, global_steps=0))
    with pytest.raises(WorkloadError, match=r"the engine of deepspeed\.initialize has done no step"):
        policy.conclude()
    engine.global_steps = 1
    policy.conclude()


def test_an_accelerator_without_deepspeed_is_explained(policy):
    policy.job = replace(policy.job, source=replace(policy.job.source, script_kind="accelerate"))
    with pytest.raises(WorkloadError) as caught:
        policy.conclude()
    assert "cpu=True" in caught.value.hint


def test_the_last_step_is_saved_before_the_ranks_part(policy):
    finished = []
    sessions.current = SimpleNamespace(finish=lambda: finished.append(True))
    policy.leave_group()
    assert finished == [True]
    with contextlib.suppress(RuntimeError):
        try:
            raise RuntimeError("this rank alone ends")
        finally:
            policy.leave_group()
    assert finished == [True]


def test_callbacks_after_a_step_may_take_long(tmp_path):
    phases = []
    session = LoopSession.__new__(LoopSession)
    session.loop, session.observer = SimpleNamespace(step=1, last_step=3), lambda phase, step: phases.append(phase)
    session._order = run_job(tmp_path, steps=None, checkpoint_every=1).order
    session._seen_step, session._note_step = 0, lambda: None
    session.report_step(2.5)
    assert phases == ["step", "script"]  # silence has no limit in the last


def save(folder, step, *, extra=False):
    """A complete checkpoint of a run, with the Trainer's folder beside."""
    own = folder / "saved" / f"checkpoint-{step}"
    (own / f"global_step{step}").mkdir(parents=True)
    (own / f"global_step{step}" / "states.pt").write_text("states")
    (own / "trainer_state.json").write_text("{}")
    checkpoint = checkpoint_folder(folder / "checkpoints", step)
    checkpoint.mkdir(parents=True)
    os.symlink(own, checkpoint / FOLDER)
    os.symlink(f"{FOLDER}/global_step{step}", checkpoint / STATE)
    if extra:
        (checkpoint / "extra").touch()
    manifest = Manifest(
        step=step, samples=step, global_batch=1, seed=0, layout=Layout(stage=2, world_size=1), optimizer="AdamW",
        files=list_files(checkpoint),
    )  # fmt: skip
    write_manifest(checkpoint, manifest)
    return checkpoint


def test_files_behind_links_count_once_and_tear(tmp_path):
    checkpoint = save(tmp_path, 3)
    (complete,) = list_checkpoints(tmp_path / "checkpoints").complete
    assert complete.size_bytes == len("states") + len("{}")
    ((checkpoint / FOLDER) / "trainer_state.json").unlink()
    assert not list_checkpoints(tmp_path / "checkpoints").complete


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("ranks/rank00000.pt", True),
        ("state/mp_rank_00_model_states.pt", True),
        ("trainer/global_step3/mp_rank_00_model_states.pt", True),
        ("trainer/trainer_state.json", True),
        ("trainer/pytorch_model.bin", False),  # well-known callbacks for adapters remove it
        ("trainer/tokenizer/vocab.json", False),
    ],
)
def test_the_trainer_s_weights_are_the_script_s(name, needed):
    assert HfTrainerLoop(None).goes_on_from(name) is needed


def test_removing_a_checkpoint_leaves_the_trainer_s_folder(tmp_path):
    remove_checkpoint(save(tmp_path, 3))
    assert (tmp_path / "saved" / "checkpoint-3" / "global_step3" / "states.pt").exists()


def make_session(folder, best=None):
    """A session without an engine: what removes old checkpoints."""
    session = LoopSession.__new__(LoopSession)
    session.loop = HfTrainerLoop(None)
    session.loop.trainer = SimpleNamespace(state=SimpleNamespace(best_model_checkpoint=best))
    return session, run_job(folder, steps=None, checkpoint_every=1).order


def test_the_script_s_own_checkpoints_stay_and_extra_ones_go(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, extra=step % 2 == 0)
    session, order = make_session(tmp_path, best=str(tmp_path / "saved" / "checkpoint-1"))
    session._remove_old(order)
    assert sorted(path.name[-1] for path in (tmp_path / "saved").iterdir()) == ["1", "3", "4", "5"]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints").complete] == [1, 4, 5]


def test_room_is_made_on_the_trainer_s_disk_and_its_best_stays(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step, extra=True)
    session, order = make_session(tmp_path, best=str(tmp_path / "saved" / "checkpoint-1"))
    session.loop.trainer._get_output_dir = lambda trial: str(tmp_path / "saved")
    disks = []
    monkeypatch.setattr(sessions, "find_lack", lambda folder, size: disks.append(folder) or "it is full")
    assert session._make_room(order) == "it is full"
    assert set(disks) == {tmp_path / "saved"}
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints").complete] == [1, 3]
    assert (tmp_path / "saved" / "checkpoint-1").exists()


def test_what_the_trainer_rotates_away_is_no_checkpoint(tmp_path):
    save(tmp_path, 1), save(tmp_path, 2)
    session, order = make_session(tmp_path)
    session.loop.rotations.append(lambda: (tmp_path / "saved/checkpoint-1/trainer_state.json").unlink())
    session._remove_old(order)
    listed = list_checkpoints(tmp_path / "checkpoints")
    assert [checkpoint.step for checkpoint in listed.complete] == [2]
    assert not listed.torn
