"""Missing software and ops are named with the command that installs or builds them."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from autods.cli.main import main
from autods.errors import EnvironmentBroken
from autods.inspector import examine as doctor
from autods.inspector import toolchain
from autods.report.answers.problems import make_doctor_document
from autods.report.results.doctor import Check, Checkup, Use
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
    checks.append(Check.broken("Software", "libaio", "libaio.h is missing", "apt-get install libaio-dev"))
    assert main(["doctor"]) == 0
    checks.append(Check.broken("Software", "torch", "not installed", "pip install torch"))
    assert main(["doctor"]) == 3
    assert "pip install torch" in capsys.readouterr().out


def test_a_checkup_counts_its_lines() -> None:
    checks = (
        Check(group="GPUs", name="cards", status="ok", result="8"),
        Check(group="Limits", name="open files", status="warning", result="256", remedy="ulimit -n 65536"),
    )
    lines = [line.rstrip() for line in printed(make_doctor_document(Checkup(checks=checks)), 80).splitlines()]
    assert " ".join(lines[-2:]).endswith("(0 broken, 1 warning, 1 ok)")
    assert "      ulimit -n 65536" in lines


def test_a_long_remedy_can_be_copied_as_one_line() -> None:
    remedy = "apt-get install --yes libaio-dev ninja-build && DS_BUILD_AIO=1 pip install --force-reinstall deepspeed"
    checkup = Checkup(checks=(Check.warning("Software", "libaio", "missing", f"{remedy}\nor use the CPU"),))
    lines = printed(make_doctor_document(checkup), 60).splitlines()
    assert f"      {remedy}" in lines
    assert "      or use the CPU" in lines


@pytest.mark.parametrize(
    ("group", "name", "ready", "obstacles", "is_broken"),
    [
        ("GPUs", "cards", ("plan", "CPU ranks", "offload to the CPU", "NVMe"), {"GPUs": "cards"}, True),
        ("Software", "libaio", ("plan", "CPU ranks", "GPUs", "offload to the CPU"), {"NVMe": "libaio"}, False),
        ("Software", "torch", (), dict.fromkeys(get_args(Use), "torch"), True),
        ("DeepSpeed ops", "fused_adam", get_args(Use), {}, False),
    ],
)
def test_a_checkup_tells_what_the_machine_is_ready_for(
    group: str, name: str, ready: tuple[Use, ...], obstacles: dict[Use, str], is_broken: bool
) -> None:
    checkup = Checkup(checks=(Check.broken(group, name, "missing"),))
    assert (checkup.ready_for, checkup.obstacles, checkup.is_broken) == (ready, obstacles, is_broken)


def test_a_machine_without_cards_is_ready_for_the_rest() -> None:
    checkup = Checkup(checks=(Check.warning("GPUs", "cards", "none"),))
    assert not checkup.is_broken
    assert "not for GPUs (see cards)" in printed(make_doctor_document(checkup), 80)


def test_nvme_is_needed_where_a_folder_for_it_is_named() -> None:
    lacks = Check.broken("Software", "libaio", "missing")
    assert Checkup(checks=(lacks, Check.ok("NVMe", "/nvme", "1 TiB free"))).is_broken


def test_ray_that_starts_is_ok_with_its_seconds() -> None:
    (check,) = toolchain.check_ray(lambda: 4.21)
    assert (check.status, check.result) == ("ok", "starts and runs a task in 4.2 s")


def test_ray_that_does_not_start_is_broken_with_its_remedy() -> None:
    def fail() -> float:
        raise EnvironmentBroken("Ray did not start, twice: no space\n  free some space in /tmp")

    (check,) = toolchain.check_ray(fail)
    assert (check.status, check.result) == ("broken", "Ray did not start, twice: no space")
    assert check.remedy == "free some space in /tmp"
