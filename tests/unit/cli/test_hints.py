"""A hint names only options that the command at hand has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import autods
from autods.cli.main import app, main
from autods.errors import AutodsError, EnvironmentBroken, InputError

COMMANDS = {
    name: {spelling for option in command.params for spelling in (*option.opts, *option.secondary_opts)}
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}
ALL = sorted(
    spelling for spelling in set().union(*COMMANDS.values()) if spelling.startswith("--") and "no-" not in spelling
)
ARGUMENTS = {"report": ["folder"], "diagnose": ["x.log"], "doctor": []}


@pytest.mark.parametrize("kind", [InputError, EnvironmentBroken])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_hint_names_no_option_that_the_command_lacks(
    command: str, kind: type[AutodsError], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "mend it; or wait, or " + ", or ".join(f"give {option} X" for option in ALL)

    def fail(*args: object, **more: object) -> None:
        raise InputError("it is wrong", hint=hint) if kind is InputError else kind(f"it is wrong\n  {hint}")

    monkeypatch.setattr(f"autods.cli.commands.run_{command}", fail)
    monkeypatch.setattr("autods.cli.ending._MOST", 10_000)
    assert main([command, *ARGUMENTS.get(command, ["x.json"])]) == kind.exit_code
    said = capsys.readouterr().err
    assert set(re.findall("--[a-z-]+", said)) == COMMANDS[command] & set(ALL)
    assert said.startswith("error: it is wrong\n  mend it; or wait")


def test_a_hint_without_another_way_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = InputError("it is wrong", hint="give --steps")
    error.keep_options(["--gpus"])
    assert (str(error), error.hint) == ("it is wrong", None)


def test_the_command_of_another_hint_stays() -> None:
    error = InputError("it is wrong", place="x", hint="`autods plan --on` lists them, or add `--lr {lr}` after --")
    error.keep_options([])
    assert str(error) == "x: it is wrong\n  `autods plan --on` lists them, or add `--lr {lr}` after --"


def test_a_hint_of_the_python_api_names_only_arguments(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def build_model(): ...\ndef build_batch(n): ...\nDEEPSPEED_CONFIG = make()\n")
    with pytest.raises(InputError) as explained:
        autods.explain({}, tmp_path / "m.py", gpus=1, gpu_memory="1GiB")
    assert explained.value.hint == "assign one of these in one place"
    with pytest.raises(InputError) as planned:
        autods.plan(tmp_path / "m.py", gpus=1, gpu_memory="1GiB")
    assert planned.value.hint == "assign one of these in one place, or give the config with --base-config"


def texts() -> Iterator[str]:
    """The hints in the package as Python writes them: those of `hint=…` in a call and of a variable of that name."""
    for path in Path(autods.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.keyword(arg="hint", value=value) | ast.Assign(targets=[ast.Name(id="hint")], value=value):
                    yield ast.unparse(value)


def test_each_option_that_a_hint_names_exists() -> None:
    hints = list(texts())
    assert len(hints) > 150
    for text in hints:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub("`[^`]*`", "", text)))
        assert named <= {*ALL, "--help", "--no-forecast"}, text
