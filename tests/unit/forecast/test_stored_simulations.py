"""A stored simulation answers as long as nothing that it depends on has changed, and no longer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.catalogue import Machine
from autods.forecast import stored_simulations
from autods.forecast.simulate.files_read import Stamp, read_stamp
from autods.forecast.stored_simulations import KEEPS, StoredSimulator, make_room, store_answers
from autods.forecast.testing import ScriptedSimulator, simulate_peaks
from autods.forecast.values import EngineSpec, Simulation
from autods.types import ModelFacts, WorkloadSource
from tests.support.plans import FACTS

ENGINE = EngineSpec(
    rung="zero1", ds_config={"zero_optimization": {"stage": 1}}, world_size=8, ranks_per_node=8, device_bytes=80 << 30
)
SOURCE = WorkloadSource(kind="file", path="/model.py", name="model", digest="1")


@dataclass(slots=True)
class Processes(ScriptedSimulator):
    """A simulator that has read these files."""

    read: tuple[Path, ...] = ()
    asked: list[str] = field(default_factory=list)

    def facts(self, device: str = "cuda", *, ranks: int = 1, machine: Machine | None = None) -> ModelFacts:
        self.asked.append(device)
        return self.known

    def list_files(self, device: str) -> dict[str, Stamp | None]:
        return {str(path): read_stamp(str(path)) for path in self.read}


def grow(spec: EngineSpec, micro_batch: int) -> Simulation:
    return simulate_peaks(micro_batch, backward=micro_batch)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(KEEPS, raising=False)
    return tmp_path / "cache" / "simulations"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that was there long before any command began."""
    path = tmp_path / "model.py"
    path.write_text("layers = 2")
    os.utime(path, (1e9, 1e9))
    return path


def ask(*read: Path, source: WorkloadSource = SOURCE, spec: EngineSpec = ENGINE, anew: bool = False) -> bool:
    """Ask for facts and a simulation, as one command does. Whether the processes had to answer."""
    processes: Any = Processes(FACTS, grow, read=read)
    simulator = store_answers(processes, source, anew=anew)
    assert simulator.facts() == FACTS
    (simulation,) = simulator.simulate(spec, [4])
    assert simulation.live_bytes["backward"]["device"] == 4
    assert bool(processes.asked) is bool(processes.measured)
    return bool(processes.measured)


def test_the_next_command_starts_no_process(model: Path) -> None:
    assert [ask(model), ask(model)] == [True, False]


