"""The set-up of a machine: what `.ci/packages` installs, what it says where it cannot, and what CI runs."""

import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from tests.support.documents import ROOT

ALL = "g++ python3 python3-venv python3-dev libaio-dev"  # what the demo needs


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with the few programs of a bare system, whose user is root. Its apt-get brings Python and a compiler."""
    for name in ("bash", "env", "make"):
        (tmp_path / name).symlink_to(str(which(name) or which("true")))
    put(tmp_path, "id", "echo 0")
    bring = f"{which('ln')} -s {sys.executable} python3; {which('ln')} -s {which('true')} c++"
    put(tmp_path, "apt-get", f'echo "$*" >> asked; [ "$1" = update ] || {{ {bring}; }}')
    return tmp_path


def put(machine: Path, name: str, script: str) -> None:
    (machine / name).write_text(f"#!{which('bash')}\n{script}\n")
    (machine / name).chmod(0o755)


def set_up(machine: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """What `.ci/packages` does on a machine that has these programs alone."""
    return subprocess.run(
        [ROOT / ".ci" / "packages"],
        cwd=machine,
        env={"PATH": str(machine), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_root_installs_what_is_missing_without_a_question(machine: Path) -> None:
    done = set_up(machine)
    assert (done.returncode, done.stdout) == (0, "python3\n")
    assert done.stderr == f"Installing {ALL} with apt-get\n"
    update, install = (machine / "asked").read_text().splitlines()
    assert update.startswith("update")
    assert install == f"install --yes --no-install-recommends {ALL} -qq"


def test_a_machine_that_has_all_is_left_alone(machine: Path) -> None:
    for name, program in {"c++": which("true"), "python3": sys.executable}.items():
        (machine / name).symlink_to(str(program))
    done = set_up(machine)
    assert (done.returncode, done.stdout, done.stderr) == (0, "python3\n", "")
    assert not (machine / "asked").exists()


def test_a_user_without_sudo_gets_the_line_to_type(machine: Path) -> None:
    put(machine, "id", "echo 1000")
    done = set_up(machine)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: the system lacks packages: install them first",
        f"  sudo sh -c 'apt-get update && apt-get install --yes --no-install-recommends {ALL}'",
    ]
    assert not (machine / "asked").exists()


def test_a_user_with_sudo_installs_with_it(machine: Path) -> None:
    put(machine, "id", "echo 1000")
    put(machine, "sudo", 'echo sudo >> asked; if [ "$1" = -n ]; then shift; "$@"; else "$@"; fi')
    (machine / "true").symlink_to(str(which("true")))
    assert set_up(machine).returncode == 0
    assert (machine / "asked").read_text().splitlines()[-2:] == [
        "sudo",
        f"install --yes --no-install-recommends {ALL} -qq",
    ]


def test_a_system_without_apt_is_told_what_it_lacks(machine: Path) -> None:
    (machine / "apt-get").unlink()
    done = set_up(machine)
    assert done.returncode == 2
    assert done.stderr == f"error: the system lacks what Debian calls {ALL}: install it first\n"


def test_an_old_python_is_refused_in_one_line(machine: Path) -> None:
    put(machine, "old", "exit 1")
    done = set_up(machine, PYTHON="old")
    assert (done.returncode, done.stderr) == (2, "error: PYTHON=old is no Python >= 3.11 with venv\n")
    assert not (machine / "asked").exists()


def test_ci_lints_and_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    (test,) = {line.split("  ")[0] for line in readme.splitlines() if line.startswith("make test")}
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-2:] == ["make lint", test]
    install, _, demo = readme.split("```\n")[1].splitlines()[:3]
    assert install.startswith("apt-get update && apt-get install -y --no-install-recommends git ca-certificates make")
    assert demo.startswith("make demo ")
