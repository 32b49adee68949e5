"""A training run of an unmodified script of the HF Trainer goes on as if nothing had ended it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from autods.rank.training_run.checkpoints import list_checkpoints
from tests.support.fits import HERE
from tests.support.run_jobs import read_samples, read_steps, run_job

SCRIPT = HERE / "scripts_hf" / "trainer.py"
STEPS, GLOBAL_BATCH = 11, 64  # 512 samples: the second epoch begins after step 8
# The script's sizes are those of nobody's job.
ARGUMENTS = [
    "--deepspeed", json.dumps({"zero_optimization": {"stage": 2}}), "--use_cpu", "--max_steps", str(STEPS),
    "--learning_rate", "1e-3", "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "True",
    "--logging_steps", "1",
]  # fmt: skip


def write_job(folder: Path, attempt: int, stage: int, micro_batch: int, *, ranks: int = 2, **more) -> str:
    latest = list_checkpoints(folder / "checkpoints").latest
    accumulation = GLOBAL_BATCH // (micro_batch * ranks)
    sizes = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}
    job = run_job(
        folder,
        attempt,
        ds_config={**sizes, "zero_optimization": {"stage": stage}},
        micro_batch=micro_batch,
        accumulation=accumulation,
        ranks=ranks,
        steps=None,
        restore=None if latest is None else str(latest.path),
        **{"checkpoint_every": 3, **more},
    )
    return str(job.write())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, rank_server):
    """A run of one rank without interruption; one of two ranks that is killed and goes on alone, on another rung."""
    top = tmp_path_factory.mktemp("runs")
    whole, broken = top / "whole", top / "broken"

    def train(job: str, *, ranks: int = 2, kill_step: int = 0) -> subprocess.CompletedProcess[str]:
        saved = Path(job).parents[2] / "saved"
        arguments = (kill_step, SCRIPT, *ARGUMENTS, "--output_dir", saved)
        script = HERE.parent / "support" / "train_trainer.py"
        return rank_server.run(script, *arguments, folder=top, ranks=ranks, environment={"AUTODS_RUN": job})

    done = train(write_job(whole, 1, 2, 32, ranks=1, checkpoint_every=100), ranks=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert train(write_job(broken, 1, 2, 32), kill_step=8).returncode != 0
    job = write_job(broken, 2, 3, 16, ranks=1)
    assert json.loads(Path(job).read_text())["order"]["restore"].endswith("6")
    done = train(job, ranks=1)
    assert done.returncode == 0, done.stderr[-3000:]
    return whole, broken


def test_each_step_trains_on_the_same_samples(folders):
    whole, broken = map(read_samples, folders)
    assert whole == broken
    assert list(whole) == list(range(1, STEPS + 1))
    assert {len(samples) for samples in whole.values()} == {GLOBAL_BATCH}


def test_losses_are_those_of_a_run_without_interruption(folders):
    whole, broken = map(read_steps, folders)
    assert list(whole) == list(broken) == list(range(1, STEPS + 1))
    assert all(line["loss"] > 1 for line in whole.values())
    assert [line["loss"] for line in broken.values()] == pytest.approx(
        [line["loss"] for line in whole.values()], rel=1e-4
    )


def test_the_trainer_s_own_checkpoints_are_the_run_s(folders):
    _, broken = folders
    listed = list_checkpoints(broken / "checkpoints")
    assert [checkpoint.step for checkpoint in listed.complete] == [9, 11]
    assert not listed.torn
    assert sorted(folder.name for folder in (broken / "saved").glob("checkpoint-*")) == [
        "checkpoint-11",
        "checkpoint-9",
    ]
    end = json.loads((broken / "attempts" / "2" / "end.json").read_text())
    assert end == {"ended": "done", "step": STEPS}
