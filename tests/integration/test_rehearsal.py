"""A whole rehearsal with DeepSpeed's real engine on simulated GPUs: no card, no ranks, no Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

GEOMETRY = Path(__file__).parents[2] / "examples" / "geometries" / "qwen2-tiny"


def test_a_rehearsal_finds_a_config_without_a_card(tmp_path: Path) -> None:
    ladder = ("--ladder", "ddp,zero2", "--stop", "fastest", "--config", "quick", "--global-batch", "16")
    command = ("fit", str(GEOMETRY), "--seq-len", "64", "--rehearse", "--on", "t4-16gb", "--gpus", "2", *ladder)
    done = subprocess.run(
        [sys.executable, "-m", "autods", *command, "--out", str(tmp_path / "out"), "--json"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["status"] == "fit"
    assert report["rehearsed"] is True
    assert report["throughput"]["samples_per_second"] > 0
    assert report["memory"]["device"]["peak_bytes"] < report["memory"]["device"]["limit_bytes"]
    assert report["ds_config"]["fp16"]["enabled"] is True  # a T4 has no bf16
    assert report["ds_config"]["train_batch_size"] == 16
    assert "a rehearsal" in done.stderr
    assert not (tmp_path / "out" / "logs").exists()
