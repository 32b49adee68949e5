from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from autods.errors import REQUIRED

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "deepspeed", "ray", "optuna", "transformers", "scipy", "numpy", "pandas")

REPORT = f"import sys; print(*(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"


@pytest.mark.parametrize(
    "code",
    [
        "import autods",
        "from autods import InputError, FitReport, find_best_config, plan",
        "from autods.cli.main import main; main(['probe', 'no-such-file.py', '--device', 'cpu', '--gpus', '2'])",
        "from autods.cli.main import main; main(['fit', 'no-such-file.py', '--device', 'cpu', '--gpus', '2'])",
        "from autods.cli.main import main; main(['plan', 'no-such/c.json', '--gpus', '8', '--gpu-memory', '80GiB'])",
        "from autods.config.catalogue import read_catalogue; read_catalogue()",
    ],
)
def test_nothing_heavy_is_imported_before_a_fit_runs(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"{code}; {REPORT}"], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1:] in ([], [""])


def test_import_autods_alone_loads_no_room_of_it() -> None:
    code = "import autods, sys; print(*(name for name in sys.modules if name.startswith('autods.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("line", [["--help"], ["fit", "--help"], ["plan", "--help"], ["probe", "--help"]])
def test_help_loads_no_command_and_nothing_heavy(line: list[str]) -> None:
    code = f"import sys; from autods.cli.main import main; main({line}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"autods.api", "autods.cli.commands", "jinja2", *HEAVY} & set(done.stderr.split()) == set()


SMALL = (
    "cloudpickle",
    "jinja2",
    "packaging",
    "psutil",
    "pydantic",
    "rich",
    "typer",
)  # all that these commands need, as docs/limits.md says

WITHOUT = """
import sys
from autods.errors import REQUIRED

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {*REQUIRED, "numpy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_without_heavy_packages(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python where none of the packages that autods requires can be imported, except for the small ones."""
    command = [sys.executable, "-c", WITHOUT + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_required_is_heavy_or_small() -> None:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split("[>=<]", line)[0] for line in lines} == {*REQUIRED.values(), *SMALL}


@pytest.mark.parametrize(
    "code",
    [
        "import autods; print(autods.diagnose(sys.argv[1]).tier)",
        "from autods.cli.main import main; sys.exit(main(['diagnose', sys.argv[1]]))",
    ],
    ids=["api", "cli"],
)
def test_diagnose_needs_no_heavy_package(tmp_path: Path, code: str) -> None:
    log = tmp_path / "train.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    done = run_without_heavy_packages(code, log)
    assert "device" in done.stdout
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_missing_package_is_named_in_two_lines() -> None:
    fit = ["fit", "model.py", "--gpus", "2", "--device", "cpu"]
    done = run_without_heavy_packages(f"from autods.cli.main import main; sys.exit(main({fit}))")
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "error: the package nvidia-ml-py is not installed, and this command needs it",
        "  pip install nvidia-ml-py, or install autods without `--no-deps`",
    ]


def test_every_public_name_can_be_had_and_others_cannot() -> None:
    import autods

    for name in autods.__all__:
        assert getattr(autods, name) is not None
        assert name in dir(autods)
    with pytest.raises(AttributeError, match="nonsense"):
        autods.nonsense  # noqa: B018


def test_no_public_name_is_that_of_a_module() -> None:
    import autods

    # Python sets an imported submodule as an attribute of its package, where it would hide the function.
    modules = {module.name for module in pkgutil.iter_modules(autods.__path__)}
    assert not modules & set(autods.__all__)


def test_ctrl_c_during_imports_ends_silently() -> None:
    interrupted = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from autods.__main__ import start
sys.exit(start())
"""
    ended = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_small_package_that_is_missing_is_named() -> None:
    code = (
        WITHOUT.replace("{*REQUIRED, ", '{"jinja2", *REQUIRED, ')
        + "from autods.cli.main import main\nsys.exit(main(['doctor']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    assert "what autods needs cannot be imported: ModuleNotFoundError: No module named 'jinja2'" in ended.stderr
