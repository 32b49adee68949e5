from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "deepspeed", "ray", "optuna", "transformers", "scipy", "numpy", "pandas")

REPORT = f"import sys; print(*(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"


@pytest.mark.parametrize(
    "code",
    [
        "import autods",
        "from autods import InputError, Report, find_best_config, plan",
        "from autods.cli.main import main; main(['--help'])",
        "from autods.cli.main import main; main(['fit', '--help'])",
        "from autods.cli.main import main; main(['plan', '--help'])",
        "from autods.cli.main import main; main(['probe', '--help'])",
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


def test_every_public_name_can_be_had_and_others_cannot() -> None:
    import autods

    for name in autods.__all__:
        assert getattr(autods, name) is not None
        assert name in dir(autods)
    with pytest.raises(AttributeError, match="nonsense"):
        autods.nonsense  # noqa: B018


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
