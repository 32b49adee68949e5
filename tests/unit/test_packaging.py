"""What is built is what is needed: the ladder and the configs travel inside the package, and nothing beside it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)  # builds and installs a wheel

ROOT = Path(__file__).parents[2]

SHOW = """
import sys
sys.path.insert(0, sys.argv[1])
import autods
from autods.config.catalogue import read_catalogue
from autods.config.rungs import list_ladder, read_rungs
from autods.config.profiles import read_profile
assert autods.__file__.startswith(sys.argv[1]), autods.__file__
print(*list_ladder(read_rungs()))
print(*(read_profile(name).name for name in ("default", "quick", "thorough")))
print(*read_catalogue())
"""


def python(*arguments: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel of this checkout was installed, by itself."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", wheels, cwd=ROOT)
    (wheel,) = wheels.glob("*.whl")
    python("-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--target", target, wheel, cwd=wheels)
    return target


def test_an_installed_autods_finds_rungs_and_configs(installed: Path, tmp_path: Path) -> None:
    # -I: neither the current folder nor PYTHONPATH is searched; the editable install comes after the one given.
    rungs, configs, machines = python("-I", "-c", SHOW, installed, cwd=tmp_path).splitlines()
    assert (
        rungs
        == "ddp zero1 zero2 zero2-offload zero3 zero3-offload-optimizer zero3-offload-param zero3-offload zero3-nvme"
    )
    assert configs == "default quick thorough"
    assert machines.split()[0] == "t4-16gb"
    assert "a100-80gb" in machines


def test_the_training_script_that_launch_lines_name_is_installed(installed: Path) -> None:
    assert (installed / "autods" / "examples" / "train.py").read_bytes() == (
        ROOT / "examples" / "train.py"
    ).read_bytes()


def test_no_package_but_autods_is_installed(installed: Path) -> None:
    folders = {path.name for path in installed.iterdir() if path.is_dir() and path.suffix != ".dist-info"}
    assert folders - {"bin"} == {"autods"}


def test_the_command_line_is_installed(installed: Path) -> None:
    (entry_points,) = installed.glob("autods-*.dist-info/entry_points.txt")
    assert "autods = autods.__main__:start" in entry_points.read_text()
