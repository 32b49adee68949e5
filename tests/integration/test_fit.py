"""A whole fit on real CPU ranks: what it tries, what it writes, what it remembers."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autods
from autods.events import Note
from autods.report.launch import launch_lines
from autods.report.serialize import to_dict
from autods.runner.runner import RayRunner
from autods.tuner.fit import fit
from autods.types import Fit
from tests.support import sibling
from tests.support.fits import ignore, question
from tests.support.launchers import run_line

# Nothing but pytest's own path finds this module or `sibling`: the ranks have to get them from here.
WIDTH = 16


def build_model():
    return sibling.Net(WIDTH)


def build_batch(micro_batch_size):
    return (torch.ones(micro_batch_size, WIDTH),)


USERS = {
    "gradient_clipping": 1.0,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1, "torch_adam": True}},
    "steps_per_print": 50,
    "zero_optimization": {"stage": 2, "round_robin_gradients": True},
    "wandb": {"enabled": True, "project": "mine"},
    "comet": {"enabled": True},
}


@pytest.fixture(scope="module")
def runner(ray, tmp_path_factory):
    with RayRunner(question("tiny.py", tmp_path_factory.mktemp("runner")), ignore) as started:
        yield started


@pytest.fixture
def run(runner):
    """`fit` on a zygote that is already there."""

    def run(settings, *, fresh=False, listen=ignore):
        def start(settings, listen):
            runner.settings, runner.listen = settings, listen
            return contextlib.nullcontext(runner)

        return fit(replace(settings, fresh=fresh), listen=listen, start=start)

    return run


def never(settings, listen):
    raise AssertionError("Ray was started")


def test_with_memory_to_spare_only_the_first_rung_is_tried(run, tmp_path):
    report = run(question("tiny.py", tmp_path))
    assert (report.status, report.rung) == ("fit", "ddp")
    assert {record.trial.rung for record in report.trials} == {"ddp"}
    assert report.reasons["zero3"] == "not tried: a rung before it fits"


def test_the_printed_lines_of_a_model_py_train_as_they_are(run, tmp_path):
    report = run(question("tiny.py", tmp_path / "out"))
    lines = dict(launch_lines(report))
    for name, launcher in (("launch", "torchrun"), ("or", "deepspeed")):
        assert f" {launcher} " in lines[name]
        done = run_line(f"{lines[name]} --steps 2", tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "step 2: loss" in done.stdout


def test_report_json_keeps_the_contract(run, tmp_path):
    run(question("tiny.py", tmp_path, ladder=("zero1",)))
    told = json.loads((tmp_path / "report.json").read_text())
    assert set(told) >= {
        "status", "rung", "knobs", "ds_config", "throughput", "memory", "certificate", "forecast", "trials",
        "versions", "hardware", "seconds",
    }  # fmt: skip
    assert set(told["throughput"]) == {"samples_per_second", "tokens_per_second"}
    assert set(told["memory"]) == {"device", "host", "pinned", "nvme"}
    assert 0 < told["memory"]["device"]["peak_bytes"] < told["memory"]["device"]["limit_bytes"] == 2**30
    assert [trial["id"] for trial in told["trials"]] == list(range(1, len(told["trials"]) + 1))
    for trial in told["trials"]:
        assert set(trial) >= {"id", "rung", "knobs", "phase", "outcome", "seconds"}
        assert trial["outcome"]["kind"] == "fit"
    assert {trial["phase"] for trial in told["trials"]} >= {"walk", "grow", "tune"}
    assert told["ds_config"] == json.loads((tmp_path / "ds_config.json").read_text())


def test_the_config_keeps_untuned_keys_and_trials_log_nowhere(run, tmp_path):
    elsewhere = tmp_path / "dashboards"
    users = USERS | {
        "csv_monitor": {"enabled": True, "output_path": str(elsewhere), "job_name": "mine"},
        "tensorboard": {"enabled": True, "output_path": str(elsewhere)},  # not installed here, nor is wandb
    }
    report = run(question("tiny.py", tmp_path / "out", ladder=("zero1",), base_config=users))
    emitted = json.loads((tmp_path / "out" / "ds_config.json").read_text())
    untouched = set(users) - {"zero_optimization", "optimizer"}
    assert {key: emitted[key] for key in untouched} == {key: users[key] for key in untouched}
    assert emitted["optimizer"]["params"].items() >= {"lr": 3e-4, "weight_decay": 0.1}.items()
    assert emitted["zero_optimization"].items() >= {"stage": 1, "round_robin_gradients": True}.items()
    assert report.status == "fit"
    assert not elsewhere.exists()


def test_a_global_batch_is_kept_by_accumulation(run, tmp_path):
    report = run(question("tiny.py", tmp_path, global_batch=24, ladder=("ddp",)))
    sizes = [report.ds_config[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    assert report.ds_config["train_batch_size"] == 24 == sizes[0] * sizes[1] * 2


def test_a_finished_fit_is_shown_again_unless_fresh(run, tmp_path):
    settings = question("tiny.py", tmp_path, ladder=("ddp",))
    first = run(settings)
    notes: list[object] = []
    assert to_dict(fit(settings, listen=notes.append, start=never)) == to_dict(first)
    assert [type(note) for note in notes] == [Note]
    assert "--fresh" in notes[0].text
    again = run(settings, fresh=True)
    assert again.rung == first.rung
    assert again.seconds != first.seconds


def test_the_closest_rung_is_named_with_the_missing_bytes(run, tmp_path):
    report = run(question("tiny.py", tmp_path, gpu_memory="1MiB", ladder=("ddp", "zero1", "zero3")))
    assert report.status == "nothing_fits"
    assert {record.outcome.kind for record in report.trials if record.trial.limited} == {"out_of_memory"}
    assert report.closest.rung in ("ddp", "zero1", "zero3")
    assert report.closest.missing_bytes > 0
    assert report.closest.exact
    assert not (tmp_path / "ds_config.json").exists()


def test_functions_and_a_file_give_the_same_kind_of_report(ray, tmp_path):
    workload = autods.Workload(build_model=build_model, build_batch=build_batch)
    seen: list[object] = []
    report = autods.find_best_config(
        workload,
        gpus=2,
        device="cpu",
        gpu_memory="1GiB",
        config="quick",
        max_trials=3,
        forecast=False,
        out=tmp_path,
        on_event=seen.append,
    )
    assert (report.status, report.rung) == ("fit", "ddp")
    assert report.question.workload == "build_model"
    assert report.ds_config == json.loads((tmp_path / "ds_config.json").read_text())
    assert seen


def test_a_workload_may_bring_optimizer_loss_and_config(ray, tmp_path):
    workload = Path(__file__).parent / "workloads" / "complete.py"
    settings = question("complete.py", tmp_path, ladder=("zero1",))
    assert settings.source.name == workload.stem
    report = fit(replace(settings, profile=replace(settings.profile, tune=replace(settings.profile.tune, trials=0))),
                 listen=ignore)  # fmt: skip
    assert report.status == "fit"
    assert "optimizer" not in report.ds_config
    assert report.ds_config["gradient_clipping"] == 0.5


def test_with_a_forecast_fewer_trials_give_the_same_answer(ray, tmp_path):
    asked = {"gpu_memory": "190MiB", "ladder": ("ddp", "zero1"), "max_trials": 3}
    settings = question("wide.py", tmp_path / "with", global_batch=8, **asked)  # else micro batches grow to seconds
    with RayRunner(replace(settings, out=tmp_path / "runner"), ignore) as started:

        def fitted(folder, **said):
            started.settings = replace(settings, out=tmp_path / folder, **said)
            return fit(started.settings, listen=ignore, start=lambda settings, listen: contextlib.nullcontext(started))

        foreseen, walked = fitted("with", forecast=True), fitted("without")
    assert foreseen.rung == walked.rung == "zero1"
    cannot = {row.rung for row in foreseen.forecast if row.verdict == "cannot_fit"}
    assert cannot == {skip.rung for skip in foreseen.skipped} == {"ddp"}
    tried = [{record.trial.rung for record in report.trials} for report in (foreseen, walked)]
    assert tried == [{"zero1"}, {"ddp", "zero1"}]
    forecast = next(row for row in foreseen.forecast if row.rung == "zero1")
    measured = next(each.outcome for each in foreseen.trials if each.trial.knobs.micro_batch == forecast.micro_batch)
    assert isinstance(measured, Fit)
    assert measured.device_peak_bytes == pytest.approx(forecast.memory["device"].peak_bytes, rel=0.2)
