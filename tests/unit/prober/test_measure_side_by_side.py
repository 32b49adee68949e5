"""Trials side by side: cells of a capacity on benches of their own, what they share, and how they end together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from autods.errors import EnvironmentBroken, InputError, Interrupted
from autods.events import Event, Note
from autods.journal import Journal
from autods.prober.probe_settings import ProbeSettings
from autods.report.results.probe import ProbeReport
from autods.runner.placement import NoRoom
from autods.runner.testing import failed, surface
from autods.types import Knobs, Outcome, Record, Trial
from tests.support.probes import LIMIT, MIB, Bench, ask, probed

SURFACE = surface(limit_bytes=LIMIT, state_bytes=100 * MIB, sample_bytes=20 * MIB)
TRIAL = Trial(rung="ddp", knobs=Knobs(), purpose="probe")
WAITS_S = 20.0


def capacity(folder: Path, *, parallel: int, rungs: str = "zero1,zero2") -> ProbeSettings:
    return ask(folder, f"rung={rungs}", capacity=True, forecast=False, parallel_trials=parallel)


def sizes(report: ProbeReport) -> list[tuple[int | None, int | None]]:
    return [(cell.capacity.verified, cell.capacity.refused) for cell in report.cells if cell.capacity]


def two(answer: Callable[[Trial], Outcome], other: Callable[[Trial], Outcome] | None = None, **said: Any) -> Bench:
    """A bench with room for one more."""
    return Bench(answer, room=lambda: nullcontext(Bench(other or answer)), **said)


def test_two_cells_are_searched_at_a_time_and_the_table_is_the_same(tmp_path: Path) -> None:
    meeting = threading.Barrier(2, timeout=WAITS_S)
    met: set[str] = set()

    def answer(trial: Trial) -> Outcome:
        if trial.rung not in met:  # the first trial of each cell waits for that of the other
            met.add(trial.rung)
            meeting.wait()
        return SURFACE(trial)

    (tmp_path / "one").mkdir()
    alone = probed(capacity(tmp_path / "one", parallel=1), Bench(SURFACE))
    together = probed(capacity(tmp_path, parallel=2), two(answer))
    assert sizes(together) == sizes(alone) == [(15, 16)] * 2
    assert len({record.id for record in together.trials}) == len(together.trials) == len(alone.trials)


def test_without_room_for_a_second_cells_run_one_by_one(tmp_path: Path) -> None:
    @contextmanager
    def full() -> Any:
        raise NoRoom("waiting for 2 GPUs on one node of the Ray cluster: 0 of 2 free")
        yield

    said: list[Event] = []
    report = probed(capacity(tmp_path, parallel=3, rungs="zero1,zero2,zero3"), Bench(SURFACE, room=full), said.append)
    assert sizes(report) == [(15, 16)] * 3
    assert [one.text for one in said if isinstance(one, Note) and "at a time" in one.text] == [
        f"no {number} trials at a time: waiting for 2 GPUs on one node of the Ray cluster: 0 of 2 free"
        for number in (2, 3)
    ]


@pytest.mark.parametrize("first_breaks", [True, False])
def test_what_ends_one_ends_the_other_and_its_trial_is_no_failure(tmp_path: Path, first_breaks: bool) -> None:
    """The disk is full for one while the other's trial runs: that is stopped, and asked again by the next run."""
    running = threading.Event()

    def hangs(trial: Trial) -> Outcome:
        running.set()
        assert bench.stopped.wait(WAITS_S)
        raise KeyboardInterrupt  # as `RunnerPool.run` does once it is stopped

    def breaks(trial: Trial) -> Outcome:
        assert running.wait(WAITS_S)
        return failed(failure="infrastructure", action="fix_environment", evidence="the disk is full")

    bench = two(breaks, hangs) if first_breaks else two(hangs, breaks)
    question = capacity(tmp_path, parallel=2)
    with pytest.raises(EnvironmentBroken, match="the disk is full"):
        probed(question, bench)
    past = Journal(question.settings.out / "journal.jsonl").open(fingerprint=question.fingerprint())
    assert past.unfinished == {}
    assert sizes(probed(question, two(SURFACE))) == [(15, 16)] * 2


def test_ctrl_c_ends_all_and_no_finished_trial_runs_again(tmp_path: Path) -> None:
    begun = threading.Event()

    def hangs(trial: Trial) -> Outcome:
        begun.set()
        assert bench.stopped.wait(WAITS_S)
        raise KeyboardInterrupt

    def answer(trial: Trial) -> Outcome:
        assert begun.wait(WAITS_S)
        return SURFACE(trial)

    bench = two(answer, hangs, killed_at=3)
    question = capacity(tmp_path, parallel=2)
    with pytest.raises(Interrupted):
        probed(question, bench)
    after = Bench(SURFACE)
    after.room = lambda: nullcontext(after)
    report = probed(question, after)
    assert sizes(report) == [(15, 16)] * 2
    assert len(after.asked) == len(report.trials) - 2


def test_what_the_journal_knows_needs_no_machine(tmp_path: Path) -> None:
    question = capacity(tmp_path, parallel=2)
    probed(question, two(SURFACE))
    again = Bench(lambda trial: pytest.fail("a trial was run again"))
    assert sizes(probed(question, again)) == [(15, 16)] * 2


def test_trials_that_shared_a_machine_tell_no_speed(tmp_path: Path) -> None:
    class Shared(Bench):
        def run(self, trial: Trial, *, id: int) -> Record:
            record = Bench.run(self, trial, id=id)
            return Record(
                id=id, trial=trial, outcome=record.outcome, seconds=1.0, neighbours=int(trial.rung == "zero2")
            )

    alone, shared = probed(capacity(tmp_path, parallel=1), Shared(SURFACE)).cells
    assert alone.samples_per_second is not None
    assert shared.samples_per_second is None
    assert shared.memory == alone.memory
    assert "its speed is not reported" in shared.reason


def test_timed_trials_are_not_run_side_by_side(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="would slow each other down"):
        ask(tmp_path, parallel_trials=2)
    with pytest.raises(InputError, match="--parallel-trials 0"):
        ask(tmp_path, capacity=True, parallel_trials=0)
