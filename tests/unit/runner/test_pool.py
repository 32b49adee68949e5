"""One zygote for each environment of the ranks: which stay alive, and in which order trials need the fewest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autods.runner import pool as pools
from autods.runner.pool import RunnerPool
from autods.runner.testing import ScriptedRunner, fit
from autods.settings import Settings
from autods.types import Knobs, ModelFacts, Record, Trial
from tests.support.probes import FACTS, ask


class Made:
    """Makes runners without Ray; notes which were started, which are alive, and their numbers of ranks."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.alive: list[str] = []
        self.most = 0
        self.ranks: list[int] = []

    def __call__(
        self, settings: Settings, listen: Any, *, host_bytes: Any, environment: Mapping[str, str], number: int
    ) -> Any:
        return Runner(self, environment.get("A", "unset"))


class Runner:
    def __init__(self, made: Made, name: str) -> None:
        self.made, self.name = made, name
        self.workers = SimpleNamespace(hosts=frozenset({"10.0.0.1"}), host_free_bytes=2**34, stop=lambda: None)

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

    monkeypatch.setattr(pools, "session", session)
    monkeypatch.setattr(pools, "is_connected", lambda: False)


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


def a_pool(folder: Path, made: Made, environments: int, device: str = "cpu") -> RunnerPool:
    settings = ask(folder).settings
    pool = RunnerPool(settings, lambda event: None, environments=environments, make=made)
    pool.most_alive = 4 if device == "cpu" else 1
    return pool


def test_runners_start_with_the_first_trial_and_all_are_ended(tmp_path: Path) -> None:
    made = Made()
    with a_pool(tmp_path, made, 2) as pool:
        assert made.started == []
        run(pool, 2, turns=3)
        assert made.started == ["0", "1"]
    assert made.alive == []


def test_few_environments_all_stay_alive(tmp_path: Path) -> None:
    made = Made()
    with a_pool(tmp_path, made, 3) as pool:
        assert pool.order(trials(3)) == trials(3)
        run(pool, 3, turns=4)
    assert sorted(made.started) == ["0", "1", "2"]


@pytest.mark.parametrize(("device", "values", "starts"), [("cpu", 6, 6 + 2 + 2), ("cuda", 3, 3 + 2 + 2)])
def test_trials_of_many_environments_are_grouped(tmp_path: Path, device: str, values: int, starts: int) -> None:
    made = Made()
    with a_pool(tmp_path, made, values, device) as pool:
        run(pool, values, turns=3)
        assert made.most == (4 if device == "cpu" else 1)
    assert len(made.started) == starts


def test_another_number_of_ranks_needs_no_new_zygote(tmp_path: Path) -> None:
    made = Made()
    with a_pool(tmp_path, made, 1) as pool:
        for ranks in (1, 2, 4):
            pool.run(trials(1, ranks)[0], id=1)
            pool.survey({"env.A": "0", "gpus": ranks})
    assert made.started == ["0"]
    assert made.ranks == [1, 1, 2, 2, 4, 4]
