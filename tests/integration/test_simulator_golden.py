"""The simulated engine against the real one's allocations; the whole grid is tests/benchmarks/forecast_golden.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "forecast_golden.py"


@pytest.mark.parametrize(
    ("device", "model", "rungs"), [("cpu", "gpt2", "zero1,zero3-offload"), ("cuda", "llama", "zero2,zero3-nvme")]
)
def test_the_simulated_engine_allocates_what_the_real_one_does(device: str, model: str, rungs: str) -> None:
    words = ["--devices", device, "--models", model, "--rungs", rungs, "--accumulation", "2", "--json"]
    done = subprocess.run([sys.executable, BENCHMARK, *words], capture_output=True, text=True, check=False)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 4
    assert [row for row in rows if not row["within"]] == []
