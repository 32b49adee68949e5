"""`autods run` on real ranks: memory runs out in the middle, and the run goes on or gives up; a bug ends it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.run_jobs import read_steps

GROWS = Path(__file__).parent / "workloads" / "longer_and_longer.py"
STEPS, GLOBAL_BATCH = 12, 8
MEMORY = "104MiB"


def train(workload: Path, out: Path, gpu_memory: str, *options: str) -> subprocess.CompletedProcess[str]:
    ladder = ("--gpu-memory", gpu_memory, "--ladder", "zero2,zero3", "--config", "quick", "--no-forecast")
    # Many processors multiply bf16 numbers fifty times slower than fp32.
    ranks = ("--device", "cpu", "--gpus", "2", "--precision", "fp32", *ladder, *options)
    batch = ("--global-batch", str(GLOBAL_BATCH), "--steps", str(STEPS), "--checkpoint-every", "2")
    command = (sys.executable, "-m", "autods", "run", str(workload), *ranks, *batch, "--out", str(out))
    return subprocess.run(command, cwd=out.parent, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A run whose samples outgrow the memory of its config, and one with room for them.

    Micro batch 4 needs 51 to 68 MiB before the samples grow and 122 MiB then. Half of it needs 89 MiB then.
    """
    top = tmp_path_factory.mktemp("runs")
    logs = {"csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "one"}}
    (top / "ds.json").write_text(json.dumps(logs))
    for name, memory in (("rescued", MEMORY), ("reference", "512MiB")):
        options = ("--base-config", str(top / "ds.json")) if name == "rescued" else ()
        done = train(GROWS, top / name, memory, "--data", "1280", *options)
        assert done.returncode == 0, done.stderr[-3000:]
        (top / f"{name}.log").write_text(done.stderr)
    return {name: top / name for name in ("rescued", "reference")}


def of_fit(run: Path) -> tuple[str, ...]:
    """The options that take the fit of another run."""
    return "--fit", str(run / "fit"), "--base-config", str(run.parent / "ds.json")


def test_a_run_that_ran_out_of_memory_goes_on_to_its_end(runs: Mapping[str, Path]) -> None:
    report = json.loads((runs["rescued"] / "run.json").read_text())
    assert (report["status"], report["step"], report["rescues"] >= 1) == ("done", STEPS, True)
    first, last = report["attempts"][0], report["attempts"][-1]
    assert "out of memory on device" in first["evidence"]
    assert last["micro_batch"] < first["micro_batch"]
    for attempt in report["attempts"]:
        samples = attempt["micro_batch"] * attempt["accumulation"] * attempt["world_size"]
        assert samples == GLOBAL_BATCH
    assert json.loads((runs["reference"] / "run.json").read_text())["rescues"] == 0


def test_a_run_trains_on_the_ray_and_the_zygotes_of_its_fit(runs: Mapping[str, Path]) -> None:
    for out in runs.values():
        assert out.with_suffix(".log").read_text().count("starting Ray") == 1


def test_a_monitor_goes_on_after_a_rescue(runs: Mapping[str, Path]) -> None:
    """It counts samples, in the folder where the command was given, and trials write nothing there."""
    (log,) = (runs["rescued"].parent / "csv" / "one").glob("*lr.csv")
    lines = log.read_text().splitlines()
    samples = [int(line.split(",")[0]) for line in lines if not line.startswith("step")]
    assert sorted(set(samples)) == [GLOBAL_BATCH * (step + 1) for step in range(STEPS)]
    assert samples[-1] == GLOBAL_BATCH * STEPS
    assert lines.count("step,lr") >= 2  # of the attempt before the rescue, and of the last one


def test_a_rescued_run_sees_the_samples_of_a_whole_one(runs: Mapping[str, Path]) -> None:
    rescued, reference = (read_steps(runs[name]) for name in ("rescued", "reference"))
    assert sorted(rescued) == sorted(reference) == list(range(1, STEPS + 1))
    for step, row in reference.items():
        assert rescued[step]["samples"] == row["samples"] == [(step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH]


def test_a_rescued_run_has_the_losses_of_a_whole_one(runs: Mapping[str, Path]) -> None:
    rescued, reference = (read_steps(runs[name]) for name in ("rescued", "reference"))
    for step, row in reference.items():
        assert rescued[step]["loss"] == pytest.approx(row["loss"], rel=1e-4)


def test_samples_that_no_config_holds_end_the_run(runs: Mapping[str, Path], tmp_path: Path) -> None:
    """A sample of 200,000 tokens needs 195 MiB for its embedding alone; zero3 goes on from a checkpoint of zero2."""
    fit = runs["rescued"] / "fit"
    asked = ("--fit", str(fit), "--base-config", str(fit.parents[1] / "ds.json"))
    done = train(GROWS, tmp_path / "out", MEMORY, "--data", "200000", *asked)
    assert done.returncode == 1, done.stderr[-3000:]
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    tried = [(attempt["rung"], attempt["micro_batch"]) for attempt in report["attempts"]]
    assert tried[0] == ("zero2", 4)
    assert tried[-1] == ("zero3", 1)
    assert len(set(tried)) == len(tried) <= 6  # micro batches 4, 2 and 1 of two rungs
    assert {attempt["last_step"] for attempt in report["attempts"]} == {6}
    assert report["step"] == 6
    assert "no leaner config is left: zero3, 1 × 4 × 2 lacked" in report["reason"]
    assert "shorten the longest samples" in report["advice"]


def test_a_bug_of_the_users_ends_the_run_at_once(runs: Mapping[str, Path], tmp_path: Path) -> None:
    fit = runs["rescued"] / "fit"
    done = train(
        GROWS,
        tmp_path / "out",
        MEMORY,
        "--data",
        "0",
        "--fit",
        str(fit),
        "--base-config",
        str(fit.parents[1] / "ds.json"),
    )
    assert done.returncode == 2
    assert "a column that is not there" in done.stderr
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (report["status"], report["rescues"], len(report["attempts"])) == ("failed", 0, 1)
    assert report["attempts"][0]["last_step"] == 6
