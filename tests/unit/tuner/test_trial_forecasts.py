"""Forecasts beside a fit: simulated once, ahead of the walk, corrected by what trials measure, and never in the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autods.config.catalogue import Machine, Rates, Tflops, read_catalogue
from autods.forecast.predict.prices import Work, read_constants
from autods.forecast.predict.step_time import BITS, RUN, Schedule
from autods.forecast.simulate.protocol import SimulationFailed
from autods.forecast.simulation_cache import SimulationCache
from autods.forecast.testing import Script, ScriptedSimulator, fail_with, simulate_peaks
from autods.forecast.values import EngineSpec, ForecastPhase, Simulation, Trace
from autods.journal import trial_key
from autods.runner.testing import fit, out_of_memory
from autods.tuner.candidates import list_candidates
from autods.tuner.forecaster import why_impossible
from autods.tuner.trial_forecasts import TrialForecaster, make_trial_engine
from autods.types import Outcome, Trial, WorkloadSource
from tests.support.growth import FRAGMENTED_LIVE, fragment
from tests.support.machines import a_machine
from tests.support.settings import fit_settings
from tests.support.walks import FACTS, SETTINGS

GIB = 2**30
MIB = 2**20
LARGE = replace(SETTINGS, device_bytes=16 * GIB)
CANDIDATES = list_candidates(LARGE, FACTS, {})


def trial(rung: str = "zero1", micro_batch: int = 1, accumulation: int = 1) -> Trial:
    knobs = next(candidate.knobs for candidate in CANDIDATES if candidate.rung.name == rung)
    return Trial(rung=rung, knobs=replace(knobs, micro_batch=micro_batch, accumulation=accumulation), purpose="walk")


def grows(spec: EngineSpec, micro_batch: int) -> Simulation:
    return simulate_peaks(micro_batch, init=GIB, backward=2 * GIB + micro_batch * GIB)


def make_forecaster(script: Script = grows) -> tuple[TrialForecaster, ScriptedSimulator, list[str]]:
    simulator, reported = ScriptedSimulator(FACTS, script), []
    cache = SimulationCache(simulator)
    made = TrialForecaster(cache=cache, settings=LARGE, facts=FACTS, report=reported.append)
    return made, simulator, reported


MACHINE = Machine(
    name="made-up",
    title="made up",
    device_bytes=16 * GIB,
    gpus=2,
    rates=Rates(multiprocessors=1, memory_gb_per_s=1, source="made up", tflops=Tflops(fp32=1), matmul_share=1.0),
)
_SECOND = Work(kind="kernel", bytes=10**9)  # at the machine's peak


def lasts_as_many_seconds_as_samples(spec: EngineSpec, micro_batch: int) -> Simulation:
    events = [0 << BITS | RUN] * micro_batch
    return replace(grows(spec, micro_batch), schedule=Schedule(events=events, works=(_SECOND,)))


def test_a_step_is_forecast_with_the_low_end() -> None:
    forecaster, _, _ = make_forecaster(lasts_as_many_seconds_as_samples)
    assert forecaster.step_time(trial()) is None  # the machine is not known
    forecaster.settings = replace(LARGE, machine=MACHINE)
    step = forecaster.step_time(trial(micro_batch=4))
    assert step is not None
    assert 4.2 < step.seconds < 8
    assert step.low_seconds == pytest.approx(max(4.0, read_constants().low * step.seconds))
    assert step.computed_seconds <= step.seconds


def test_a_timed_trial_corrects_the_step_times_after_it() -> None:
    forecaster, _, _ = make_forecaster(lasts_as_many_seconds_as_samples)
    forecaster.settings = replace(LARGE, machine=MACHINE)
    before = forecaster.step_time(trial(micro_batch=2))
    assert before is not None
    for size in range(1, 9):
        outcome = fit(peak_bytes=3 * GIB, step_s=1.5 * before.seconds * size / 2)
        forecaster.forecast(trial(micro_batch=size))
        forecaster.learn(trial(micro_batch=size), replace(outcome, step_s=outcome.step_s[:1] * 3))
    after = forecaster.step_time(trial(micro_batch=2))
    assert after is not None
    assert after.seconds == pytest.approx(1.5 * before.seconds, rel=0.03)
    assert after.low_seconds == pytest.approx(read_constants().low * after.seconds)


@pytest.mark.parametrize(("micro_batch", "verdict"), [(1, "fits"), (40, "cannot_fit")])
def test_a_trial_is_forecast_beside_the_fits_limit(micro_batch: int, verdict: str) -> None:
    forecast = make_forecaster()[0].forecast(trial(micro_batch=micro_batch))
    assert forecast is not None
    assert forecast.verdict == verdict
    assert forecast.memory["device"].limit_bytes == 16 * GIB


def test_expandable_segments_of_a_trial_are_forecast() -> None:
    held = []
    for expandable in (False, True):
        made, simulator, _ = make_forecaster(leave_pieces)
        made = replace(made, cache=SimulationCache(simulator, expandable), settings=replace(LARGE, device="cuda"))
        said = made.forecast(trial())
        assert said is not None
        held.append(said.memory["device"].peak_bytes)
    assert held[1] < 0.9 * held[0]


def leave_pieces(spec: EngineSpec, micro_batch: int) -> Simulation:
    events, marks = fragment(steps=2)
    made = simulate_peaks(micro_batch, init=GIB, backward=FRAGMENTED_LIVE)
    return replace(made, traces={"device": Trace(events=events, marks=marks)})


def make_tight_forecaster(expandable: bool | None) -> TrialForecaster:
    """A forecaster for a card on which the pieces fit only if segments grow."""
    made, simulator, _ = make_forecaster(leave_pieces)
    card = replace(LARGE, device="cuda", device_bytes=3300 * MIB)
    card = replace(card, machine=replace(card.machine, device_bytes=3300 * MIB))
    return replace(made, cache=SimulationCache(simulator, expandable), settings=card)


def test_a_trial_gets_the_segments_that_its_forecast_needs() -> None:
    made = make_tight_forecaster(None)
    chosen = made.choose_allocator(trial())
    assert chosen.knobs.expandable
    assert made.forecast(trial()).expandable
    assert make_trial_engine(made.settings, FACTS, chosen).expandable
    made.settings = replace(made.settings, machine=replace(made.settings.machine, device_bytes=64 * GIB))
    assert made.choose_allocator(trial()) == chosen  # a config keeps the first choice
    assert trial_key(chosen) != trial_key(trial())


@pytest.mark.parametrize("given", [False, True])
def test_segments_are_the_users_where_the_environment_decides(given: bool) -> None:
    made = make_tight_forecaster(given)
    assert made.forecast(trial()).expandable is given
    assert made.choose_allocator(trial()) == trial()


def test_trials_that_allocate_the_same_are_simulated_once() -> None:
    made, simulator, _ = make_forecaster()
    for accumulation in (3, 4, 8):
        made.forecast(trial(accumulation=accumulation))
    assert len(simulator.measured) == 1


def test_the_first_forecast_of_a_rung_is_kept_for_the_report() -> None:
    made, _, _ = make_forecaster()
    made.forecast(trial())
    made.forecast(trial(micro_batch=2))
    assert made.forecasts["zero1"].micro_batch == 1


def test_a_rung_that_cannot_fit_is_reported_at_its_least_batch() -> None:
    made, _, _ = make_forecaster(
        lambda spec, micro_batch: simulate_peaks(micro_batch, init=GIB, backward=(20 + micro_batch) * GIB)
    )
    made.forecast(trial(micro_batch=8))  # the one that a race would enter with
    reason = why_impossible(made.forecast(trial()))
    assert reason is not None
    assert made.forecasts["zero1"].reason in reason


def test_a_failed_simulation_is_reported_once() -> None:
    made, _, reported = make_forecaster(fail_with("unsupported", "flash_attn has no fake implementation"))
    assert made.forecast(trial()) is None
    assert made.forecast(trial("zero2")) is None
    assert made.largest(trial(), range(1, 9), 15 * GIB) is None
    assert reported == ["no forecast of zero1, so it is tried: flash_attn has no fake implementation"]


def test_a_fit_does_not_advise_the_trial_that_it_runs() -> None:
    hint = "use another kernel; where the script runs by itself, real trials measure it: autods fit"
    made, _, reported = make_forecaster(fail_with("unsupported", "no such kernel", hint=hint))
    assert made.forecast(trial()) is None
    assert reported == ["no forecast of zero1, so it is tried: no such kernel; use another kernel"]


def test_the_largest_micro_batch_is_found_on_one_engine() -> None:
    made, simulator, _ = make_forecaster()
    found = made.largest(trial(), range(1, 65), 15 * GIB)
    assert found is not None
    assert 9 <= found <= 13  # 2 GiB and one a sample, and what a process needs besides
    assert len(simulator.engines) == 1


def gives_back_late(spec: EngineSpec, micro_batch: int) -> Simulation:
    """Its allocator holds each step's first block until the step ends, and a second one of that size needs room."""
    size = (micro_batch + 1) * GIB // 2
    step = [(size, ~0, size, ~1), (size, ~2, size, ~3, MIB)]
    marks: tuple[tuple[int, ForecastPhase], ...] = ((0, "forward"), (4, "step"), (4, "forward"), (9, "step"))
    trace = Trace(events=[*step[0], *step[1]], marks=marks, held={0: 4, 2: 9})
    return replace(grows(spec, micro_batch), live_bytes={}, traces={"device": trace})


