"""A training script: its kind, arguments and module, seen without running it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autods.cli.main import make_command
from autods.cli.synopsis import COMMANDS
from autods.errors import InputError
from autods.rank.script.inject import run_as_main
from autods.report.launch import launch_commands
from autods.types import WorkloadSource
from autods.workload import make_source
from autods.workload.script_source import (
    describe_launch,
    fill_placeholders,
    find_early_variables,
    find_packages,
    prepares_imports,
)
from tests.support.reports import fitting_report

PLAIN = "import deepspeed\nengine = deepspeed.initialize(model=None)\n"
MODEL = "def build_model(): ...\ndef build_batch(micro_batch_size): ...\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "train.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (PLAIN, "deepspeed"),
        ("from deepspeed import initialize\n", "deepspeed"),
        ("import deepspeed as ds\nds.initialize()\n", "deepspeed"),
        ("from transformers import Trainer, TrainingArguments\n", "hf_trainer"),
        ("import deepspeed\nfrom transformers import Seq2SeqTrainer\n", "hf_trainer"),
        ("from trl import SFTTrainer\n", "hf_trainer"),
        ("from transformers import *\nTrainer(model=AutoModel())\n", "hf_trainer"),
        ("from transformers import *\nclass Trainer: ...\nTrainer()\nimport deepspeed\n", "deepspeed"),
        ("from sentence_transformers import SentenceTransformerTrainer\n", "hf_trainer"),
        ("from lightning.fabric import Fabric\n", "lightning"),
        ("from lightning_fabric import Fabric\n", "lightning"),
        ("from accelerate import Accelerator\nfrom transformers import AutoModel\n", "accelerate"),
        ("import lightning as L\n", "lightning"),
        ("import pytorch_lightning as pl\nimport deepspeed\n", "lightning"),
        ("def main():\n    import deepspeed\n", "deepspeed"),
    ],
)
def test_imports_show_the_kind_of_a_script(write, text, kind):
    source = make_source(write(text))
    assert (source.kind, source.script_kind) == ("script", kind)


def test_a_module_beside_the_script_shows_its_kind(write):
    write(PLAIN, "loop.py")
    assert make_source(write("import loop\nloop.main()\n")).script_kind == "deepspeed"


def test_what_autods_imports_is_no_sign_of_a_script(write, monkeypatch):
    source = Path(__file__).parents[3]
    monkeypatch.chdir(source)
    monkeypatch.setenv("PYTHONPATH", str(source))
    script = write("import autods\nfrom lightning.fabric import Fabric\n", "train.py")
    assert make_source(script).script_kind == "lightning"


def test_a_file_with_both_functions_is_a_model_py(write):
    assert make_source(write(PLAIN + MODEL)).kind == "file"


def test_a_script_may_define_one_of_the_functions(write):
    assert make_source(write(PLAIN + "def build_model(): ...\n")).kind == "script"


def test_a_requested_kind_takes_precedence(write):
    path = write("import launcher\nlauncher.train()\n")
    assert make_source(path, kind="script").script_kind is None
    assert make_source(path, kind="accelerate").script_kind == "accelerate"
    assert make_source(write(PLAIN + MODEL), kind="script").kind == "script"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("print('hello')\n", {}, "is not a workload"),
        ("def build_model(): ...\n", {}, "defines no build_batch"),
        (MODEL, {"argv": ["--epochs", "3"]}, "takes no arguments: --epochs 3"),
        (PLAIN, {"kind": "model"}, "defines no build_model"),
        (PLAIN, {"kind": "notebook"}, "there is no kind 'notebook'"),
        (PLAIN, {"seq_len": 8}, "--seq-len does not apply to a training script"),
        ("import deepspeed\nif\n", {}, "syntax error"),
    ],
)
def test_a_file_that_is_no_workload_is_refused(write, text, options, message):
    with pytest.raises(InputError, match=message):
        make_source(write(text), **options)


def test_a_training_loop_without_deepspeed_is_told_what_to_add(write):
    with pytest.raises(InputError) as refused:
        make_source(write("import torch\nloss.backward()\noptimizer.step()\n"))
    assert "engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=…)" in refused.value.hint
    assert "engine.backward(loss), engine.step()" in refused.value.hint


def test_arguments_modules_and_named_files_change_the_digest(write, monkeypatch):
    path = write(PLAIN + "import loop\n")
    monkeypatch.chdir(path.parent)
    write("A = 1\n", "loop.py")
    write("{}", "own.json")
    argv = ["--config=own.json"]
    digests = [make_source(path, argv=argv).digest, make_source(path, argv=[*argv, "--epochs=3"]).digest]
    write("A = 2\n", "loop.py")
    digests.append(make_source(path, argv=argv).digest)
    write('{"a": 1}', "own.json")
    digests.append(make_source(path, argv=argv).digest)
    assert len(set(digests)) == 4
    assert make_source(path, argv=argv).digest == digests[-1]


def test_a_source_of_a_script_survives_json(write):
    source = make_source(write(PLAIN), argv=["--batch", "{micro_batch_size}"])
    assert WorkloadSource(**json.loads(json.dumps(asdict(source)))) == source


def test_placeholders_are_filled_in_and_other_braces_stay():
    values = {
        "ds_config": "/tmp/a.json",
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 16,
    }
    argv = ["--ds={ds_config}", "{micro_batch_size}", '{"lr": 1}', "{other}", "{}", "{gradient_accumulation_steps}"]
    assert fill_placeholders(argv, values) == ["--ds=/tmp/a.json", "4", '{"lr": 1}', "{other}", "{}", "2"]


FIRE = "import deepspeed, fire\ndeepspeed.initialize\ndef train(batch: int = 8{}): ...\nfire.Fire(train)\n"


def test_a_local_rank_that_fire_reads_is_recognised(write):
    with_it, without = FIRE.format(", local_rank: int = -1"), FIRE.format("")
    assert describe_launch(make_source(write(with_it))).takes_local_rank
    assert not describe_launch(make_source(write(without))).takes_local_rank


def test_a_local_rank_parameter_alone_is_no_option(write):
    text = "import deepspeed\ndeepspeed.initialize\ndef setup(local_rank): ...\n"
    assert not describe_launch(make_source(write(text))).takes_local_rank


@pytest.mark.parametrize(
    ("parser", "argv", "knows"),
    [
        ("HfArgumentParser", ("--deepspeed", "{ds_config}"), True),
        ("HfArgumentParser", ("sft.yaml",), False),
        ("argparse", ("--size", "{micro_batch_size}"), False),
    ],
)
def test_a_trainers_script_may_read_its_arguments_itself(
    parser: str, argv: tuple[str, ...], knows: bool, tmp_path: Path
) -> None:
    """The deepspeed launcher puts --local_rank first: where a file's name is read, or a parser does not know it."""
    script = tmp_path / "train.py"
    script.write_text(f"from transformers import TrainingArguments\n# its arguments are read by {parser}\n")
    launch = describe_launch(make_source(script, argv=argv))
    assert (launch.kind, launch.takes_local_rank) == ("hf_trainer", knows)


