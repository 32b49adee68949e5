from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autods.events import Note, RankPrinted, StepDone
from autods.journal import Journal
from autods.rank.training_run.checkpoints import Layout, Manifest, write_manifest
from autods.runner.node_messages import Heartbeat, TierLevel
from autods.supervisor.progress import AttemptProgress
from autods.supervisor.run_journal import RunJournal
from autods.supervisor.run_settings import RunSettings
from tests.support.walks import SETTINGS

GIB = 2**30


@pytest.fixture
def attempt(tmp_path):
    """A folder of an attempt, what follows it, and the events."""
    folder, events = tmp_path / "attempts" / "1", []
    folder.mkdir(parents=True)
    fit = replace(SETTINGS, nvme_path=None, out=tmp_path / "fit", global_batch=8)
    settings = RunSettings(fit=fit, out=tmp_path, steps=100)
    progress = AttemptProgress(
        folder, 4, settings=settings, device_bytes=64 * GIB, journal=RunJournal(tmp_path), listen=events.append
    )
    return folder, progress, events


def write_steps(folder, *steps, **measured):
    with open(folder / "steps.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 1.0, "seconds": 0.1, "steps": 100, **measured}) + "\n")


def test_each_line_of_a_step_is_an_event(attempt):
    folder, progress, events = attempt
    write_steps(folder, 5, 6, 7)
    progress.finish()
    assert [event.step for event in events if isinstance(event, StepDone)] == [5, 6, 7]
    assert progress.step == 7


def test_a_heartbeat_tells_of_steps_without_a_line(attempt):
    folder, progress, _ = attempt
    write_steps(folder, 5, 6)
    progress.look(Heartbeat(phase="backward", step=9))
    progress.finish()
    assert progress.step == 9


def test_a_rank_that_has_not_restored_its_step_yet_sets_nothing_back(attempt):
    _, progress, _ = attempt
    progress.look(Heartbeat(phase="build", step=0))
    assert progress.step == 4


def test_a_saved_checkpoint_is_noted_without_its_files(attempt, monkeypatch):
    """There are thousands of them on a shared file system, and every look would ask for each."""
    folder, progress, _ = attempt
    checkpoints, looked = folder.parents[1] / "checkpoints", []
    for step, complete in ((4, True), (8, True), (12, False)):
        saved = checkpoints / f"step-{step:08d}"
        (saved / "state").mkdir(parents=True)
        (saved / "state" / "weights.pt").write_bytes(b"w")
        manifest = Manifest(
            step=step, samples=8, global_batch=2, seed=0, layout=Layout(stage=1, world_size=1), optimizer="Adam",
            files={"state/weights.pt": 1},
        )  # fmt: skip
        if complete:
            write_manifest(saved, manifest)
    stat = Path.stat

    def note(path, **options):
        looked.append(path.name)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", note)
    progress.finish()
    assert [row["step"] for row in Journal(folder.parents[1] / "run.jsonl").read_rows()] == [4, 8]
    assert "weights.pt" not in looked


def take_steps(monkeypatch):
    """Yield steps that last 1.5 s each, long enough to be looked at one by one."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for step in range(5, 50):
        now[0] += 1.5
        yield step


def test_a_disk_that_fills_on_another_node_is_a_warning(attempt, monkeypatch):
    folder, progress, events = attempt
    for step in take_steps(monkeypatch):
        write_steps(folder, step)
        use = TierLevel(tier="nvme", used_bytes=step * GIB, total_bytes=64 * GIB, node="10.0.0.2")
        progress.look(Heartbeat(phase="forward", step=step, tiers=(use,)))
    (warning,) = [str(event) for event in events if isinstance(event, Note)]
    assert warning.startswith("warning: disk space (NVMe) of node 10.0.0.2 fills by 1.0 GiB a step")
    assert warning.endswith("at about step 64")


def test_a_device_that_fills_runs_out_at_its_ranks_limit(attempt, monkeypatch):
    folder, progress, events = attempt
    for step in take_steps(monkeypatch):
        write_steps(folder, step, device_peak_bytes=step * GIB)
        progress.look()
    (warning,) = [str(event) for event in events if isinstance(event, Note)]
    assert warning.endswith("at about step 64")


def test_warnings_of_libraries_stay_in_the_log(attempt):
    folder, progress, events = attempt
    log = folder / "ranks" / "rank0.log"
    log.parent.mkdir()
    place = "/venv/lib/python3.11/site-packages/torch/distributed.py:3"
    log.write_text(f"loss 1.0\n{place}: FutureWarning: old\n{place}4: UserWarning: new\nWarning: mine\n")
    progress.finish()
    assert [str(event) for event in events if isinstance(event, Note)] == [f"warnings of libraries are in {log}"]
    assert [event.text for event in events if isinstance(event, RankPrinted)] == ["loss 1.0", "Warning: mine"]
