"""The line through two simulations, and the search for the largest micro batch along it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from autods.config.catalogue import find_machines
from autods.config.rungs import read_rungs
from autods.forecast.interpolation import draw_line
from autods.forecast.predict.prices import Work
from autods.forecast.predict.step_time import BITS, CODES, HOST, RUN, SWITCH, Schedule
from autods.forecast.simulate.protocol import SimulationFailed
from autods.forecast.simulation_cache import SimulationCache, make_engine
from autods.forecast.testing import ScriptedSimulator
from autods.forecast.values import KINDS, EngineSpec, Simulation, Trace
from autods.types import Knobs
from tests.support.composed import FACTS, make_site

GIB, MIB = 2**30, 2**20
_ACTIVATIONS = KINDS.index("activations")
(_MACHINE,) = find_machines("a100-40gb")
ENGINE = make_engine(make_site(8, machine=_MACHINE), read_rungs()["zero1"], Knobs(), FACTS)
SIZES = range(1, 4097)
Bytes = Callable[[int], int]


def simulate(micro_batch: int, kept: Bytes, copied: Bytes, nvme_bytes: int = 0) -> Simulation:
    """Weights, then activations that stay until the end; several samples are copied, and the copy outlives them."""
    events, kinds = [GIB, kept(micro_batch)], [0, _ACTIVATIONS]
    peak = sum(events)
    if micro_batch > 1:
        events += [copied(micro_batch), ~1, ~2]
        kinds.append(_ACTIVATIONS)
        peak += copied(micro_batch)
    else:
        events.append(~1)
    return Simulation(
        micro_batch=micro_batch,
        live_bytes={"init": {"device": GIB, "host": 5}, "forward": {"device": peak, "host": 5}},
        traces={"device": Trace(events=array("q", events), marks=((0, "init"), (1, "forward")), kinds=bytes(kinds))},
        nvme_bytes=nvme_bytes,
        breakdown={"parameters": GIB, "activations": peak - GIB},
    )


def grow(micro_batch: int) -> Simulation:
    return simulate(micro_batch, lambda size: 7 * MIB + 300 * MIB * size, lambda size: 50 * MIB * size)


def pin(micro_batch: int) -> Simulation:
    """As `grow`, with the inputs of layers in pinned memory."""
    simulation, size = grow(micro_batch), 3 * MIB * micro_batch
    pinned = Trace(events=array("q", [5 * MIB, size, ~1]), marks=((0, "init"), (1, "forward")))
    peaks = {"init": 5 * MIB, "forward": 5 * MIB + size}
    live_bytes = {phase: {**tiers, "pinned": peaks[phase]} for phase, tiers in simulation.live_bytes.items()}
    return replace(simulation, live_bytes=live_bytes, traces={**simulation.traces, "pinned": pinned})


def test_pinned_memory_that_grows_lies_on_a_line_too() -> None:
    line = draw_line(pin(1), pin(8))
    assert line is not None
    assert line.reach(30).holds_as(pin(30))


@pytest.mark.parametrize("smaller", [1, 2])
@pytest.mark.parametrize("asked", [3, 5, 90])
def test_a_line_reaches_what_would_be_simulated(smaller: int, asked: int) -> None:
    line = draw_line(grow(smaller), grow(8))
    assert line is not None
    reached, simulated = line.reach(asked), grow(asked)
    assert list(reached.traces["device"].events) == list(simulated.traces["device"].events)
    assert (reached.live_bytes, reached.breakdown) == (simulated.live_bytes, simulated.breakdown)
    assert reached.micro_batch == asked


@pytest.mark.parametrize(
    "other",
    [
        simulate(8, lambda size: 7 * MIB + 1, lambda size: 8),  # no whole bytes a sample
        simulate(8, lambda size: 2 * 10**9, lambda size: 8 * MIB),  # less than nothing without a sample
        simulate(8, lambda size: 7 * MIB * size, lambda size: 8, nvme_bytes=1),
    ],
)
def test_no_line_is_drawn_where_two_do_not_tell(other: Simulation) -> None:
    assert draw_line(simulate(1, lambda size: 7 * MIB, lambda size: 0), other) is None


def search(script: Callable[[EngineSpec, int], Simulation]) -> tuple[int | None, list[int], dict[int, str]]:
    simulator = ScriptedSimulator(FACTS, script)
    with SimulationCache(simulator).open(ENGINE) as engine:
        largest = engine.find_largest(SIZES, known=engine.forecast(1))
    return largest.micro_batch, [size for _, size in simulator.measured], dict(largest.failures)


def bend(spec: EngineSpec, micro_batch: int) -> Simulation:
    """Above 30 samples another kernel needs more."""
    more = 2 * GIB if micro_batch > 30 else 0
    return simulate(micro_batch, lambda size: 300 * MIB * size + more, lambda size: 50 * MIB * size)


def fits(simulation: Simulation) -> bool:
    return SimulationCache(ScriptedSimulator(FACTS, bend)).judge(ENGINE, simulation).fill <= 1


def test_a_sum_over_samples_does_not_grow() -> None:
    def total(micro_batch: int) -> Simulation:
        return simulate(micro_batch, lambda size: 300 * MIB * size, lambda size: 50 * MIB)

    line = draw_line(total(1), total(61))
    assert line is not None
    assert line.reach(30).holds_as(total(30))


@pytest.mark.parametrize(("bytes_of_sample", "simulated"), [(300 * MIB, [1, 61, 109]), (900 * MIB, [1, 61])])
def test_an_answer_between_two_simulations_takes_no_third(bytes_of_sample: int, simulated: list[int]) -> None:
    def script(micro_batch: int) -> Simulation:
        return simulate(micro_batch, lambda size: 7 * MIB + bytes_of_sample * size, lambda size: 50 * MIB * size)

    largest, measured, _ = search(lambda spec, micro_batch: script(micro_batch))
    assert largest is not None
    assert fits(script(largest))
    assert not fits(script(largest + 1))
    assert measured == simulated


def test_what_was_foreseen_is_no_end_of_a_line() -> None:
    def script(spec: EngineSpec, micro_batch: int) -> Simulation:
        return simulate(micro_batch, lambda size: 300 * MIB * size, lambda size: 27 * MIB)  # the sum is no 61 of bytes

    with SimulationCache(ScriptedSimulator(FACTS, script)).open(ENGINE) as engine:
        for micro_batch in (1, 61, 27, 13):
            assert engine.simulate(micro_batch).holds_as(script(ENGINE, micro_batch))


@pytest.mark.parametrize(("ends", "proves"), [((1, 61), True), ((1, 24), False), ((2, 24), True)])
def test_a_line_proves_nothing_where_slopes_were_guessed(ends: tuple[int, int], proves: bool) -> None:
    """24 samples divide the bytes of many a block that does not grow."""
    line = draw_line(*(simulate(size, lambda size: 300 * MIB * size, lambda size: 24 * MIB) for size in ends))
    assert line is not None
    assert line.proves(13) is proves


def work_of(micro_batch: int) -> Simulation:
    """As `grow`, with a matmul and a copy, which a single sample does not need, beside a view."""
    size = 10 * micro_batch
    works = [Work(kind="view"), Work(kind="matmul", name="mm", flops=7e12 * size, bytes=100 + size, dtype="bfloat16")]
    events = [0 << BITS | RUN, 1 << BITS | RUN, 3 << BITS | SWITCH, 1 << BITS | RUN]
    if micro_batch > 1:
        works.append(Work(kind="kernel", name="clone", bytes=2 * size))
        events.append(2 << BITS | RUN)
    schedule = Schedule(events=array("q", events), works=tuple(works), first=5)
    return replace(grow(micro_batch), schedule=schedule)


def list_work(schedule: Schedule | None) -> list[tuple[int, Work | int]]:
    assert schedule is not None
    codes = [(event & CODES, event >> BITS) for event in schedule.events]
    return [(code, schedule.works[place] if code == RUN else place) for code, place in codes]


def test_work_lies_on_the_line_too() -> None:
    line = draw_line(work_of(1), work_of(61))
    assert line is not None
    assert line.proves(17)
    assert list_work(line.reach(17).schedule) == list_work(work_of(17).schedule)


def test_work_that_malloc_maps_anew_has_no_line() -> None:
    def on_host(micro_batch: int) -> Simulation:
        works = (Work(kind="host", bytes=micro_batch << 22, fresh=micro_batch << 22 if micro_batch > 8 else 0),)
        return replace(grow(micro_batch), schedule=Schedule(events=array("q", [HOST]), works=works))

    line = draw_line(on_host(1), on_host(61))
    assert line is not None
    assert not line.proves(17)


def test_an_answer_that_was_not_as_foreseen_is_searched_anew() -> None:
    largest, simulated, _ = search(bend)
    assert largest is not None
    assert len(simulated) > 3
    assert fits(bend(ENGINE, largest))
    assert not fits(bend(ENGINE, largest + 1))


def test_a_foreseen_batch_that_fails_bounds_the_search() -> None:
    def end(spec: EngineSpec, micro_batch: int) -> Simulation:
        if micro_batch > 20:
            raise SimulationFailed(kind="user_code", problem="the data end")
        return grow(micro_batch)

    largest, simulated, failures = search(end)
    assert largest == 20
    assert 21 in failures
    assert 20 in simulated


def test_uneven_engines_are_searched_by_simulations_alone() -> None:
    def waver(spec: EngineSpec, micro_batch: int) -> Simulation:
        return simulate(micro_batch, lambda size: 300 * MIB * size + size * size, lambda size: 50 * MIB * size)

    largest, simulated, _ = search(waver)
    assert largest is not None
    assert {largest, largest + 1} <= set(simulated)