def test_two_simulations_tell_the_fills_of_any_micro_batch() -> None:
    made, simulator, _ = make_forecaster()
    fills = [made.find_fills(trial(), size, 8 * GIB) for size in (1, 20, 40)]
    assert [each and each["device"] for each in fills] == sorted(each["device"] for each in fills if each)
    assert fills[1] is not None
    assert fills[1]["device"] > 22 / 8
    assert len(simulator.measured) == 2


def test_fills_are_unknown_where_simulations_fail_or_do_not_reach() -> None:
    assert make_forecaster()[0].find_fills(trial(), 100, 8 * GIB) is None
    assert make_forecaster(fail_with("user_code", "boom"))[0].find_fills(trial(), 2, 8 * GIB) is None


def forecast_late_returns() -> TrialForecaster:
    made, _, _ = make_forecaster(gives_back_late)
    return replace(made, settings=replace(LARGE, device="cuda"))


def test_the_largest_calm_micro_batch_does_not_run_full() -> None:
    made = forecast_late_returns()
    largest = made.largest_calm(trial(), range(1, 25))
    assert largest is not None
    assert 10 <= largest <= 14  # half of 16 GiB each, less what a process needs; once it would be twice as much
    assert made.largest_calm(trial(), range(largest + 1, 25)) is None


