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
    wanted = {"deepspeed", "ray", "optuna", "transformers", "peft", "hjson", "tokenizers", "jsonschema", "tabulate"}
    assert wanted <= names
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


def test_the_steps_call_commands_that_exist(day: kit.Day, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    asked = {"rung": "zero2", "micro_batch": 1, "device": {"peak_bytes": 9}}
    fitted = {
        "rung": "zero2",
        "knobs": {"micro_batch": 1},
        "outcome": {"kind": "fit", "memory": {"device": asked["device"]}},
    }
    report = {"forecast": [asked], "trials": [fitted], "rung": "zero2", "throughput": {}}

    def call(self: kit.Day, name: str, command: list[str], **options: object) -> str:
        called.append(command)
        return json.dumps(report)

    monkeypatch.setattr(kit.Day, "call", call)
    day.folder.mkdir()
    (day.folder / "fit").mkdir()
    (day.folder / "fit/report.json").write_text(json.dumps(report))
    (day.folder / "questions.json").write_text("{}")
    kit.train_plain(day)
    kit.rescue(day)
    kit.ask_questions(day)
    assert kit.fit_mixtral(day)["rungs"] == {"zero2": {"forecast": {"peak_bytes": 9}, "measured_bytes": 9}}
    kit.fit_lora(day)
    kit.tune_beside(day)
    documented = (kit.ROOT / "docs/cli.md").read_text()
    for command in called:
        if command[0] == "autods":
            section = documented.partition(f"## autods {command[1]}\n")[2].partition("\n## ")[0]
            assert [each for each in command if each.startswith("--") and f"`{each}" not in section] == []
        else:
            assert command[0] == "python"  # torch's own commands are not in the kit's environment
            assert command[1] == "-m" or (kit.ROOT / command[1]).exists()
