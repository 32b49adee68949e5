"""What a run does with the Trainer's samples and checkpoints, without a Trainer."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

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
from autods.rank.training_run.hf_trainer import TRAINER, TrainerSession, WholeSteps, find_trainer_folder
from tests.support.run_jobs import run_job


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


def test_a_step_s_digest_is_of_its_samples():
    sampler = WholeSteps(SequentialSampler(range(20)), global_batch=8, drop_last=False, seed=0)
    list(sampler)
    assert sampler.list_samples(2) == sampler.list_samples(5) == list(range(8, 16))
    assert sampler.list_samples(3) == [16, 17, 18, 19, 0, 1, 2, 3]


def save(folder, step, *, extra=False):
    """A complete checkpoint of a run, with the Trainer's folder beside."""
    own = folder / "saved" / f"checkpoint-{step}"
    (own / f"global_step{step}").mkdir(parents=True)
    (own / f"global_step{step}" / "states.pt").write_text("states")
    (own / "trainer_state.json").write_text("{}")
    checkpoint = checkpoint_folder(folder / "checkpoints", step)
    checkpoint.mkdir(parents=True)
    os.symlink(own, checkpoint / TRAINER)
    os.symlink(f"{TRAINER}/global_step{step}", checkpoint / STATE)
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
    (find_trainer_folder(checkpoint) / "trainer_state.json").unlink()
    assert not list_checkpoints(tmp_path / "checkpoints").complete


def test_removing_a_checkpoint_leaves_the_trainer_s_folder(tmp_path):
    remove_checkpoint(save(tmp_path, 3))
    assert (tmp_path / "saved" / "checkpoint-3" / "global_step3" / "states.pt").exists()


def make_session(folder, best=None):
    """A session without an engine: what removes old checkpoints."""
    session = TrainerSession.__new__(TrainerSession)
    session.trainer = SimpleNamespace(state=SimpleNamespace(best_model_checkpoint=best))
    session.rotations = []
    return session, run_job(folder, steps=None, checkpoint_every=1).order


def test_the_script_s_own_checkpoints_stay_and_extra_ones_go(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, extra=step % 2 == 0)
    session, order = make_session(tmp_path, best=str(tmp_path / "saved" / "checkpoint-1"))
    session._remove_old(order)
    assert sorted(path.name[-1] for path in (tmp_path / "saved").iterdir()) == ["1", "3", "4", "5"]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints").complete] == [1, 4, 5]


def test_what_the_trainer_rotates_away_is_no_checkpoint(tmp_path):
    save(tmp_path, 1), save(tmp_path, 2)
    session, order = make_session(tmp_path)
    session.rotations.append(lambda: (tmp_path / "saved/checkpoint-1/trainer_state.json").unlink())
    session._remove_old(order)
    listed = list_checkpoints(tmp_path / "checkpoints")
    assert [checkpoint.step for checkpoint in listed.complete] == [2]
    assert not listed.torn