def test_what_gives_memory_back_in_time_counts_as_fitting() -> None:
    assert forecast_late_returns().largest(trial(), range(1, 65), 15 * GIB) in range(20, 30)


def test_an_allocator_that_should_run_full_keeps_the_headroom() -> None:
    made = forecast_late_returns()
    # At last it runs out without the headroom, and then of the whole card.
    for size, keeps in ((10, False), (16, True), (28, False), (40, False)):
        assert made.choose_allocator(trial(micro_batch=size)).knobs.keeps_headroom is keeps
    assert not made.choose_allocator(replace(trial(micro_batch=16), limited=False)).knobs.keeps_headroom


def test_a_config_that_lacked_the_headroom_gets_it() -> None:
    made = forecast_late_returns()
    kept = made.choose_allocator(trial(micro_batch=16))
    made.learn(kept, out_of_memory())
    assert not made.choose_allocator(trial(micro_batch=16)).knobs.keeps_headroom


def test_a_batch_that_cannot_be_simulated_bounds_the_search() -> None:
    def little_data(spec: EngineSpec, micro_batch: int) -> Simulation:
        if micro_batch > 5:
            fail_with("user_code", "its data ends before a micro batch is full")(spec, micro_batch)
        return grows(spec, micro_batch)

    made, _, reported = make_forecaster(little_data)
    assert made.largest(trial(), range(1, 65), 15 * GIB) == 5
    assert reported == []


