"""A training run that is interrupted goes on as if it had not been: on another rung, micro batch or number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autods.config.deepspeed import start_settings
from autods.config.rungs import read_rungs
from autods.rank.training_run.checkpoints import checkpoint_folder, list_checkpoints
from autods.types import Knobs, ModelFacts
from tests.support.composed import compose_config
from tests.support.fits import HERE
from tests.support.run_jobs import read_samples, read_steps, run_job

BASE = {
    "optimizer": {"params": {"lr": 0.05}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.05, "total_num_steps": 14}},
    "gradient_clipping": 1.0,
}
FACTS = ModelFacts(
    parameters=500, largest_parameter=169, checkpointing=False, tokens_per_sample=None, has_optimizer=False
)
STEPS, GLOBAL_BATCH = 12, 8


def write_job(folder: Path, attempt: int, rung_name: str, micro_batch: int, ranks: int = 2, **more) -> str:
    """Write the job of an attempt; `restore` is the step of a checkpoint."""
    rung = read_rungs(())[rung_name]
    accumulation = GLOBAL_BATCH // (micro_batch * ranks)
    settings = start_settings(rung, base=BASE, device_bytes=2**30, facts=FACTS)
    knobs = Knobs(micro_batch=micro_batch, accumulation=accumulation, settings=settings)
    restore = more.pop("restore", None)
    job = run_job(
        folder,
        attempt,
        ds_config=compose_config(rung, knobs, base=BASE, world_size=ranks),
        micro_batch=micro_batch,
        accumulation=accumulation,
        ranks=ranks,
        checkpoint_every=2,
        seed=7,
        restore=None if restore is None else str(checkpoint_folder(folder / "checkpoints", restore)),
        **{"steps": STEPS, **more},
    )
    return str(job.write())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, rank_server):
    """A run without an interruption, one that is rescued twice, and one that is stopped; the last two go on alone."""
    top = tmp_path_factory.mktemp("runs")

    def train(jobs: list[str], ranks: int) -> None:
        script = HERE.parent / "support" / "train_attempts.py"
        done = rank_server.run(script, *jobs, folder=top, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]

    whole, rescued, stopped = top / "whole", top / "rescued", top / "stopped"
    jobs = [
        write_job(whole, 1, "zero2", 4),
        write_job(rescued, 1, "zero2", 4, steps=5),
        write_job(rescued, 2, "zero2", 2, steps=9, restore=4),
        write_job(rescued, 3, "zero3", 1, steps=11, restore=8),
        write_job(stopped, 1, "ddp", 4),
    ]
    (stopped / "stop").touch()
    train(jobs, ranks=2)
    (stopped / "stop").unlink()
    step = list_checkpoints(stopped / "checkpoints").latest.step
    alone = [
        write_job(rescued, 4, "zero1", 4, ranks=1, restore=10),
        write_job(stopped, 2, "zero3", 4, ranks=1, restore=step),
    ]
    train(alone, ranks=1)
    return whole, rescued, stopped


@pytest.mark.parametrize("run", ["rescued", "stopped"])
def test_losses_are_those_of_a_run_without_interruption(folders, run):
    whole, interrupted = read_steps(folders[0]), read_steps(folders[0].parent / run)
    assert list(interrupted) == list(whole) == list(range(1, STEPS + 1))
    losses = [line["loss"] for line in interrupted.values()]
    assert losses == pytest.approx([line["loss"] for line in whole.values()], rel=1e-5)


def test_each_step_sees_the_same_samples_on_any_division(folders):
    whole, rescued = read_samples(folders[0]), read_samples(folders[1])
    assert whole == rescued
    assert list(whole) == list(range(1, STEPS + 1))


def test_state_and_buffers_go_on_through_every_rescue(folders):
    _, rescued, _ = folders
    end = json.loads((rescued / "attempts" / "4" / "end.json").read_text())
    assert end["attempts"] == [1, 2, 3, 4]
    assert end["ended"] == "done"
    # Forwards by rank: 4 steps of one micro batch, 4 of two, 2 of four, 2 of two.
    assert end["forwards"] == 4 * 1 + 4 * 2 + 2 * 4 + 2 * 2


def test_a_run_that_is_asked_to_stop_saves_its_step(folders):
    _, _, stopped = folders
    end = json.loads((stopped / "attempts" / "1" / "end.json").read_text())
    assert end["ended"] == "stopped"
    assert end["step"] < STEPS
    assert f"step-{end['step']:08d}" in read_restored(stopped, 2)


def read_restored(folder: Path, attempt: int) -> str:
    return json.loads((folder / "attempts" / str(attempt) / "job.json").read_text())["order"]["restore"]


def test_only_the_last_two_checkpoints_are_kept(folders):
    whole, *_ = folders
    listed = list_checkpoints(whole / "checkpoints")
    assert [checkpoint.step for checkpoint in listed.complete] == [10, 12]
    assert not listed.torn
