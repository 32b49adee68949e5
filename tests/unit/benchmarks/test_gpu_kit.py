"""The kit for a machine with a card: what is packed, how parts are joined, and what becomes of each step."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))

import kit


def test_all_is_packed_that_a_machine_with_torch_lacks() -> None:
    names = {name.partition("==")[0] for name in kit.list_needed()}
    assert {"deepspeed", "ray", "optuna", "transformers", "peft", "hjson", "tokenizers", "jsonschema"} <= names
    assert not names & {"torch", "triton"}
    assert not [name for name in names if name.startswith("nvidia-") and name != "nvidia-ml-py"]


def test_a_damaged_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"some.whl": {"parts": 2, "sha256": hashlib.sha256(b"onetwo").hexdigest()}}
    (tmp_path / kit.MANIFEST).write_text(json.dumps(said))
    for number, data in enumerate((b"one", b"tow")):
        (tmp_path / f"some.whl.{number:02d}").write_bytes(data)
    monkeypatch.setattr(kit, "VENV", tmp_path / "venv")
    monkeypatch.setattr(kit.subprocess, "run", lambda *args, **options: (tmp_path / "venv").mkdir())
    with pytest.raises(SystemExit, match=r"some\.whl: its parts are not what was packed"):
        kit.install(tmp_path)


@pytest.fixture
def day(tmp_path: Path) -> kit.Day:
    return kit.Day(device="cpu", out=tmp_path / "results.json", ends_at=time.monotonic() + 60)


def test_a_step_that_fails_keeps_no_other_from_running(day: kit.Day, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def fail(day: kit.Day) -> dict[str, object]:
        done.append("fit")
        raise RuntimeError("no card")

    monkeypatch.setattr(kit, "STEPS", {"fit": fail, "plain": lambda day: done.append("plain") or {"rate": 1}})
    assert kit.run(day, ["fit", "plain"]) == 1
    results = json.loads(day.out.read_text())
    assert results["fit"]["failed"] == "RuntimeError: no card"
    assert results["plain"]["rate"] == 1
    assert kit.run(day, ["fit", "plain"]) == 1
    assert done == ["fit", "plain", "fit"]  # what has ended is not done again


def test_spent_minutes_say_what_is_left(day: kit.Day, capsys: pytest.CaptureFixture[str]) -> None:
    spent = kit.Day(device="cpu", out=day.out, ends_at=time.monotonic())
    assert kit.run(spent, ["fit", "plain"]) == 4
    assert "left: fit, plain" in capsys.readouterr().out