@pytest.mark.parametrize(
    ("text", "has_own"),
    [
        ("import argparse\nparser = argparse.ArgumentParser()", True),
        ("import argparse\nparser = TrlParser((SFTConfig,))", False),
        ("import argparse\nparser = HfArgumentParser(TrainingArguments)", False),
        ("arguments = TrainingArguments(output_dir='out')", False),
    ],
)
def test_a_parser_of_the_scripts_own_is_recognised(text: str, has_own: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"from transformers import TrainingArguments\n{text}\n")
    launch = describe_launch(make_source(script, argv=("--deepspeed", "{ds_config}")))
    assert (launch.kind, launch.has_own_parser) == ("hf_trainer", has_own)


# Scripts that are started as `python -m package.module`.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Files of a package `shop` below the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        path = tmp_path / "shop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("__init__.py", "raise SystemExit('this is not run to find a module')\n")
    return write


def test_a_module_is_found_without_running_anything(package, tmp_path):
    package("train.py", PLAIN)
    source = make_source(Path("module:shop.train"))
    assert (source.path, source.module, source.name) == (str(tmp_path / "shop/train.py"), "shop.train", "shop.train")
    assert (source.kind, source.script_kind, source.folder) == ("script", "deepspeed", str(tmp_path))


def test_a_package_means_its_main(package, tmp_path):
    package("__main__.py", PLAIN)
    assert make_source(Path("module:shop")).path == str(tmp_path / "shop/__main__.py")


