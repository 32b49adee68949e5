"""The measurement for cards, on a CPU rank: the same path but for the card."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import gpu_results as results
import measure

ASKED = ["tiny", "--device", "cpu", "--gpus", "1", "--rungs", "ddp", "--cards", "0.0625", "--gpu-memory", "1GiB"]


def test_trials_without_ray_fill_the_file_and_are_not_run_again(tmp_path: Path, capsys) -> None:
    out = tmp_path / "cpu.json"
    assert measure.main([*ASKED, "--no-build", "--out", str(out)]) == 0
    said = results.read(out)
    ran, gone = (
        [cell for cell in said["cells"] if (cell["card_bytes"] is not None) == small] for small in (False, True)
    )
    assert [cell["micro_batch"] for cell in ran] == [1, 2]
    assert all(results.fits(cell) and 0 < cell["measured"]["device"] < 2**30 for cell in ran)
    assert [results.ran_out(cell) for cell in gone] == [True]  # what does not fit at 1 is not asked for more
    capsys.readouterr()
    assert measure.main([*ASKED, "--no-build", "--out", str(out)]) == 0
    assert "samples/s" not in capsys.readouterr().out
