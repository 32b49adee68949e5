"""The measurement for cards, on a CPU rank: the same path but for the card."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autods.types import Steps

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import gpu_cells
import gpu_results as results
import measure

ASKED = ["tiny", "--device", "cpu", "--gpus", "1", "--rungs", "ddp", "--cards", "0.11", "--gpu-memory", "1GiB"]


def test_trials_without_ray_fill_the_file_and_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_cells, "STEPS", Steps(warmup=0, timed=1))
    monkeypatch.setitem(gpu_cells.MODELS, "tiny", replace(gpu_cells.MODELS["tiny"], micro_batches=(1,)))
    out = tmp_path / "cpu.json"
    assert measure.main([*ASKED, "--no-build", "--out", str(out)]) == 0
    whole, stored, small = results.read(out)["cells"]
    assert results.fits(whole)
    assert results.fits(stored)
    assert (whole["checkpointing"], stored["checkpointing"]) == (True, False)
    assert 0 < whole["measured"]["device"] < 2**30
    assert results.ran_out(small), small["outcome"]
    capsys.readouterr()
    assert measure.main([*ASKED, "--no-build", "--out", str(out)]) == 0
    assert "samples/s" not in capsys.readouterr().out
