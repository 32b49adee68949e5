"""Real trials on CPU ranks: a rung that fits reports its speed and memory, and a trial leaves no rank behind."""

from __future__ import annotations

import os

import psutil
import pytest

from autods.events import Note
from autods.runner.runner import RayRunner
from autods.types import Fit, Knobs, Steps, Trial
from tests.support.fits import TORCH_ADAM, question

SMALL_BUCKETS = {f"zero_optimization.{name}_bucket_size": 1_000_000 for name in ("reduce", "allgather")}


def a_trial(rung: str, **knobs: object) -> Trial:
    """torch's optimizer, in place of an op that would have to be built."""
    settings = {**TORCH_ADAM, **knobs.pop("settings", {})}
    return Trial(rung=rung, knobs=Knobs(checkpointing=False, settings=settings, **knobs), purpose="walk")


@pytest.mark.parametrize("rung", ["ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload-param"])
def test_a_tiny_model_fits_on_every_rung_that_needs_no_op(runners, rung):
    record = runners().run(a_trial(rung), id=1)
    assert isinstance(record.outcome, Fit), record.outcome
    assert record.outcome.samples_per_second > 0
    assert 0 < record.outcome.device_peak_bytes < 2**30


def test_a_model_that_is_compiled_trains_compiled(runners):
    record = runners("compiled.py").run(a_trial("ddp"), id=5)
    assert isinstance(record.outcome, Fit), record.outcome


def test_the_loss_falls_over_the_steps_of_a_trial(runners):
    steps = Steps(warmup=1, timed=6, most_timed=6)
    record = runners().run(Trial(rung="zero1", knobs=Knobs(checkpointing=False), purpose="grow", steps=steps), id=2)
    assert isinstance(record.outcome, Fit), record.outcome
    assert len(record.outcome.losses) == 7
    assert record.outcome.losses[-1] < record.outcome.losses[0]


def test_samples_count_micro_batch_accumulation_and_ranks(runners):
    record = runners().run(a_trial("zero1", micro_batch=4, accumulation=3), id=3)
    assert isinstance(record.outcome, Fit), record.outcome
    step_s = record.outcome.step_s[0]
    assert record.outcome.samples_per_second == pytest.approx(4 * 3 * 2 / step_s)


@pytest.mark.parametrize("rung", ["ddp", "zero1", "zero2", "zero3"])
def test_every_step_trains_all_of_its_micro_batches(runners, rung):
    record = runners("downhill.py", precision="fp32").run(a_trial(rung, accumulation=8, settings=SMALL_BUCKETS), id=6)
    assert isinstance(record.outcome, Fit), record.outcome
    fallen = [8 - loss for loss in record.outcome.losses]  # by the micro batches of the steps before, an eighth each
    assert fallen == pytest.approx([0, 1])
    assert len(record.outcome.step_s) == 1


def test_a_trial_leaves_no_rank_and_no_scratch_folder(runners):
    runner = runners()
    runner.run(a_trial("zero3"), id=4)
    assert not list((runner.settings.out / "logs").glob("*/scratch"))
    assert ranks_of(runner) == []


def ranks_of(runner) -> list[str]:
    """Pids of what the runner's zygotes forked, without the process that keeps the model; not those of other tests."""
    zygotes = [int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if is_zygote_of(runner, pid)]
    assert zygotes
    children = [child for pid in zygotes for child in open(f"/proc/{pid}/task/{pid}/children").read().split()]
    return [pid for pid in children if open(f"/proc/{pid}/comm").read() != "autods-builder\n"]


def is_zygote_of(runner, pid) -> bool:
    try:
        words = open(f"/proc/{pid}/cmdline").read().split("\0")
    except OSError:
        return False
    is_ours = {"autods.runner.zygote", str(os.getpid())} <= set(words)  # it is told its driver's pid
    return is_ours and any(runner.settings.source.path in word for word in words)


def test_our_ray_can_be_reached_from_this_machine_alone(ray):
    own = psutil.Process()
    links = [link for one in (own, *own.children(recursive=True)) for link in one.net_connections("inet")]
    listening = {link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN}
    assert listening
    assert {ip for ip in listening if not ip.removeprefix("::ffff:").startswith("127.") and ip != "::1"} == set()


def test_ranks_that_must_not_be_forked_are_new_processes(ray, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTODS_SPAWN", "1")
    said = []
    with RayRunner(question("tiny.py", tmp_path), said.append) as runner:
        runner.survey()
        fits = runner.run(a_trial("zero1"), id=1).outcome
    assert isinstance(fits, Fit), fits
    assert any("new processes" in note.text for note in said if isinstance(note, Note))
