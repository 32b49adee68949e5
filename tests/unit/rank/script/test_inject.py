"""What a script finds in its process before it starts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autods.rank.script.inject import prepare_process
from tests.support.script_trials import script_job


def test_fire_and_click_get_the_rank_within_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"argv": [], "path": [], "dont_write_bytecode": True}.items():
        monkeypatch.setattr(sys, name, value)
    monkeypatch.chdir(tmp_path)  # and back to where it was
    script = tmp_path / "train.py"
    script.write_text("import fire\n\ndef main(local_rank: int = 0): ...\n\nfire.Fire(main)\n")
    job = script_job(world_size=4, local_ranks=(2, 3), argv=["--config", "{ds_config}"])
    job = replace(job, scratch=str(tmp_path), source=replace(job.source, path=str(script)))
    prepare_process(job, 1, {"train_batch_size": 8})
    config = tmp_path / "ds_config.rank3.json"
    assert sys.argv == [str(script), "--config", str(config), "--local_rank=1"]
    assert json.loads(config.read_text()) == {"train_batch_size": 8}
