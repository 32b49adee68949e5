from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from autods.api import UseCase
from autods.cli.main import main
from autods.requests import RunRequest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_the_ranks_start_has_its_exit_code(number: signal.Signals, code: int, tmp_path: Path) -> None:
    def end(request: RunRequest) -> Any:
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.default_int_handler)  # pytest may have been started by nohup
    try:
        assert (
            main(["run", str(tmp_path / "model.py")], run=UseCase(end, lambda settings, listen: end(settings))) == code
        )
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("number", "command", "code"), [("TERM", "run", 143), ("INT", "run", 130), ("TERM", "fit", 130)]
)
def test_a_signal_before_the_command_begins_has_its_code(
    monkeypatch: pytest.MonkeyPatch, number: str, command: str, code: int
) -> None:
    def end(*args: object) -> None:
        signal.raise_signal(signal.Signals[f"SIG{number}"])

    monkeypatch.setattr("typer.core.TyperGroup.invoke", end)
    assert main([command, "model.py"]) == code
