"""Each row of the command line is about a command that there is."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

from autods.cli import commands
from autods.cli.synopsis import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_its_request_and_flags(name: str) -> None:
    run = getattr(commands, f"run_{name}")
    flags = [each.name for each in inspect.signature(run).parameters.values() if each.kind == each.KEYWORD_ONLY]
    assert (get_type_hints(run)["request"], flags) == (COMMANDS[name].request, list(COMMANDS[name].flags))


def test_every_command_has_a_row() -> None:
    assert {f"run_{name}" for name in COMMANDS} == {name for name in vars(commands) if name.startswith("run_")}
