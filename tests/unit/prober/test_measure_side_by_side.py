"""Trials side by side: cells of a capacity on benches of their own, what they share, and how they end together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autods.errors import EnvironmentBroken, InputError, Interrupted
from autods.events import Event, Note
from autods.journal import Journal
from autods.prober.request import Question
from autods.report.results import ProbeReport
from autods.runner.placement import NoRoom
from autods.runner.pool import RunnerPool, Turns, check_memory, neighbours_may_be_why
from autods.runner.testing import failed, fit, out_of_memory, surface
from autods.settings import Settings
from autods.types import Knobs, Outcome, Record, Trial
from tests.support.probes import FACTS, LIMIT, MIB, Bench, ask, probed

SURFACE = surface(limit_bytes=LIMIT, state_bytes=100 * MIB, sample_bytes=20 * MIB)
TRIAL = Trial(rung="ddp", knobs=Knobs(), purpose="probe")
WAITS_S = 20.0


def capacity(folder: Path, *, parallel: int, rungs: str = "zero1,zero2") -> Question:
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


def test_where_there_is_no_room_for_a_second_they_come_one_after_the_other(tmp_path: Path) -> None:
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
            return Record(id=id, trial=trial, outcome=record.outcome, seconds=1.0, beside=int(trial.rung == "zero2"))

    alone, shared = probed(capacity(tmp_path, parallel=1), Shared(SURFACE)).cells
    assert alone.samples_per_second is not None
    assert shared.samples_per_second is None
    assert shared.memory == alone.memory
    assert "no speed is told" in shared.reason


def test_timed_trials_are_not_run_side_by_side(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="would slow each other down"):
        ask(tmp_path, parallel_trials=2)
    with pytest.raises(InputError, match="--parallel-trials 0"):
        ask(tmp_path, capacity=True, parallel_trials=0)


def test_a_trial_knows_how_many_were_on_its_machines_meanwhile() -> None:
    turns = Turns()
    with turns.shared(frozenset({"a", "b"})) as wide:
        with turns.shared(frozenset({"b"})) as narrow:
            pass
        with turns.shared(frozenset({"c"})) as elsewhere:
            pass
    assert (wide.neighbours, narrow.neighbours, elsewhere.neighbours) == (1, 1, 0)


def test_trials_of_the_same_machine_end_in_any_order() -> None:
    turns, hosts = Turns(), frozenset({"a"})
    with contextlib.ExitStack() as first, contextlib.ExitStack() as third:
        one = first.enter_context(turns.shared(hosts))
        with turns.shared(hosts) as two:
            pass
        assert (one.neighbours, two.neighbours) == (1, 1)
        three = third.enter_context(turns.shared(hosts))
        first.close()
        with turns.shared(hosts) as four:
            pass
    assert (one.neighbours, three.neighbours, four.neighbours) == (2, 2, 1)


def test_what_a_machine_shares_may_be_the_others_fault_and_a_devices_memory_is_not() -> None:
    assert not neighbours_may_be_why(fit(peak_bytes=1))
    assert not neighbours_may_be_why(out_of_memory(tier="device"))
    assert neighbours_may_be_why(out_of_memory(tier="host"))
    assert neighbours_may_be_why(out_of_memory(tier="pinned"))
    assert neighbours_may_be_why(failed(failure="infrastructure"))
    assert not neighbours_may_be_why(failed(failure="config", action="fix_config"))


class Runner:
    """On one machine with all others; answers by a function."""

    def __init__(self, answer: Callable[[Trial], Outcome], free_bytes: int) -> None:
        self.answer = answer
        self.workers = SimpleNamespace(hosts=frozenset({"10.0.0.1"}), host_free_bytes=free_bytes, stop=lambda: None)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def switch_to(self, settings: Settings) -> Any:
        return FACTS, {}

    def run(self, trial: Trial, *, id: int) -> Record:
        return Record(id=id, trial=trial, outcome=self.answer(trial), seconds=1.0)


def pools(
    folder: Path, first: Callable[[Trial], Outcome], other: Callable[[Trial], Outcome], free_bytes: int = 2**40
) -> RunnerPool:
    def make(settings: Settings, listen: Any, *, number: int, **said: Any) -> Any:
        return Runner(other if number else first, free_bytes)

    return RunnerPool(ask(folder).settings, lambda event: None, make=make)


def test_host_memory_that_ran_out_beside_another_is_asked_again_alone(tmp_path: Path) -> None:
    begun, full, over = threading.Event(), threading.Event(), threading.Event()
    asked: list[bool] = []

    def short(trial: Trial) -> Outcome:
        asked.append(over.is_set())
        full.set()
        return fit(peak_bytes=1) if len(asked) > 1 else out_of_memory(tier="host")

    def long(trial: Trial) -> Outcome:
        begun.set()
        assert full.wait(WAITS_S)
        over.set()
        return fit(peak_bytes=1)

    with pools(tmp_path, long, short) as pool, pool.another({}) as beside:
        thread = threading.Thread(target=pool.run, args=(TRIAL,), kwargs={"id": 1})
        with pool.turns.shared(frozenset({"10.0.0.1"})):  # so that the two surely overlap
            thread.start()
            assert begun.wait(WAITS_S)  # else the other could be alone before it
            record_of = threading.Thread(target=lambda: records.append(beside.run(TRIAL, id=2)))
            records: list[Record] = []
            record_of.start()
            assert full.wait(WAITS_S)
        thread.join(WAITS_S)
        record_of.join(WAITS_S)
    assert asked == [False, True]  # alone: the other had ended
    assert [(record.outcome.kind, record.beside) for record in records] == [("fit", 0)]


def test_once_stopped_what_a_trial_says_does_not_count(tmp_path: Path) -> None:
    def stopped(trial: Trial) -> Outcome:
        pool.stop()
        return failed(failure="infrastructure")

    pool = pools(tmp_path, stopped, stopped)
    with pytest.raises(KeyboardInterrupt):
        pool.run(TRIAL, id=1)
    with pytest.raises(KeyboardInterrupt):
        pool.run(TRIAL, id=2)


def test_cpu_ranks_find_no_room_beside_others_where_their_budgets_together_do_not(tmp_path: Path) -> None:
    settings = ask(tmp_path).settings  # 2 × 416 MiB
    here, there = frozenset({"a"}), frozenset({"b"})
    check_memory(settings, [here, here], 4 * LIMIT)
    check_memory(settings, [here, there], LIMIT)
    with pytest.raises(NoRoom, match=r"2 trials on one machine may take 1\.6 GiB of its memory"):
        check_memory(settings, [here, here], 4 * LIMIT - 1)


@pytest.mark.parametrize("last_first", [True, False])
def test_of_two_that_come_at_once_the_one_is_let_in_that_finds_memory_for_it(tmp_path: Path, last_first: bool) -> None:
    free = 2 * 2 * LIMIT  # for two trials of two ranks each
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(pools(tmp_path, SURFACE, SURFACE, free))
        one, other = pool.another({}), pool.another({})
        comes, late = (other, one) if last_first else (one, other)
        stack.enter_context(comes)
        with pytest.raises(NoRoom, match="3 trials on one machine"), late:
            pass
