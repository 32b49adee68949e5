"""The trace of a step: its threads, its sums, and the memory beside them."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.errors import InputError
from autods.forecast.predict import step_time as codes
from autods.forecast.predict.prices import Work
from autods.forecast.predict.step_time import BITS, STREAM_BITS, Schedule
from autods.forecast.testing import simulate_peaks
from autods.forecast.values import EngineSpec, Simulation, Trace
from autods.planner.timeline import build_timeline
from tests.support.planned import GIB, Planned, question, shrinking

_WORKS = (
    Work(kind="matmul", name="mm", flops=1e12, bytes=10**8, dtype="bfloat16"),
    Work(kind="kernel", name="mul", bytes=10**9),
    Work(kind="collective", name="allgather_base", bytes=10**9, ranks=8),
    Work(kind="host_optimizer", name="optimizer", bytes=10**9),
    Work(kind="copy", name="to host", bytes=10**8),
)


def _run(work: int) -> int:
    return work << BITS | codes.RUN


def _on(stream: int) -> int:
    return stream << BITS | codes.SWITCH


def _record(record: int, stream: int) -> int:
    return (record << STREAM_BITS | stream) << BITS | codes.RECORD


def _wait(record: int, stream: int) -> int:
    return (record << STREAM_BITS | stream) << BITS | codes.WAIT


EVENTS = (
    _on(0), _run(0), _on(1), _run(2), _record(0, 1), _on(0), _run(1), _wait(0, 0), _run(0), codes.MICRO_BATCH,
    _run(0), _run(4), codes.HOST_WAITS_ALL, 3 << BITS | codes.HOST, _run(1),
)  # fmt: skip
# 4 GiB of parameters stand before the step; activations come and go in it.
TRACE = Trace(
    events=(4 * GIB, 2 * GIB, ~1, GIB, ~2),
    marks=((0, "init"), (1, "forward"), (3, "backward")),
    issued=(7, 101, 106, 108, 112),
    kinds=(0, 3, 3),
)
SIMULATION = replace(
    simulate_peaks(2, init=GIB),
    traces={"device": TRACE},
    schedule=Schedule(events=EVENTS, works=_WORKS, first=100),
)


def timeline() -> dict[str, Any]:
    site = question(on="a100-80gb").sites[0]
    spec = EngineSpec(
        rung="zero3", ds_config={}, world_size=site.world_size, ranks_per_node=8, device_bytes=80 * GIB,
        machine=site.machine,
    )  # fmt: skip
    built = build_timeline(SIMULATION, spec)
    loaded: dict[str, Any] = json.loads(json.dumps(built, allow_nan=False))
    return loaded


def threads() -> dict[str, list[dict[str, Any]]]:
    """The complete events of each thread, by its name."""
    events = timeline()["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def test_every_event_is_of_the_trace_event_format() -> None:
    for event in timeline()["traceEvents"]:
        assert event["ph"] in "XCM"
        assert isinstance(event["name"], str)
        assert event["pid"] == 0
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)


def test_slices_of_a_thread_follow_each_other() -> None:
    assert list(threads()) == ["phases", "host", "default stream", "stream 1: collectives"]
    for slices in threads().values():
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_the_default_stream_adds_up_to_the_step() -> None:
    about = timeline()["otherData"]
    slices = threads()["default stream"]
    spent: defaultdict[str, float] = defaultdict(float)
    for event in slices:
        if event["cat"] == "wait":
            for cause, seconds in event["args"].items():
                spent[cause] += seconds
        else:
            spent[event["cat"]] += event["dur"] / 1e6
    assert sum(event["dur"] for event in slices) / 1e6 == pytest.approx(about["step_seconds"], rel=1e-6)
    assert dict(spent) == pytest.approx({cause: part for cause, part in about["spent"].items() if part}, abs=1e-8)
    assert min(spent["compute"], spent["memory"], spent["communication"], spent["host"]) > 0
    assert about["micro_batches"] == 2


def test_a_slice_says_what_bounds_it() -> None:
    (collective,) = (each for each in threads()["stream 1: collectives"] if each["cat"] != "wait")
    assert collective["args"] == {"kind": "collective", "bound by": "communication", "bytes": 10**9, "ranks": 8}
    multiplied = next(each for each in threads()["default stream"] if each["name"] == "mm")
    assert (multiplied["args"]["FLOPs"], multiplied["args"]["bound by"]) == (1e12, "compute")
    host = [each["name"] for each in threads()["host"]]
    assert {"launch mm", "waits for the device", "optimizer"} <= set(host)


def test_memory_by_kind_is_counted_over_the_step() -> None:
    counted = [each for each in timeline()["traceEvents"] if each["ph"] == "C"]
    sizes = [(each["args"]["parameters"] // GIB, each["args"]["activations"] // GIB) for each in counted]
    assert (4, 2) in sizes
    assert (4, 1) in sizes
    assert sizes[-1] == (4, 0)
    assert [each["ts"] for each in counted] == sorted(each["ts"] for each in counted)


def test_the_phases_of_the_step_are_shown() -> None:
    forward, backward = threads()["phases"]
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    assert forward["ts"] + forward["dur"] == backward["ts"]


def script(ask: EngineSpec, micro_batch: int) -> Simulation:
    return replace(shrinking(ask, micro_batch), schedule=SIMULATION.schedule)


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_plan_writes_the_step_of_the_best_rung(tmp_path: Path, name: str) -> None:
    planned = Planned(question(on="a100-80gb", ladder=("zero2", "zero3"), timeline=str(tmp_path / name)), script)
    written = (tmp_path / name).read_bytes()
    data = json.loads(gzip.decompress(written) if name.endswith(".gz") else written)
    drawn, best = planned.forecast.timeline, planned.forecast.sites[0].best
    assert drawn is not None
    assert best is not None
    assert best.speed is not None
    assert (drawn.rung, drawn.micro_batch) == (best.rung, best.speed.micro_batch)
    assert f"{best.rung}, micro batch {best.speed.micro_batch}" in data["traceEvents"][0]["args"]["name"]
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_timeline_needs_one_machine_with_rates() -> None:
    with pytest.raises(InputError, match="one machine"):
        question(on="a100-80gb,h100-80gb", timeline="step.json")
    with pytest.raises(InputError, match="needs the rates"):
        question(timeline="step.json")


def test_a_timeline_that_cannot_be_written_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        Planned(question(on="a100-80gb", timeline=str(tmp_path)), script)


def test_without_a_time_there_is_a_sentence(tmp_path: Path) -> None:
    planned = Planned(question(on="a100-80gb", timeline=str(tmp_path / "step.json")))
    assert planned.forecast.timeline is None
    assert "no timeline was written, because no rung has a time" in planned.forecast.assumed
