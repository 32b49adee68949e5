from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autods.events import Note, StepDone
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
    progress = AttemptProgress(folder, 4, settings=settings, journal=RunJournal(tmp_path), listen=events.append)
    return folder, progress, events


def write_steps(folder, *steps):
    with open(folder / "steps.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 1.0, "seconds": 0.1, "steps": 100}) + "\n")


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


def test_a_disk_that_fills_on_another_node_is_a_warning(attempt, monkeypatch):
    folder, progress, events = attempt
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for step in range(5, 50):
        now[0] += 1.5
        write_steps(folder, step)
        use = TierLevel(tier="nvme", used_bytes=step * GIB, total_bytes=64 * GIB, node="10.0.0.2")
        progress.look(Heartbeat(phase="forward", step=step, tiers=(use,)))
    (warning,) = [event.text for event in events if isinstance(event, Note)]
    assert warning.startswith("warning: disk space (NVMe) of node 10.0.0.2 fills by 1.0 GiB a step")
    assert warning.endswith("at about step 64")