CHANGES: dict[str, Callable[[Path], object]] = {
    "another size": lambda model: (model.write_text("layers = 24"), os.utime(model, (1e9, 1e9))),
    "another time": lambda model: os.utime(model, (1e9, 2e9)),
    "removed": lambda model: model.unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_file_is_simulated_anew(model: Path, change: Callable[[Path], object]) -> None:
    ask(model)
    change(model)
    assert ask(model)


def test_a_file_that_was_missing_and_came_is_read(model: Path) -> None:
    ask(model, missing := model.with_name("settings.json"))
    assert not ask(model, missing)
    missing.write_text("{}")
    assert ask(model, missing)


def test_what_changed_while_it_was_simulated_is_not_stored(model: Path) -> None:
    processes: Any = Processes(FACTS, grow, read=(model,))
    simulator = store_answers(processes, SOURCE)
    time.sleep(0.02)  # a file's times are those of the last tick of its clock
    os.utime(model, (1e9, 1e9))  # put in its place with the times of a copy
    simulator.facts()
    assert ask(model)


def test_a_date_in_the_future_is_only_a_date(model: Path) -> None:
    os.utime(model, (1e10, 1e10))
    time.sleep(0.02)
    assert [ask(model), ask(model)] == [True, False]


def test_another_card_of_the_same_kernels_is_asked_for_itself(model: Path) -> None:
    """A model may branch on torch.cuda.get_device_capability()."""
    card = Machine(name="card", title="card", device_bytes=1)
    a6000, l40 = (replace(ENGINE, machine=replace(card, driver_capability=known)) for known in ((8, 6), (8, 9)))
    assert a6000.family == l40.family
    processes: Any = Processes(FACTS, grow, read=(model,))
    for spec in (a6000, l40, a6000):
        store_answers(processes, SOURCE).simulate(spec, [4])
        store_answers(processes, SOURCE).facts(machine=spec.machine)
    assert (len(processes.measured), len(processes.asked)) == (2, 2)


def test_a_cache_that_can_only_be_read_answers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(model)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert not ask(model)


def test_a_file_that_vanishes_meanwhile_makes_room(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "old").write_bytes(bytes(100))
    make_room(tmp_path, most_bytes=50)
    assert not (tmp_path / "old").exists()


def test_variables_of_a_model_count_and_those_of_a_terminal_do_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(model)
    monkeypatch.setenv("COLUMNS", "123")
    assert not ask(model)
    monkeypatch.setenv("LAYERS", "24")
    assert ask(model)


def test_a_process_that_has_started_ray_asks_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(model)
    monkeypatch.setenv("RAY_RAYLET_PID", "1232")
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb._driver_set_trace")
    monkeypatch.syspath_prepend("/site-packages/ray/thirdparty_files")
    assert not ask(model)
    monkeypatch.syspath_prepend("/my/modules")
    assert ask(model)


def test_another_workload_or_engine_is_another_question(model: Path) -> None:
    ask(model)
    assert ask(model, source=replace(SOURCE, seq_len=8)) is True
    processes: Any = Processes(FACTS, grow, read=(model,))
    store_answers(processes, SOURCE).simulate(replace(ENGINE, world_size=2), [4])
    assert len(processes.measured) == 1


def test_a_machine_with_the_same_kernels_asks_the_same(model: Path) -> None:
    ask(model)
    assert not ask(model, spec=replace(ENGINE, machine=None, expandable=True))


def test_a_pickled_workload_is_the_same_in_each_output_folder(model: Path) -> None:
    first = replace(SOURCE, kind="pickle", path="/first/1.pkl")
    assert [ask(model, source=first), ask(model, source=replace(first, path="/second/1.pkl"))] == [True, False]
    assert ask(model, source=replace(first, digest="2"))


def test_a_removed_list_of_files_is_written_again(model: Path, cache: Path) -> None:
    processes: Any = Processes(FACTS, grow, read=(model,))
    simulator = store_answers(processes, SOURCE)
    simulator.facts()
    for files in cache.glob("*.files"):
        files.unlink()
    simulator.simulate(ENGINE, [4])
    assert not ask(model)


def test_fresh_simulates_and_replaces(model: Path) -> None:
    ask(model)
    assert ask(model, anew=True)
    assert not ask(model)


def test_a_variable_keeps_nothing(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEPS, "0")
    assert [ask(model), ask(model)] == [True, True]
    assert not cache.exists()


def test_a_script_is_simulated_each_time() -> None:
    processes: Any = Processes(FACTS, grow)
    assert store_answers(processes, replace(SOURCE, kind="script")) is processes


SPOILS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "empty": lambda path: path.write_bytes(b""),
    "others may write it": lambda path: path.chmod(0o666),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", ["answer", "files"])
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_spoilt_file_is_simulated_anew(model: Path, cache: Path, kind: str, spoil: Callable[[Path], object]) -> None:
    ask(model)
    for path in cache.glob(f"*.{kind}"):
        spoil(path)
    assert ask(model)


def test_a_cache_that_cannot_be_written_stores_nothing(model: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("no folder")
    assert [ask(model), ask(model)] == [True, True]


def test_the_first_stored_answer_is_said_once(model: Path) -> None:
    ask(model)
    said: list[str] = []
    processes: Any = Processes(FACTS, grow, read=(model,))
    simulator = store_answers(processes, SOURCE, note_use=lambda: said.append("said"))
    simulator.facts()
    simulator.simulate(ENGINE, [4])
    assert isinstance(simulator, StoredSimulator)
    assert said == ["said"]


def test_each_command_that_stores_makes_room(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers may have the list of files of an earlier one."""
    made: list[Path] = []
    monkeypatch.setattr(stored_simulations, "make_room", made.append)
    for anew in (False, True, False):  # the last stores nothing
        ask(model, anew=anew)
    assert len(made) == 2


def test_what_was_not_used_for_the_longest_time_makes_room(tmp_path: Path) -> None:
    for age, name in enumerate(("c", "b", "a")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    make_room(tmp_path, most_bytes=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]
