"""A run lives through a long evaluation, and a scheduler that ends it: it is saved and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support.clusters import short_config
from tests.support.watching import wait_for

SCRIPT = Path(__file__).parent / "scripts_run" / "slow.py"
STEPS, ACCUMULATION = 10, 2


def command(folder: Path) -> list[str]:
    ranks = ("--device", "cpu", "--gpus", "2", "--gpu-memory", "1GiB", "--precision", "fp32")
    fit = ("--ladder", "zero2", "--config", short_config(folder), "--no-forecast", "--global-batch", "4")
    run = ("--stall-limit", "5s", "--steps", str(STEPS), "--checkpoint-every", "100", "--out", str(folder / "run"))
    script = ("--", "--deepspeed_config", "{ds_config}", "--log", str(folder))
    return [sys.executable, "-m", "autods", "run", str(SCRIPT), *ranks, *fit, *run, *script]


def read_rows(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank wrote down when it began each micro batch."""
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def read_samples(folder: Path) -> dict[int, list[int]]:
    """The samples of each step that a rank has begun."""
    steps: dict[int, list[int]] = {}
    for rank in range(2):
        for row in read_rows(folder, rank):
            steps.setdefault(row["step"], []).extend(row["samples"])
    return {step: sorted(samples) for step, samples in steps.items()}


def test_a_long_evaluation_is_no_hang_and_sigterm_saves(tmp_path: Path) -> None:
    steps = tmp_path / "run" / "attempts" / "1" / "steps.jsonl"
    driver = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def is_in_mid_step() -> bool:
        if not steps.exists() or steps.read_text().count("\n") < 4:
            return False
        before, now = read_rows(tmp_path, 0)[-2:]
        return now["step"] > before["step"]

    wait_for(lambda: driver.poll() is not None or is_in_mid_step(), 300)
    assert driver.poll() is None, driver.communicate()[1]
    assert json.loads((steps.parent / "job.json").read_text())["accumulation"] == ACCUMULATION
    family = [driver, *psutil.Process(driver.pid).children(recursive=True)]
    for process in family:  # in the order of a job's processes: the ranks come last
        os.kill(process.pid, signal.SIGTERM)
    _, said = driver.communicate(timeout=120)
    assert driver.returncode == 143, said
    report = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (report["status"], report["rescues"]) == ("stopped", 0)
    saved = report["step"]
    assert 4 <= saved < STEPS
    before = read_samples(tmp_path)

    for rank in range(2):
        (tmp_path / f"rank{rank}.jsonl").unlink()
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    after = read_samples(tmp_path)
    assert sorted(after) == list(range(saved + 1, STEPS + 1))
    assert {**before, **after}.keys() == set(range(1, STEPS + 1))
    drawn = [sample for step in range(1, STEPS + 1) for sample in {**before, **after}[step]]
    assert len(drawn) == len(set(drawn)) == 4 * STEPS
