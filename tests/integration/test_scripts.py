"""Unmodified training scripts on real CPU ranks: trials and fits that leave the user's files as they are."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autods.events import Note
from autods.system.host import read_hardware
from autods.system.landlock import find_version
from autods.tuner.fit import fit
from autods.tuner.loss_parity import largest_difference, why_not_comparable
from autods.types import Fit, OutOfMemory
from autods.workload import make_source
from tests.support.script_trials import a_trial, kept_runners, untouched
from tests.support.settings import fit_settings

SCRIPTS = Path(__file__).parent / "scripts"

# Where the kernel refuses them, this script also writes in its folder by C code and by a program that it starts.
CONFINED = find_version() >= 3
BESIDE_PYTHON = ("beside-python",) * CONFINED
# Ways in which plain scripts make their engine, each with a command line.
STYLES = {
    "args": ("with_args.py", ("--deepspeed_config", "{ds_config}", "--micro-batch", "{micro_batch_size}")),
    "dict": ("with_dict.py", ("{micro_batch_size}", "{gradient_accumulation_steps}", "0", *BESIDE_PYTHON)),
    "loader": ("with_loader.py", ("own.json",)),
    "partition": ("with_partition.py", ("{ds_config}",)),
}
PIPELINE = ("with_stages.py", ("{ds_config}",))


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    with untouched(SCRIPTS, tmp_path_factory.mktemp("users") / "project") as folder:
        yield folder


@pytest.fixture(scope="module")
def make_settings(users, tmp_path_factory):
    """A function that makes the settings for a script of the folder."""

    def make(name, argv, out=None, *, certified=False, **options):
        with contextlib.chdir(users):
            source = make_source(users / name, argv=argv)
        out = out or tmp_path_factory.mktemp("out")
        options = {
            "gpus": 2,
            "device": "cpu",
            "gpu_memory": "1GiB",
            "config": "quick",
            "out": out,
            "forecast": False,
            **options,
        }
        settings = fit_settings(source, hardware=read_hardware(), **options)
        profile = settings.profile
        limits = replace(profile.limits, stall_s=100.0, init_s=200.0)
        certify = profile.certify if certified else replace(profile.certify, most_trials=0)
        return replace(settings, profile=replace(profile, limits=limits, certify=certify))

    return make


@pytest.fixture(scope="module")
def started(ray, make_settings):
    with kept_runners(make_settings) as started:
        yield started


@pytest.fixture(scope="module")
def runner_of(started):
    """A surveyed runner for a style."""
    return lambda style: started(*STYLES.get(style, PIPELINE))


@pytest.mark.parametrize("style", sorted({*STYLES} - {"args"}))  # that one is in test_script_kinds
@pytest.mark.parametrize("rung", ["ddp", "zero2", "zero3"])
def test_a_script_trains_at_every_stage(runner_of, style, rung):
    outcome = runner_of(style).run(a_trial(rung), id=1).outcome
    assert isinstance(outcome, Fit), outcome
    assert len(outcome.step_s) == 3
    assert len(outcome.losses) == 4
    assert all(0 < loss < 400 for loss in outcome.losses)
    assert outcome.device_peak_bytes > 0


def test_a_script_s_changes_to_the_config_file_are_its_own(runner_of):
    runner = runner_of("partition")
    assert runner.facts.config == {"gradient_clipping": 1.0}
    outcome = runner.run(a_trial("zero3", exam="worst_case"), id=3).outcome
    assert isinstance(outcome, Fit), outcome
    assert outcome.tokens_per_second == pytest.approx(16 * outcome.samples_per_second)
    assert outcome.examined.restored is True
    assert outcome.examined.gathered is True
    assert outcome.examined.batch_shape == (4, 16)


def test_the_survey_finds_a_pipeline_and_sends_are_counted(runner_of):
    runner = runner_of("stages")
    assert (runner.facts.pipeline_stages, runner.facts.replica_ranks) == (2, 2)
    outcome = runner.run(a_trial("ddp", exam="worst_case"), id=4).outcome
    assert isinstance(outcome, Fit), outcome
    assert outcome.communication.ops["send"].calls > 0
    assert not outcome.examined.evaluated
    assert any("evaluation was not run" in reason for reason in outcome.examined.left_out)


def test_the_survey_reads_the_script_s_model_and_config(runner_of):
    facts = runner_of("dict").facts
    assert facts.parameters == 2 * (16 * 16 + 16)
    assert facts.has_optimizer
    assert not facts.checkpointing
    assert facts.writes_confined is CONFINED
    assert facts.config["gradient_clipping"] == 0.5
    assert "train_micro_batch_size_per_gpu" not in facts.config


def test_a_script_s_config_file_is_the_base_and_sets_the_batch(runner_of):
    runner = runner_of("loader")
    config = runner.final_config(a_trial("zero2", micro_batch=4, accumulation=2))
    assert config["optimizer"]["params"]["lr"] == 0.01
    assert config["scheduler"]["type"] == "WarmupLR"
    assert config["zero_optimization"]["stage"] == 2
    assert runner.settings.global_batch == 16


def test_the_filled_in_config_file_is_not_the_script_s_own(runner_of):
    facts = runner_of("args").facts
    assert not facts.config
    assert [use.startswith("nccl (") and "/with_args.py:" in use for use in facts.stood_in] == [True]


def test_a_script_gets_the_micro_batch_size(runner_of):
    runner = runner_of("args")
    fits = [runner.run(a_trial("ddp", micro_batch=size, accumulation=1), id=2).outcome for size in (2, 8)]
    assert all(isinstance(outcome, Fit) for outcome in fits), fits


def test_losses_agree_between_stages_but_not_after_a_change(runner_of):
    def losses(rung, **settings):
        trial = a_trial(rung, exam="parity")
        trial = replace(trial, knobs=replace(trial.knobs, settings={**trial.knobs.settings, **settings}))
        outcome = runner_of("args").run(trial, id=1).outcome
        assert isinstance(outcome, Fit), outcome
        return outcome

    plain, split = losses("ddp"), losses("zero3")
    assert why_not_comparable(split, plain) is None
    assert largest_difference(split.losses, plain.losses) < 1e-5
    changed = losses("zero2", gradient_clipping=1e-9)  # below Adam's epsilon
    assert why_not_comparable(changed, plain) is None
    assert largest_difference(changed.losses, plain.losses) > 1e-5


def test_evaluation_and_saving_between_steps_are_not_timed(started):
    name, argv = STYLES["dict"]
    outcome = started(name, (*argv[:2], "0.5")).run(a_trial("ddp"), id=1).outcome
    assert isinstance(outcome, Fit)
    assert min(outcome.step_s) < 0.5  # after each of them the script evaluates, and sleeps so long


def test_out_of_memory_is_caught_and_a_leaner_rung_fits(started):
    argv = (*STYLES["args"][1], "--width", "1600", "--samples", "64")
    runner = started("with_args.py", argv, gpu_memory="184MiB")
    outcome = runner.run(a_trial("ddp"), id=1).outcome
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.tier == "device"
    leaner = runner.run(a_trial("zero2", micro_batch=1, accumulation=1), id=2).outcome
    assert isinstance(leaner, Fit), leaner
    assert leaner.device_peak_bytes <= 184 * 2**20


def test_a_fit_of_a_script_passes_and_resumes(make_settings, users, ray, tmp_path):
    notes: list[str] = []

    def listen(event):
        if isinstance(event, Note):
            notes.append(event.text)

    settings = make_settings(*STYLES["args"], out=tmp_path, certified=True)
    report = fit(settings, listen=listen)
    assert (report.status, report.rung) == ("fit", "ddp")
    assert any("with_args.py is a DeepSpeed script" in note for note in notes)
    assert not any("no forecast" in note for note in notes)
    certificate = report.certificate
    assert certificate.failures == ()
    assert certificate.evaluated
    assert certificate.checkpoint.restored is True
    assert certificate.passed  # quick compares no losses
    assert json.loads((tmp_path / "ds_config.json").read_text()) == report.ds_config

    def read_trials() -> list[str]:
        rows = (tmp_path / "journal.jsonl").read_text().splitlines()
        return [row for row in rows if json.loads(row)["kind"] != "warned"]  # of a machine that is busy

    rows = read_trials()
    (tmp_path / "report.json").unlink()
    again = fit(settings, listen=listen)
    assert any(note.startswith("resuming: ") for note in notes)
    assert again.rung == report.rung
    assert read_trials() == rows
