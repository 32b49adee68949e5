"""Runners that share machines: one zygote for each environment, and trials that run at the same time or alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autods.config.settings import Settings
from autods.runner import pool as pool_module
from autods.runner.placement import NoRoom
from autods.runner.pool import RunnerPool, Turns, check_memory, neighbours_may_be_why
from autods.runner.testing import ScriptedRunner, failed, fit, out_of_memory, surface
from autods.system.host import HostMemory
from autods.types import Knobs, ModelFacts, Outcome, Record, Trial
from tests.support.probes import FACTS, LIMIT, MIB, ask

SURFACE = surface(limit_bytes=LIMIT, state_bytes=100 * MIB, sample_bytes=20 * MIB)
TRIAL = Trial(rung="ddp", knobs=Knobs(), purpose="probe")
WAITS_S = 20.0


def memory(free_bytes: int) -> HostMemory:
    return HostMemory(total_bytes=2**40, free_bytes=free_bytes)


class Made:
    """Makes runners without Ray; notes which were started, which are alive, and their numbers of ranks."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.alive: list[str] = []
        self.most = 0
        self.ranks: list[int] = []

    def __call__(self, settings: Settings, listen: Any, *, environment: Mapping[str, str], number: int) -> Any:
        return Runner(self, environment.get("A", "unset"))


class Runner:
    def __init__(self, made: Made, name: str) -> None:
        self.made, self.name = made, name
        self.workers = SimpleNamespace(hosts=frozenset({"10.0.0.1"}), host_memory=memory(2**34), stop=lambda: None)

    def __enter__(self) -> Runner:
        self.made.started.append(self.name)
        self.made.alive.append(self.name)
        self.made.most = max(self.made.most, len(self.made.alive))
        return self

    def __exit__(self, *raised: object) -> None:
        self.made.alive.remove(self.name)

    def switch_to(self, settings: Settings) -> tuple[ModelFacts, Mapping[str, str]]:
        self.made.ranks.append(settings.gpus)
        return FACTS, {}

    def run(self, trial: Trial, *, id: int) -> Record:
        return ScriptedRunner(lambda trial: fit(peak_bytes=1)).run(trial)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def session(*, cpus: int, address: str | None) -> Iterator[None]:
        yield

    monkeypatch.setattr(pool_module, "session", session)


def trials(values: int, ranks: int = 2) -> list[Trial]:
    return [
        Trial(
            rung="ddp", knobs=Knobs(micro_batch=size), purpose="probe", conditions={"env.A": str(value), "gpus": ranks}
        )
        for size in (1, 2)
        for value in range(values)
    ]


def run(pool: RunnerPool, values: int, turns: int) -> None:
    for turn in range(turns):
        asked = trials(values)
        for trial in pool.order(asked[::-1] if turn % 2 else asked):
            pool.run(trial, id=1)


def a_pool(folder: Path, made: Made) -> RunnerPool:
    return RunnerPool(ask(folder).settings, lambda event: None, make=made)


def test_runners_start_with_the_first_trial_and_all_are_ended(tmp_path: Path) -> None:
    made = Made()
    with a_pool(tmp_path, made) as pool:
        assert made.started == []
        run(pool, 2, turns=1)
        assert made.started == ["0", "1"]
    assert made.alive == []


def test_trials_of_one_environment_keep_their_order(tmp_path: Path) -> None:
    made = Made()
    with a_pool(tmp_path, made) as pool:
        assert pool.order(trials(1)) == trials(1)
        run(pool, 1, turns=4)
    assert made.started == ["0"]


def test_trials_of_many_environments_are_grouped(tmp_path: Path) -> None:
    made = Made()
    with a_pool(tmp_path, made) as pool:
        run(pool, 3, turns=3)
    assert made.most == 1
    assert len(made.started) == 3 + 2 + 2


def test_another_number_of_ranks_needs_no_new_zygote(tmp_path: Path) -> None:
    made = Made()
    with a_pool(tmp_path, made) as pool:
        for ranks in (1, 2, 4):
            pool.run(trials(1, ranks)[0], id=1)
            pool.survey({"env.A": "0", "gpus": ranks})
    assert made.started == ["0"]
    assert made.ranks == [1, 1, 2, 2, 4, 4]


def test_a_trial_counts_its_neighbours() -> None:
    turns = Turns()
    with turns.take(frozenset({"a", "b"})) as wide:
        with turns.take(frozenset({"b"})) as narrow:
            pass
        with turns.take(frozenset({"c"})) as apart:
            pass
    assert (wide.neighbours, narrow.neighbours, apart.neighbours) == (1, 1, 0)