def test_a_module_on_pythonpath_is_found(package, tmp_path, monkeypatch):
    package("train.py", PLAIN)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert make_source(Path("module:shop.train")).root == str(tmp_path)


@pytest.mark.parametrize("line", ["from shop.parts.loop import main", "from .parts import loop", "from . import parts"])
def test_modules_of_its_package_show_the_kind(package, line):
    package("train.py", line + "\n")
    package("parts/__init__.py", "from .loop import run\n")
    package("parts/loop.py", "from ..deep import run\n")
    package("deep.py", PLAIN)
    assert make_source(Path("module:shop.train")).script_kind == "deepspeed"


def test_a_change_in_its_package_changes_the_digest(package):
    package("train.py", "from .loop import main\n")
    package("loop.py", PLAIN)
    before = make_source(Path("module:shop.train")).digest
    package("loop.py", PLAIN + "more = 1\n")
    assert make_source(Path("module:shop.train")).digest != before


def test_an_installed_package_has_relative_imports_only(package, tmp_path):
    (tmp_path / "shop-1.0.dist-info").mkdir()
    (tmp_path / "other.py").write_text("import lightning\n")
    package("train.py", "import other\nfrom .loop import main\n")
    package("loop.py", PLAIN)
    assert make_source(Path("module:shop.train")).script_kind == "deepspeed"


def test_what_an_installed_package_requires_shows_the_kind(package, tmp_path, monkeypatch):
    package("cli.py", "def main(): ...\n")
    (tmp_path / "train.py").write_text("from shop.cli import main\n")
    info = tmp_path / "shop-1.0.dist-info"
    info.mkdir()
    extra = 'Requires-Dist: deepspeed>=0.16; extra == "fast"'
    (info / "METADATA").write_text(f"Name: shop\nVersion: 1.0\nRequires-Dist: transformers<6,>=4.50\n{extra}\n")
    (info / "top_level.txt").write_text("shop\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert make_source(Path("module:shop.cli")).script_kind == "hf_trainer"
    assert make_source(tmp_path / "train.py", kind="script").script_kind == "hf_trainer"


def test_the_script_s_own_imports_decide_before_a_helper_s(package):
    package("train.py", "from transformers import Trainer\nfrom . import reference\n")
    package("reference.py", PLAIN)
    assert make_source(Path("module:shop.train")).script_kind == "hf_trainer"


def test_a_project_on_pythonpath_is_the_user_s_own(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "lib/engine_code.py").write_text(PLAIN)
    (tmp_path / "tools/train.py").write_text("import engine_code\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib")
    assert make_source(tmp_path / "tools/train.py").script_kind == "deepspeed"


def test_a_module_lies_in_a_folder_without_an_init(package, tmp_path):
    package("__init__.py", "")
    (tmp_path / "shop/training").mkdir()
    (tmp_path / "shop/training/run.py").write_text(PLAIN)
    assert make_source(Path("module:shop.training.run")).path == str(tmp_path / "shop/training/run.py")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shop.missing", r"-m shop.missing: there is no module shop.missing in .*start it from the folder"),
        ("shopp.train", r"there is no module shopp in"),
        ("shop", r"is a package without a __main__.py.*-m shop.train"),
        ("shop/train.py", r"is not a module name.*package.module"),
        ("train.py", r"is a file, and -m takes a module name.*drop -m"),
    ],
)
def test_a_name_that_is_no_module_is_refused(package, tmp_path, name, message):
    (tmp_path / "train.py").write_text(PLAIN)
    with pytest.raises(InputError) as refused:
        make_source(Path(f"module:{name}"))
    assert re.search(message, str(refused.value).replace("\n", " "))


