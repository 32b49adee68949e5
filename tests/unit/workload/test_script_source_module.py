"""A script that is started as `python -m package.module`: found without running it, and started the same way."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autods.cli import fit, plan, probe
from autods.errors import InputError
from autods.report.launch import launch_commands
from autods.trial.script.run import run_as_main
from autods.workload import make_source
from autods.workload.script_source import describe_launch
from tests.support.reports import fitting_report

PLAIN = "import deepspeed\nengine = deepspeed.initialize(model=None)\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Files of a package `shop` below the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        path = tmp_path / "shop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("__init__.py", "raise SystemExit('nobody runs this to find a module')\n")
    return write


def test_a_module_is_found_where_python_would_find_it_and_nothing_is_run(package, tmp_path):
    package("train.py", PLAIN)
    source = make_source(Path("module:shop.train"))
    assert (source.path, source.module, source.name) == (str(tmp_path / "shop/train.py"), "shop.train", "shop.train")
    assert (source.kind, source.script_kind, source.folder) == ("script", "deepspeed", str(tmp_path))


def test_a_package_is_its_main(package, tmp_path):
    package("__main__.py", PLAIN)
    assert make_source(Path("module:shop")).path == str(tmp_path / "shop/__main__.py")


def test_one_of_pythonpath_is_found(package, tmp_path, monkeypatch):
    package("train.py", PLAIN)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert make_source(Path("module:shop.train")).root == str(tmp_path)


@pytest.mark.parametrize("line", ["from shop.parts.loop import main", "from .parts import loop", "from . import parts"])
def test_its_kind_is_seen_through_the_modules_of_its_package(package, line):
    package("train.py", line + "\n")
    package("parts/__init__.py", "from .loop import run\n")
    package("parts/loop.py", "from ..deep import run\n")
    package("deep.py", PLAIN)
    assert make_source(Path("module:shop.train")).script_kind == "deepspeed"


def test_another_content_of_its_package_is_another_workload(package):
    package("train.py", "from .loop import main\n")
    package("loop.py", PLAIN)
    before = make_source(Path("module:shop.train")).digest
    package("loop.py", PLAIN + "more = 1\n")
    assert make_source(Path("module:shop.train")).digest != before


def test_of_an_installed_package_only_its_relative_imports_are_followed(package, tmp_path):
    (tmp_path / "shop-1.0.dist-info").mkdir()
    (tmp_path / "other.py").write_text("import lightning\n")
    package("train.py", "import other\nfrom .loop import main\n")
    package("loop.py", PLAIN)
    assert make_source(Path("module:shop.train")).script_kind == "deepspeed"


def test_what_the_script_itself_uses_decides_over_a_helper_of_its_own(package):
    package("train.py", "from transformers import Trainer\nfrom . import reference\n")
    package("reference.py", PLAIN)
    assert make_source(Path("module:shop.train")).script_kind == "hf_trainer"


def test_a_project_that_pythonpath_names_is_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "lib/engine_room.py").write_text(PLAIN)
    (tmp_path / "tools/train.py").write_text("import engine_room\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib")
    assert make_source(tmp_path / "tools/train.py").script_kind == "deepspeed"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shop.missing", r"-m shop.missing: there is no module shop.missing in .*start it from the folder"),
        ("shopp.train", r"there is no module shopp in"),
        ("shop", r"is a package without a __main__.py.*-m shop.train"),
        ("shop/train.py", r"is not a module name.*package.module"),
        ("train.py", r"is a file, and -m takes a module name.*drop -m"),
    ],
)
def test_what_is_no_module_is_told(package, tmp_path, name, says):
    (tmp_path / "train.py").write_text(PLAIN)
    with pytest.raises(InputError) as refused:
        make_source(Path(f"module:{name}"))
    assert re.search(says, str(refused.value).replace("\n", " "))


def test_it_runs_as_python_would_run_it(package, capsys, monkeypatch):
    package("__init__.py", "")
    package("tools.py", "NAME = 'tools'\n")
    package("train.py", "from .tools import NAME\nprint(__name__, __package__, NAME)\n")
    monkeypatch.syspath_prepend(".")
    for name in [one for one in sys.modules if one.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)
    run_as_main(make_source(Path("module:shop.train"), kind="deepspeed"))
    assert capsys.readouterr().out == "__main__ shop tools\n"


def test_each_launcher_starts_it_as_a_module(package):
    package("train.py", PLAIN)
    source = make_source(Path("module:shop.train"), argv=["--batch", "{micro_batch_size}"])
    report = fitting_report("out")
    said = launch_commands(replace(report, question={**report.question, "script": describe_launch(source)}))
    assert said["torchrun"].endswith("--nproc_per_node 2 -m shop.train --batch 4")
    assert " --module shop.train --batch 4" in said["deepspeed"]
    assert said["accelerate"].endswith(" -m shop.train --batch 4")


@pytest.mark.parametrize("command", [fit.fit_command, plan.plan_command, probe.probe_command])
def test_every_command_takes_a_module(command):
    assert "module" in command.__annotations__
