"""A fit that is killed or interrupted goes on by the same command: no finished trial twice, no rank left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# A trial takes a second or two, so that there is one to be killed.
SLOW = """
import time
from tiny import Tiny, build_batch


class Slow(Tiny):
    def forward(self, x, y):
        time.sleep(0.5)
        return super().forward(x, y)


def build_model():
    return Slow()
"""


class Fit:
    """One fit, started again and again by the same command."""

    def __init__(self, folder: Path) -> None:
        workloads = Path(__file__).parent / "workloads"
        self.model, self.out = folder / "slow.py", folder / "out"
        self.model.write_text(SLOW)
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(workloads), os.environ.get("PYTHONPATH", "")])}

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "autods", "fit", self.model, "--gpus", "2", "--device", "cpu"]
        command += ["--gpu-memory", "1GiB", "--config", "quick", "--ladder", "zero1", "--out", self.out]
        return subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def rows(self) -> list[dict[str, object]]:
        path = self.out / "journal.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def finished(self) -> list[object]:
        return [row["key"] for row in self.rows() if row["kind"] == "finished"]

    def in_a_trial_after(self, finished: int) -> None:
        """Wait until that many trials are finished and another one has begun."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            there = bool(self.ranks())  # looking through all processes takes long: the trial could end meanwhile
            rows = self.rows()
            done = sum(row["kind"] == "finished" for row in rows)
            if there and done >= finished and rows[-1]["kind"] == "started":
                return
            time.sleep(0.02)
        raise AssertionError(f"no trial is running: {self.rows()}")

    def ranks(self) -> list[int]:
        """Pids of its zygote and its ranks, which keep the zygote's command line."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "autods.cluster.zygote" in words and any(str(self.model) in word for word in words):
                found.append(process.pid)
        return found

    def seconds_until_gone(self) -> float:
        began = time.monotonic()
        while self.ranks() and time.monotonic() - began < 10:
            time.sleep(0.02)
        return time.monotonic() - began


@pytest.fixture
def a_fit(tmp_path):
    return Fit(tmp_path)


def test_a_fit_killed_in_a_trial_and_interrupted_in_another_ends_as_if_nothing_had_been(a_fit):
    driver = a_fit.start()
    a_fit.in_a_trial_after(finished=1)
    driver.kill()
    driver.communicate()
    assert a_fit.seconds_until_gone() < 5
    known = a_fit.finished()
    assert known
    assert not (a_fit.out / "report.json").exists()

    driver = a_fit.start()
    a_fit.in_a_trial_after(finished=len(known) + 1)
    driver.send_signal(signal.SIGINT)
    interrupted_s = a_fit.seconds_until_gone()
    _, said = driver.communicate(timeout=30)
    assert driver.returncode == 130
    assert interrupted_s < 5  # 2 s on a machine that has nothing else to do
    assert f"resuming: {len(known)} finished trials are not run again" in said
    assert "interrupted: every rank is gone" in said
    assert f"go on with: autods fit {a_fit.model} " in said.replace("python -m autods", "autods")

    driver = a_fit.start()
    told, said = driver.communicate(timeout=120)
    assert driver.returncode == 0, said
    assert "zero1 fits" in told
    finished = a_fit.finished()
    assert len(finished) == len(set(finished))
    starts = [row["key"] for row in a_fit.rows() if row["kind"] == "started"]
    assert len(starts) - len(finished) == 2  # the two that were running, each tried once more
    report = json.loads((a_fit.out / "report.json").read_text())
    assert len(report["trials"]) == len(finished)
    assert a_fit.ranks() == []
