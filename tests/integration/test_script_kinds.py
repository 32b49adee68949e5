"""Trials of each kind of script on real CPU ranks: a plain one, and those whose engine is called by a library."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autods.errors import InputError
from autods.report import to_dict
from autods.system.host import read_hardware
from autods.tuner.fit import fit
from autods.types import Fit, OutOfMemory
from autods.workload import make_source
from tests.support.fits import ignore
from tests.support.script_trials import a_trial, kept_runners, untouched
from tests.support.settings import fit_settings

SCRIPTS = Path(__file__).parent / "scripts_hf"

SIZES = ("--per_device_train_batch_size", "{micro_batch_size}")
ACCUMULATION = ("--gradient_accumulation_steps", "{gradient_accumulation_steps}")
# Evaluates and saves at every step, and reports to whoever is installed.
BUSY = ("--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1", "--report_to", "all")
HF = ("--deepspeed", "{ds_config}", *SIZES, *ACCUMULATION, "--bf16", "--use_cpu", "--output_dir", "saved", *BUSY)

TRAINERS = {
    "hf_trainer": ("trainer.py", HF),
    "accelerate": ("accelerated.py", ("--batch_size", "{micro_batch_size}", "--save", "saved")),
    "lightning": (
        "lit.py",
        ("--deepspeed_config", "{ds_config}", "--batch_size", "{micro_batch_size}", "--accumulate",
         "{gradient_accumulation_steps}"),
    ),
}  # fmt: skip
PLAIN = str(SCRIPTS.parent / "scripts" / "with_args.py")
KINDS = {
    "deepspeed": (PLAIN, ("--deepspeed_config", "{ds_config}", "--micro-batch", "{micro_batch_size}")),
    **TRAINERS,
}


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    with untouched(SCRIPTS, tmp_path_factory.mktemp("users") / "project") as folder:
        yield folder


@pytest.fixture(scope="module")
def make_settings(users, tmp_path_factory):
    """A function that makes the settings for a script of that folder."""

    def make(name, argv, out=None, **options):
        with contextlib.chdir(users):
            source = make_source(users / name, argv=argv)
        out = out or tmp_path_factory.mktemp("out")
        said = {"gpus": 2, "device": "cpu", "gpu_memory": "1GiB", "config": "quick", "out": out, **options}
        settings = fit_settings(source, hardware=read_hardware(), **said)
        limits = replace(settings.profile.limits, stall_s=100.0, init_s=200.0)
        return replace(settings, profile=replace(settings.profile, limits=limits))

    return make


@pytest.fixture(scope="module")
def started(ray, make_settings):
    with kept_runners(make_settings) as started:
        yield started


def test_a_fit_of_a_trainer_script_passes_and_resumes(started, make_settings, tmp_path):
    runner = started(*KINDS["hf_trainer"])
    asked = {"max_trials": 2, "global_batch": 16, "ladder": ("zero2",)}  # else micro batches grow to steps of seconds
    settings = make_settings("trainer.py", HF, tmp_path, forecast=False, **asked)
    uncertified = replace(settings.profile.certify, most_trials=0)  # the exam of a Trainer has its own test
    settings = replace(settings, profile=replace(settings.profile, certify=uncertified))

    def start(settings, listen):
        runner.settings = settings
        return contextlib.nullcontext(runner)

    report = fit(settings, listen=ignore, start=start)
    assert (report.status, report.rung) == ("fit", "zero2")
    written = json.loads((tmp_path / "ds_config_hf.json").read_text())
    assert (written["bf16"]["enabled"], written["train_micro_batch_size_per_gpu"]) == ("auto", "auto")
    assert f"--deepspeed {tmp_path}/ds_config_hf.json" in to_dict(report)["launch"]["torchrun"]

    rows = (tmp_path / "journal.jsonl").read_text()
    (tmp_path / "report.json").unlink()
    assert fit(settings, listen=ignore, start=start).rung == "zero2"
    assert (tmp_path / "journal.jsonl").read_text() == rows


@pytest.mark.parametrize("rung", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_at_every_stage(started, kind, rung):
    runner = started(*KINDS[kind])
    assert runner.settings.source.script_kind == kind
    outcome = runner.run(a_trial(rung), id=1).outcome
    assert isinstance(outcome, Fit), outcome
    assert len(outcome.step_s) == 3
    assert all(0 < loss < (400 if kind == "deepspeed" else 10) for loss in outcome.losses)


def test_a_trainer_s_model_recomputes_where_the_trial_says_so(started):
    """Of 64 samples the activations of two layers are 20 MiB, and their inputs one."""
    runner = started(*KINDS["hf_trainer"])
    assert (runner.facts.checkpointing, runner.facts.recomputes) == (True, False)
    peaks = {}
    for on in (True, False):
        trial = a_trial("zero3", micro_batch=64, checkpointing=on)
        outcome = runner.run(trial, id=2).outcome
        assert isinstance(outcome, Fit), outcome
        peaks[on] = outcome.device_peak_bytes
    assert peaks[True] < peaks[False] - (5 << 20)


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_precision_is_the_script_s(started, kind):
    facts = started(*KINDS[kind]).facts
    assert facts.config.get("bf16") == (None if kind == "accelerate" else {"enabled": True})
    assert facts.has_optimizer


def test_the_trainer_fills_in_auto_of_a_base_config(started):
    base = {
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "zero_optimization": {"reduce_bucket_size": "auto"},
    }  # fmt: skip
    runner = started(*KINDS["hf_trainer"], base_config=base)
    assert not runner.facts.has_optimizer
    outcome = runner.run(a_trial("zero2"), id=1).outcome
    assert isinstance(outcome, Fit), outcome
    config = runner.final_config(a_trial("zero2"))
    assert config["optimizer"]["params"]["lr"] == "auto"
    assert config["bf16"] == {"enabled": True}


def test_a_dummy_optimizer_becomes_one_of_the_config(started, users):
    argv = (*KINDS["accelerate"][1], "--dummy")
    runner = started("accelerated.py", argv)
    assert not runner.facts.has_optimizer
    assert runner.facts.config["optimizer"]["params"]["lr"] == "auto"
    outcome = runner.run(a_trial("zero2"), id=1).outcome
    assert isinstance(outcome, Fit), outcome


@pytest.mark.parametrize("kind", TRAINERS)
def test_out_of_memory_is_caught(started, kind):
    runner = started(*KINDS[kind])
    settings = runner.settings
    runner.switch_to(replace(settings, device_bytes=16 * 2**20))
    outcome = runner.run(a_trial("ddp"), id=1).outcome
    runner.switch_to(settings)
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.tier == "device"
    # That is what a thread says that cannot start, unless it hangs: a process group starts all of its threads.
    assert "Resource temporarily unavailable" not in outcome.evidence


@pytest.mark.parametrize(
    ("left_out", "added", "message"),
    [
        (("--deepspeed", "{ds_config}"), (), "add `--deepspeed {ds_config}` after --"),
        (SIZES, ("--run_name", "{micro_batch_size}"), "let it take the value that {micro_batch_size} stands for"),
    ],
)
def test_a_trainer_argument_that_is_missing_is_reported(started, left_out, added, message):
    argv = tuple(word for word in HF if word not in left_out)
    with pytest.raises(InputError) as caught:
        started("trainer.py", (*argv, *added))
    assert message in str(caught.value)


def test_a_trainer_without_placeholders_gets_the_trials_sizes(started):
    argv = tuple(word for word in HF if word not in (*SIZES, *ACCUMULATION))
    runner = started("trainer.py", (*argv, "--per_device_train_batch_size", "64"))
    outcome = runner.run(a_trial("ddp", micro_batch=4), id=1).outcome
    assert isinstance(outcome, Fit), outcome
    config = runner.final_config(a_trial("ddp", micro_batch=4))
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 2)


@pytest.mark.parametrize("kind", ["hf_trainer", "lightning"])
def test_the_worst_case_exam_saves_loads_and_trains_on(started, kind):
    outcome = started(*KINDS[kind]).run(a_trial("zero2", exam="worst_case"), id=1).outcome
    assert isinstance(outcome, Fit), outcome
    assert outcome.examined.restored is True
    assert json.loads(json.dumps(outcome.examined.batch_shape)) == [4, 32]