def test_neighbours_may_end_in_any_order() -> None:
    turns, hosts = Turns(), frozenset({"a"})
    with contextlib.ExitStack() as first, contextlib.ExitStack() as third:
        one = first.enter_context(turns.take(hosts))
        with turns.take(hosts) as two:
            pass
        assert (one.neighbours, two.neighbours) == (1, 1)
        three = third.enter_context(turns.take(hosts))
        first.close()
        with turns.take(hosts) as four:
            pass
    assert (one.neighbours, three.neighbours, four.neighbours) == (2, 2, 1)


def test_neighbours_explain_no_shortage_of_a_device() -> None:
    assert not neighbours_may_be_why(fit(peak_bytes=1))
    assert not neighbours_may_be_why(out_of_memory(tier="device"))
    assert neighbours_may_be_why(out_of_memory(tier="host"))
    assert neighbours_may_be_why(out_of_memory(tier="pinned"))
    assert neighbours_may_be_why(failed(failure="infrastructure"))
    assert not neighbours_may_be_why(failed(failure="config", action="fix_config"))


class AnsweringRunner:
    """A runner on one machine with all others; a function answers its trials."""

    def __init__(self, answer: Callable[[Trial], Outcome], free_bytes: int) -> None:
        self.answer = answer
        self.workers = SimpleNamespace(hosts=frozenset({"10.0.0.1"}), host_memory=memory(free_bytes), stop=lambda: None)

    def __enter__(self) -> AnsweringRunner:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def switch_to(self, settings: Settings) -> Any:
        return FACTS, {}

    def run(self, trial: Trial, *, id: int) -> Record:
        return Record(id=id, trial=trial, outcome=self.answer(trial), seconds=1.0)


def answering_pool(
    folder: Path, first: Callable[[Trial], Outcome], other: Callable[[Trial], Outcome], free_bytes: int = 2**40
) -> RunnerPool:
    def make(settings: Settings, listen: Any, *, number: int, **options: Any) -> Any:
        return AnsweringRunner(other if number else first, free_bytes)

    return RunnerPool(ask(folder).settings, lambda event: None, make=make)


def test_a_trial_that_ran_out_beside_another_runs_again_alone(tmp_path: Path) -> None:
    begun, full, over = threading.Event(), threading.Event(), threading.Event()
    was_alone: list[bool] = []

    def short(trial: Trial) -> Outcome:
        was_alone.append(over.is_set())
        full.set()
        return fit(peak_bytes=1) if len(was_alone) > 1 else out_of_memory(tier="host")

    def long(trial: Trial) -> Outcome:
        begun.set()
        assert full.wait(WAITS_S)
        over.set()
        return fit(peak_bytes=1)

    with answering_pool(tmp_path, long, short) as pool, pool.another({}) as beside:
        thread = threading.Thread(target=pool.run, args=(TRIAL,), kwargs={"id": 1})
        with pool.turns.take(frozenset({"10.0.0.1"})):  # so that the two surely overlap
            thread.start()
            assert begun.wait(WAITS_S)  # else the other could be alone before it
            record_of = threading.Thread(target=lambda: records.append(beside.run(TRIAL, id=2)))
            records: list[Record] = []
            record_of.start()
            assert full.wait(WAITS_S)
        thread.join(WAITS_S)
        record_of.join(WAITS_S)
    assert was_alone == [False, True]  # alone: the other had ended
    assert [(record.outcome.kind, record.neighbours) for record in records] == [("fit", 0)]


def test_the_outcome_of_a_stopped_trial_does_not_count(tmp_path: Path) -> None:
    def stopped(trial: Trial) -> Outcome:
        pool.stop()
        return failed(failure="infrastructure")

    pool = answering_pool(tmp_path, stopped, stopped)
    with pytest.raises(KeyboardInterrupt):
        pool.run(TRIAL, id=1)
    with pytest.raises(KeyboardInterrupt):
        pool.run(TRIAL, id=2)


def test_budgets_of_cpu_ranks_have_to_fit_together(tmp_path: Path) -> None:
    settings = ask(tmp_path).settings  # 2 × 416 MiB
    here, there = frozenset({"a"}), frozenset({"b"})
    check_memory(settings, [here, here], 4 * LIMIT)
    check_memory(settings, [here, there], LIMIT)
    with pytest.raises(NoRoom, match=r"2 trials on one machine may take 1\.6 GiB of its memory"):
        check_memory(settings, [here, here], 4 * LIMIT - 1)


@pytest.mark.parametrize("last_first", [True, False])
def test_of_two_pools_the_first_to_enter_finds_memory(tmp_path: Path, last_first: bool) -> None:
    free = 2 * 2 * LIMIT  # for two trials of two ranks each
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(answering_pool(tmp_path, SURFACE, SURFACE, free))
        one, other = pool.another({}), pool.another({})
        comes, late = (other, one) if last_first else (one, other)
        stack.enter_context(comes)
        with pytest.raises(NoRoom, match="3 trials on one machine"), late:
            pass