def test_a_trials_measurement_corrects_the_next_forecast() -> None:
    made, _, _ = make_forecaster()
    before = made.forecast(trial())
    assert before is not None
    peak = before.memory["device"].peak_bytes
    for micro_batch in (1, 2, 3):
        made.forecast(trial(micro_batch=micro_batch))
        assert made.learn(trial(micro_batch=micro_batch), fit(peak_bytes=int((peak + (micro_batch - 1) * GIB) * 1.1)))
    after = made.forecast(trial())
    assert after is not None
    assert 1.05 < after.memory["device"].peak_bytes / peak < 1.12


def test_a_trial_corrects_the_forecast_once() -> None:
    made, _, _ = make_forecaster()
    made.forecast(trial())
    assert made.learn(trial(), fit(peak_bytes=GIB)) is not None
    assert made.learn(trial(), fit(peak_bytes=GIB)) is None


@pytest.mark.parametrize("outcome", [out_of_memory(tier="host"), out_of_memory(missing_bytes=5)])
def test_other_tiers_and_unknown_limits_correct_nothing(outcome: Outcome) -> None:
    made, _, _ = make_forecaster()
    made.forecast(trial())
    assert made.learn(trial(), outcome) is None


def test_a_trial_without_a_limit_corrects_the_forecast() -> None:
    made, _, _ = make_forecaster()
    made.forecast(trial())
    assert made.learn(replace(trial(), limited=False), fit(peak_bytes=4 * GIB)) is not None


def test_prepared_trials_are_simulated_once() -> None:
    made, simulator, reported = make_forecaster(of_two_at_least)
    made.prepare([trial("zero1"), trial("zero2", micro_batch=2)])
    assert sorted(simulator.measured) == [("zero1", 1), ("zero2", 2)]
    assert made.forecast(trial("zero2", micro_batch=2)) is not None
    assert made.forecast(trial("zero1")) is not None  # of two samples, since one is known to be too few
    assert sorted(simulator.measured) == [("zero1", 1), ("zero1", 2), ("zero2", 2)]
    assert reported == []


def of_two_at_least(spec: EngineSpec, micro_batch: int) -> Simulation:
    if micro_batch < 2:
        fail_with("user_code", "Expected more than 1 value per channel when training, got [1, 64]")(spec, micro_batch)
    return grows(spec, micro_batch)


def test_a_model_that_needs_two_samples_is_forecast_with_two() -> None:
    made, simulator, reported = make_forecaster(of_two_at_least)
    said = [made.forecast(trial(rung)) for rung in ("zero1", "zero2")]
    assert [one.micro_batch for one in said if one is not None] == [2, 2]
    assert simulator.measured == [("zero1", 1), ("zero1", 2), ("zero2", 2)]
    assert reported == []


def test_a_script_s_own_micro_batch_is_the_one_forecast() -> None:
    def of_six(spec: EngineSpec, micro_batch: int) -> Simulation:
        if micro_batch != 6:
            raise SimulationFailed("user_code", "its batches hold 6 samples", own_batch=6)
        return grows(spec, micro_batch)

    made, simulator, reported = make_forecaster(of_six)
    said = [made.forecast(trial(rung)) for rung in ("zero1", "zero2")]
    assert [one.micro_batch for one in said if one is not None] == [6, 6]
    assert simulator.measured == [("zero1", 1), ("zero1", 6), ("zero2", 6)]
    assert made.largest(trial(), range(1, 65), 15 * GIB) == 6
    assert made.own_batch == 6
    assert reported == ["micro batch 6, which the script fixes; no other one is tried"]


def test_a_script_s_too_small_micro_batch_has_no_forecast() -> None:
    def of_one(spec: EngineSpec, micro_batch: int) -> Simulation:
        if micro_batch != 1:
            raise SimulationFailed("user_code", "its batches hold 1 sample", own_batch=1)
        return of_two_at_least(spec, micro_batch)

    made, simulator, reported = make_forecaster(of_one)
    assert made.forecast(trial()) is None
    assert [size for _, size in simulator.measured] == [1, 2]
    assert made.largest(trial(), range(1, 65), 15 * GIB) is None
    assert "Expected more than 1 value per channel" in reported[-1]


def test_a_search_begins_where_the_model_can_be_trained() -> None:
    made, _, reported = make_forecaster(of_two_at_least)
    assert made.largest(trial(), range(1, 65), 15 * GIB) == make_forecaster()[0].largest(
        trial(), range(1, 65), 15 * GIB
    )
    assert reported == []


