"""A real run of each kind of script on two CPU ranks: one dies, and the run goes on from its checkpoint.

A row is what a rank of the script has seen: DeepSpeed's engine, its samples, and the loss of the same few samples.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autods.rank.job import RunOrder
from autods.rank.record import RunResult
from autods.rank.training_run.checkpoints import list_checkpoints
from autods.runner.runner import RayRunner
from autods.system.host import read_hardware
from autods.types import Failed, ModelFacts, OutOfMemory
from autods.workload import make_source
from tests.support.fits import ignore
from tests.support.script_trials import a_trial
from tests.support.settings import fit_settings

SCRIPTS = Path(__file__).parent / "scripts_run"
SIZES = ("--batch_size", "{micro_batch_size}", "--accumulate", "{gradient_accumulation_steps}")
KINDS = {
    "deepspeed": "plain.py",
    "hf_trainer": "trainer.py",
    "accelerate": "accelerated.py",
    "lightning": "lit.py",
    "fabric": "with_fabric.py",
}
STEPS, GLOBAL_BATCH = 10, 8  # 64 samples: the second epoch begins after step 8
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}


class Runs:
    """Attempts of a run of one script. Each may divide the global batch in another way."""

    def __init__(self, runner: RayRunner, folder: Path) -> None:
        self.runner, self.folder = runner, folder

    def attempt(self, number: int, rung: str, micro_batch: int) -> RunResult | Failed | OutOfMemory:
        trial = a_trial(rung, micro_batch=micro_batch, accumulation=GLOBAL_BATCH // (micro_batch * 2))
        latest = list_checkpoints(self.folder / "checkpoints").latest
        order = RunOrder(
            folder=str(self.folder),
            attempt=number,
            steps=STEPS,
            checkpoint_every=4,
            restore=None if latest is None else str(latest.path),
        )
        job = self.runner.run_job(order, trial.rung, trial.knobs)
        job.write()
        return self.runner.run_attempt(job, lambda beat: None)


@contextlib.contextmanager
def open_runs(script: str, folder: Path) -> Iterator[Runs]:
    plain = script in ("plain.py", "partitioned.py")
    source = make_source(SCRIPTS / script, argv=("--deepspeed_config", "{ds_config}", *SIZES, "--log", str(folder)))
    settings = fit_settings(
        source, hardware=read_hardware(), out=folder / "fit", config="quick", gpus=2, device="cpu", gpu_memory="1GiB",
        base_config=ADAM if plain else None,
    )  # fmt: skip
    facts = ModelFacts(
        parameters=10_000, largest_parameter=2048, checkpointing=False, tokens_per_sample=None, has_optimizer=not plain
    )
    with RayRunner(settings, ignore) as runner:
        runner.adopt(facts)
        yield Runs(runner, folder)


@pytest.fixture(scope="module")
def runs(ray: object, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder of a run: rank 1 dies in step 7; another rung and micro batch go on."""

    @functools.cache
    def train(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        with open_runs(KINDS[kind], folder) as runs:
            killed = runs.attempt(1, "zero2", 2)
            assert isinstance(killed, Failed), killed
            assert "SIGKILL" in killed.evidence, killed
            for file in folder.glob("rank*.jsonl"):
                file.rename(file.with_suffix(".first"))
            done = runs.attempt(2, "ddp", 1)
            assert isinstance(done, RunResult), done
            assert (done.ended, done.step) == ("done", STEPS)
        return folder

    return train


def read_ranks(folder: Path, ending: str = "jsonl") -> list[list[dict[str, Any]]]:
    """The rows of each rank."""
    return [[json.loads(line) for line in (folder / f"rank{rank}.{ending}").open()] for rank in range(2)]


def read_samples(folder: Path, ending: str) -> dict[int, list[int]]:
    """The samples of each step, of both ranks."""
    steps: dict[int, list[int]] = {}
    for row in itertools.chain(*read_ranks(folder, ending)):
        steps.setdefault(row["step"], []).extend(row["samples"])
    return {step: sorted(samples) for step, samples in steps.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_trains_with_deepspeed_and_the_others(runs: Callable[[str], Path], kind: str) -> None:
    folder = runs(kind)
    first, second = read_ranks(folder)
    assert {row["engine"] for row in (*first, *second)} == {"DeepSpeedEngine"}
    assert [row["probe"] for row in first] == pytest.approx([row["probe"] for row in second], rel=1e-6)
    assert len({row["probe"] for row in first}) == STEPS - 4  # each step changes the weights


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_from_its_checkpoint(runs: Callable[[str], Path], kind: str) -> None:
    folder = runs(kind)
    assert [checkpoint.step for checkpoint in list_checkpoints(folder / "checkpoints").complete] == [8, 10]
    before, after = ({row["step"]: row["probe"] for row in read_ranks(folder, end)[0]} for end in ("first", "jsonl"))
    assert (min(before), min(after), max(after)) == (1, 5, STEPS)
    for step in (5, 6):  # the weights before these steps, in both attempts
        assert after[step] == pytest.approx(before[step], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_run_trains_on_the_same_samples(runs: Callable[[str], Path], kind: str) -> None:
    folder = runs(kind)
    before, after = read_samples(folder, "first"), read_samples(folder, "jsonl")
    assert {step: after[step] for step in (5, 6)} == {step: before[step] for step in (5, 6)}
    epoch = [sample for step in range(1, 9) for sample in (before if step < 5 else after)[step]]
    assert sorted(epoch) == list(range(64))
    assert after[9] != before[1]  # another order in the next epoch


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_run_draws_the_same_random_numbers(runs: Callable[[str], Path], kind: str) -> None:
    folder = runs(kind)
    before, after = ({row["step"]: row["random"] for row in read_ranks(folder, end)[0]} for end in ("first", "jsonl"))
    assert [after[step] for step in (5, 6)] == [before[step] for step in (5, 6)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_a_run_are_written_with_their_losses(runs: Callable[[str], Path], kind: str) -> None:
    lines = [json.loads(line) for line in (runs(kind) / "attempts" / "2" / "steps.jsonl").open()]
    assert [line["step"] for line in lines] == list(range(5, STEPS + 1))
    assert all(0 < line["loss"] < 10 for line in lines)
    assert [line["samples"] for line in lines] == [[8 * step, 8 * step + 8] for step in range(4, STEPS)]


def test_saving_by_lightning_prints_no_hint_of_its_own(runs: Callable[[str], Path]) -> None:
    assert "weights_only" not in (runs("lightning") / "attempts" / "2" / "ranks" / "rank0.log").read_text()


@pytest.mark.parametrize("script", ["partitioned.py", "partitioned_trainer.py"])
def test_a_script_splits_its_model_if_the_run_has_stage_3(ray: object, tmp_path: Path, script: str) -> None:
    with open_runs(script, tmp_path) as runs:
        for number, rung in enumerate(("zero3", "zero2"), start=1):
            done = runs.attempt(number, rung, 4)
            assert isinstance(done, RunResult), done
            assert (done.ended, done.step) == ("done", STEPS)
    for rank in range(2):
        in_parts, whole = (json.loads(line) for line in (tmp_path / f"build{rank}.jsonl").open())
        assert (in_parts["held"], in_parts["split"] > 0) == (0, True)
        assert (whole["held"] > 10_000, whole["split"]) == (True, 0)


def test_a_run_that_trains_without_deepspeed_fails(ray: object, tmp_path: Path) -> None:
    with open_runs("alone.py", tmp_path) as runs:
        outcome = runs.attempt(1, "zero2", 2)
    assert isinstance(outcome, Failed), outcome
    assert outcome.failure == "user_code"
    assert "it ended and never called deepspeed.initialize" in outcome.evidence


def test_a_trainer_that_is_asked_to_stop_saves_its_step(ray: object, tmp_path: Path) -> None:
    for name in ("stop", "killed"):
        (tmp_path / name).touch()
    with open_runs("lit.py", tmp_path) as runs:
        end = runs.attempt(1, "zero2", 2)
    assert isinstance(end, RunResult), end
    assert (end.ended, end.step is not None and end.step < STEPS) == ("stopped", True)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints").complete] == [end.step]
