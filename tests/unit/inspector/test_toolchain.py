"""Missing software and ops are named with the command that installs or builds them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autods.cli.main import main
from autods.errors import EnvironmentBroken
from autods.inspector import examine as doctor
from autods.inspector import toolchain
from autods.report.answers.problems import make_doctor_document
from autods.report.results.doctor import Check, Checkup
from tests.support.terminal import printed

BUILT = {"built": True, "problem": None}
UNBUILT = {"built": False, "problem": None}
NO_LIBAIO = {"built": False, "problem": "async_io cannot be built on this machine (apt-get install libaio-dev)"}


def ops(monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], *, build: bool = False) -> dict[str, Check]:
    """The checks of ops in this state; a build takes 7 seconds."""

    def ask(words: list[str], **_: Any) -> dict[str, dict[str, Any]]:
        command, *names = words
        return {name: {"seconds": 7.0} if command == "build" else state[name] for name in names}

    monkeypatch.setattr(toolchain, "_ask", ask)
    return {check.name: check for check in toolchain.check_ops(has_cards=False, build=build)}


def test_a_missing_package_is_broken() -> None:
    checks = {
        check.name: check for check in toolchain.check_versions(lambda: {"ray": "not installed", "torch": "2.13"})
    }
    assert (checks["ray"].status, checks["ray"].remedy) == ("broken", "pip install ray")
    assert checks["torch"].status == "ok"


def test_a_missing_compiler_is_broken() -> None:
    checks = {check.name: check for check in toolchain.check_compiler(lambda name: None)}
    assert (checks["compiler"].status, checks["compiler"].remedy) == ("broken", "apt-get install g++")


def test_each_state_of_an_op_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = ops(monkeypatch, {"cpu_adam": BUILT, "async_io": NO_LIBAIO})
    assert {name: check.status for name, check in checks.items()} == {"cpu_adam": "ok", "async_io": "broken"}
    assert checks["async_io"].remedy == "apt-get install libaio-dev"
    checks = ops(monkeypatch, {"cpu_adam": UNBUILT, "async_io": UNBUILT})
    assert {check.status for check in checks.values()} == {"warning"}
    assert checks["cpu_adam"].remedy == "autods doctor --fix"


def test_fix_builds_the_ops_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = ops(monkeypatch, {"cpu_adam": UNBUILT, "async_io": BUILT}, build=True)
    assert checks["cpu_adam"].result == "built in 7 s"
    assert checks["async_io"].result.startswith("built, ")


def test_an_import_that_fails_is_one_broken_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.sys, "executable", "/bin/false")
    (check,) = toolchain.check_ops(has_cards=False, build=False)
    assert check.status == "broken"


def test_the_command_ends_with_3_where_something_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check(group="GPUs", name="cards", status="ok", result="8")]
    monkeypatch.setattr(doctor, "_run_checks", lambda settings, listen: iter(checks))
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checks"][0]["name"] == "cards"
    checks.append(
        Check(group="Software", name="ninja", status="broken", result="not installed", remedy="pip install ninja")
    )
    assert main(["doctor"]) == 3
    assert "pip install ninja" in capsys.readouterr().out


def test_a_checkup_counts_its_lines() -> None:
    checks = (
        Check(group="GPUs", name="cards", status="ok", result="8"),
        Check(group="Limits", name="open files", status="warning", result="256", remedy="ulimit -n 65536"),
    )
    lines = [line.rstrip() for line in printed(make_doctor_document(Checkup(checks=checks)), 80).splitlines()]
    assert lines[-1] == "0 broken, 1 warnings, 1 ok"
    assert "      ulimit -n 65536" in lines


def test_ray_that_starts_is_ok_with_its_seconds() -> None:
    (check,) = toolchain.check_ray(lambda: 4.21)
    assert (check.status, check.result) == ("ok", "starts and runs a task in 4.2 s")


def test_ray_that_does_not_start_is_broken_with_its_remedy() -> None:
    def fail() -> float:
        raise EnvironmentBroken("Ray did not start, twice: no space\n  free some space in /tmp")

    (check,) = toolchain.check_ray(fail)
    assert (check.status, check.result) == ("broken", "Ray did not start, twice: no space")
    assert check.remedy == "free some space in /tmp"