def test_a_model_that_wants_ever_more_samples_has_no_forecast() -> None:
    made, simulator, reported = make_forecaster(
        fail_with("user_code", "Expected more than 1 value per channel when training")
    )
    assert made.forecast(trial()) is None
    assert [size for _, size in simulator.measured] == [1, 2, 4, 8]
    assert len(reported) == 1


def test_a_fits_forecast_knows_when_blocks_come_back() -> None:
    """A block that an idle stream has used is free at once, by the clocks of a machine with rates."""
    events = [100 * MIB, ~0, 100 * MIB]
    trace = Trace(events=events, marks=((0, "forward"),), issued=[0, 0, 0], users={0: (0,)}, held={0: len(events)})
    schedule = Schedule(events=(0 << BITS | RUN,), works=(_SECOND,))

    def frees_a_block(spec: EngineSpec, micro_batch: int) -> Simulation:
        return replace(simulate_peaks(1, forward=100 * MIB), traces={"device": trace}, schedule=schedule)

    def most_bytes(machine: Machine) -> int:
        made, _, _ = make_forecaster(frees_a_block)
        made.settings = replace(LARGE, device="cuda", machine=machine)
        forecast = made.forecast(trial())
        assert forecast is not None
        return forecast.memory["device"].high_bytes

    h100 = read_catalogue()["h100-80gb"]
    assert most_bytes(h100) < most_bytes(replace(h100, rates=None))


def test_zero_init_is_proposed_for_what_builds_beyond_the_host() -> None:
    """On CPU ranks the budget of a rank is its share of the host: building the whole model takes more than training."""

    def script(spec: EngineSpec, micro_batch: int) -> Simulation:
        return simulate_peaks(micro_batch, init=(4 if spec.zero_init else 20) * GIB, backward=8 * GIB)

    forecaster, simulator, _ = make_forecaster(script)
    build = forecaster.propose_partitioned_build([trial("zero2"), trial("zero3")], {})
    assert build is not None
    assert (build.rung, build.verdict, build.tier, build.ranks) == ("zero3", "fits", "host", 2)
    assert build.whole_bytes == pytest.approx(2 * 20 * GIB, rel=0.1)
    assert build.split_bytes == pytest.approx(2 * 8 * GIB, rel=0.1)
    assert build.limit_bytes == 2 * LARGE.device_bytes
    assert [(spec.rung, spec.zero_init) for spec in simulator.engines][-1] == ("zero3", True)


def test_zero_init_is_not_proposed_where_training_lacks_memory() -> None:
    forecaster, simulator, _ = make_forecaster(
        lambda spec, size: simulate_peaks(size, init=20 * GIB, backward=18 * GIB)
    )
    assert forecaster.propose_partitioned_build([trial("zero3")], {}) is None
    assert not any(spec.zero_init for spec in simulator.engines)


def test_a_build_that_ran_out_on_the_host_gets_zero_init_too() -> None:
    def script(spec: EngineSpec, micro_batch: int) -> Simulation:
        return simulate_peaks(micro_batch, init=(2 if spec.zero_init else 6) * GIB, backward=3 * GIB)

    forecaster, _, _ = make_forecaster(script)
    assert forecaster.propose_partitioned_build([trial("zero3")], {}) is None
    build = forecaster.propose_partitioned_build([trial("zero3")], {"zero3": "host"})
    assert build is not None
    assert (build.verdict, build.tier) == ("fits", "host")
    assert build.split_bytes is not None
    assert build.split_bytes < build.whole_bytes


@pytest.mark.parametrize(("card", "nvlink"), [("NVIDIA A100-SXM4-80GB", True), ("NVIDIA A100 80GB PCIe", False)])
def test_a_fits_engine_knows_its_machine_and_its_links(card: str, nvlink: bool) -> None:
    source = WorkloadSource(kind="file", path="/model.py", name="model", digest="1")
    settings = fit_settings(source, hardware=a_machine(4, name=card), gpus=4)
    machine = make_trial_engine(settings, FACTS, trial()).machine
    assert machine is not None
    assert machine.has_nvlink is nvlink
    assert machine.rates is not None
    assert (machine.capability, machine.cores) == ((8, 0), 64)
