"""The same command continues a fit that was killed or interrupted: no trial runs twice, no rank is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.held import Held
from tests.support.watching import wait_for


class Fit:
    """One fit, started again and again by the same command."""

    def __init__(self, folder: Path) -> None:
        self.held, self.out = Held(folder), folder / "out"
        self.model = self.held.model

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "autods", "fit", self.model, "--gpus", "2", "--device", "cpu"]
        command += [
            "--gpu-memory",
            "1GiB",
            "--config",
            "quick",
            "--ladder",
            "zero1",
            "--no-forecast",
            "--out",
            self.out,
        ]
        return subprocess.Popen(
            command,
            env=self.held.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def rows(self) -> list[dict[str, object]]:
        path = self.out / "journal.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def finished(self) -> list[object]:
        return [row["key"] for row in self.rows() if row["kind"] == "finished"]

    def in_a_trial_after(self, finished: int) -> subprocess.Popen[str]:
        """The driver, started; that many trials are finished and another one has begun and does not end."""
        self.held.hold(finished)
        driver = self.start()
        self.held.wait_in(driver)
        assert self.rows()[-1]["kind"] == "started"
        assert self.ranks()
        return driver

    def ranks(self) -> list[int]:
        """Pids of its zygote and its ranks, which keep the zygote's command line."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "autods.runner.zygote" in words and any(str(self.model) in word for word in words):
                found.append(process.pid)
        return found


@pytest.fixture
def a_fit(tmp_path):
    return Fit(tmp_path)


def test_a_killed_and_interrupted_fit_ends_with_all_its_trials(a_fit):
    driver = a_fit.in_a_trial_after(finished=1)
    driver.kill()
    driver.communicate()
    wait_for(lambda: not a_fit.ranks(), 60)
    known = a_fit.finished()
    assert len(known) == 1
    assert not (a_fit.out / "report.json").exists()

    driver = a_fit.in_a_trial_after(finished=2)
    driver.send_signal(signal.SIGTERM)  # to the driver alone; test_faults signals its whole process group
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert "Traceback" not in said
    assert "GCS" not in said
    assert a_fit.ranks() == []
    assert f"resuming: {len(known)} finished trials are not run again" in said
    assert "interrupted: every rank is gone" in said
    assert f"go on with: autods fit {a_fit.model} " in said.replace("python -m autods", "autods")

    a_fit.held.release()
    driver = a_fit.start()
    told, said = driver.communicate(timeout=200)
    assert driver.returncode == 0, said
    assert "Use zero1, micro batch" in told
    finished = a_fit.finished()
    assert len(finished) == len(set(finished))
    starts = [row["key"] for row in a_fit.rows() if row["kind"] == "started"]
    assert len(starts) - len(finished) == 2  # the two that were running, each tried once more
    report = json.loads((a_fit.out / "report.json").read_text())
    assert len(report["trials"]) == len(finished)
    assert a_fit.ranks() == []
