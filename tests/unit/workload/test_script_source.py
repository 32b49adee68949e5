"""A training script is told from a model.py by its source, and its arguments are fill_placeholders in."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from autods.errors import InputError
from autods.types import WorkloadSource
from autods.workload import make_source
from autods.workload.script_source import describe_launch, fill_placeholders

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
        ("from sentence_transformers import SentenceTransformerTrainer\n", "hf_trainer"),
        ("from lightning.fabric import Fabric\n", "lightning"),
        ("from accelerate import Accelerator\nfrom transformers import AutoModel\n", "accelerate"),
        ("import lightning as L\n", "lightning"),
        ("import pytorch_lightning as pl\nimport deepspeed\n", "lightning"),
        ("def main():\n    import deepspeed\n", "deepspeed"),
    ],
)
def test_the_kind_of_a_script_is_seen_in_its_imports(write, text, kind):
    source = make_source(write(text))
    assert (source.kind, source.script_kind) == ("script", kind)


def test_a_script_whose_engine_is_made_by_a_module_beside_it_is_seen_through_it(write):
    write(PLAIN, "loop.py")
    assert make_source(write("import loop\nloop.main()\n")).script_kind == "deepspeed"


def test_a_file_that_defines_model_and_batch_is_a_model_whatever_it_imports(write):
    assert make_source(write(PLAIN + MODEL)).kind == "file"


def test_a_script_may_define_one_of_the_two(write):
    assert make_source(write(PLAIN + "def build_model(): ...\n")).kind == "script"


def test_kind_overrides_what_the_file_shows(write):
    path = write("import launcher\nlauncher.train()\n")
    assert make_source(path, kind="script").script_kind is None
    assert make_source(path, kind="accelerate").script_kind == "accelerate"
    assert make_source(write(PLAIN + MODEL), kind="script").kind == "script"


@pytest.mark.parametrize(
    ("text", "asked", "says"),
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
def test_what_is_neither_or_contradicts_itself_is_refused(write, text, asked, says):
    with pytest.raises(InputError, match=says):
        make_source(write(text), **asked)


def test_another_argument_another_module_or_another_named_file_is_another_workload(write, monkeypatch):
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


def test_a_source_survives_its_way_through_json(write):
    source = make_source(write(PLAIN), argv=["--batch", "{micro_batch_size}"])
    assert WorkloadSource(**json.loads(json.dumps(asdict(source)))) == source


def test_placeholders_are_filled_in_and_all_other_braces_stay():
    values = {
        "ds_config": "/tmp/a.json",
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 16,
    }
    argv = ["--ds={ds_config}", "{micro_batch_size}", '{"lr": 1}', "{other}", "{}", "{gradient_accumulation_steps}"]
    assert fill_placeholders(argv, values) == ["--ds=/tmp/a.json", "4", '{"lr": 1}', "{other}", "{}", "2"]


FIRE = "import deepspeed, fire\ndeepspeed.initialize\ndef train(batch: int = 8{}): ...\nfire.Fire(train)\n"


def test_a_local_rank_that_fire_reads_is_given_by_the_deepspeed_launcher(write):
    with_it, without = FIRE.format(", local_rank: int = -1"), FIRE.format("")
    assert describe_launch(make_source(write(with_it)))["takes_local_rank"]
    assert not describe_launch(make_source(write(without)))["takes_local_rank"]


def test_an_argument_of_that_name_is_no_option_where_no_command_line_is_made_of_functions(write):
    text = "import deepspeed\ndeepspeed.initialize\ndef setup(local_rank): ...\n"
    assert not describe_launch(make_source(write(text)))["takes_local_rank"]