def test_a_module_runs_as_with_python_m(package, capsys, monkeypatch):
    package("__init__.py", "")
    package("tools.py", "NAME = 'tools'\n")
    package("train.py", "from .tools import NAME\nprint(__name__, __package__, NAME)\n")
    monkeypatch.syspath_prepend(".")
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)
    run_as_main(make_source(Path("module:shop.train"), kind="deepspeed"))
    assert capsys.readouterr().out == "__main__ shop tools\n"


def test_each_launcher_starts_a_module(package):
    package("train.py", PLAIN)
    source = make_source(Path("module:shop.train"), argv=["--batch", "{micro_batch_size}"])
    report, script = fitting_report("out"), replace(describe_launch(source), kind="hf_trainer")
    commands = launch_commands(replace(report, question=replace(report.question, script=script)))
    assert commands["torchrun"].endswith("--nproc_per_node 2 -m shop.train --batch 4")
    assert " --module shop.train --batch 4" in commands["deepspeed"]
    assert commands["accelerate"].endswith(" -m shop.train --batch 4")


@pytest.mark.parametrize("name", ["fit", "plan", "probe"])
def test_every_command_takes_a_module(name):
    assert "module" in make_command(name, COMMANDS[name]).__annotations__


EARLY = """
import os
from os import environ
if True:
    os.environ["HF_HOME"] = "/hf"
environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.update({"A": "1", NAME: "2"}, B="3")
os.putenv("C", "4")
print(os.environ["READ"])

def main():
    os.environ["WANDB_PROJECT"] = "later"

from transformers import Trainer
os.environ["TOKENIZERS_PARALLELISM"] = "false"
"""


def test_variables_set_before_the_library_have_their_line(write):
    source = make_source(write(EARLY))
    assert source.script_kind == "hf_trainer"
    lines = {
        name: f"train.py:{line}"
        for name, line in {"HF_HOME": 5, "HF_HUB_OFFLINE": 6, "B": 7, "A": 7, "": 7, "C": 8}.items()
    }
    assert find_early_variables(source) == lines
    assert find_early_variables(make_source(write("from dotenv import load_dotenv\nload_dotenv()\n" + PLAIN))) == {
        "": "train.py:2"
    }
    assert find_early_variables(make_source(write(PLAIN))) == {}


@pytest.mark.parametrize(
    ("helper", "prepares"),
    [
        ("import transformers", False),
        ("import sys\nsys.path.insert(0, 'vendor')\nimport transformers", True),
        ("from sys import modules\nmodules['flash_attn'] = None\nimport transformers", True),
        ("import os, transformers\ndef go():\n    os.environ['HF_HOME'] = '/'", True),
        ("import transformers\nprint 'Python 2'", True),
    ],
)
def test_what_a_scripts_modules_do_before_imports_is_found(write, helper, prepares):
    script = write("import helper\n" + PLAIN)
    (script.parent / "helper.py").write_text(helper)
    source = make_source(script)
    assert prepares_imports(source) == prepares
    assert ("transformers" in find_packages(source)) == ("print" not in helper)


def test_a_launched_script_gets_the_config_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ds.json", "data.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "train.py").write_text("import deepspeed\n")

    def launched(*argv: str) -> tuple[str, ...]:
        return describe_launch(make_source(tmp_path / "train.py", argv=argv)).argv

    assert launched("--deepspeed_config", "ds.json", "--lr", "1") == ("--deepspeed_config", "{ds_config}", "--lr", "1")
    assert launched("--deepspeed=ds.json") == ("--deepspeed={ds_config}",)
    assert launched("--model-ds-config", "ds.json") == ("--model-ds-config", "{ds_config}")
    kept = ("--deepspeed", "--train-file", "data.json", "--deepspeed_config", "missing.json", "ds.json")
    assert launched(*kept) == kept
