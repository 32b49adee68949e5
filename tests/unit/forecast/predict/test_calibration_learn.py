"""What a trial teaches the forecast."""

from __future__ import annotations

from dataclasses import replace

from autods.forecast.predict.calibration import calibrate_forecast, observe_trial
from autods.forecast.predict.memory_model import read_overheads
from autods.forecast.predict.verdict import judge_memory
from autods.forecast.values import EngineSpec, Interval, Simulation, Trace
from autods.types import CardUse, Failed, Fit, OutOfMemory, TierUse, Timing

MIB = 2**20
ASK = EngineSpec(
    rung="zero2", ds_config={"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}, world_size=2,
    ranks_per_node=2, device_bytes=4096 * MIB, device="cpu",
)  # fmt: skip
SIMULATED = Simulation(
    micro_batch=1,
    live_bytes={"step": {"device": 400 * MIB}},
    traces={"device": Trace(events=(400 * MIB,), marks=((0, "step"),))},
)


def fit(mib: int, limit: int | None = None, beside: int | None = None) -> Fit:
    """`mib` are reserved; a card holds `beside` besides."""
    card = None
    if beside is not None:
        card = CardUse(allocated_bytes=0, reserved_bytes=mib * MIB, nvml_bytes=(mib + beside) * MIB)
        mib += beside
    return Fit(
        card=card,
        memory={"device": TierUse(peak_bytes=mib * MIB, limit_bytes=limit)}, samples_per_second=1.0,
        tokens_per_second=None, step_s=(1.0,), spread=0.0, losses=(), timing=Timing(wall_s=1.0),
    )  # fmt: skip


def test_a_fit_is_compared_with_tensors_and_overheads() -> None:
    pair = observe_trial(ASK, SIMULATED, fit(500))
    assert pair is not None
    assert (pair.rung, pair.measured_bytes, pair.at_least) == ("zero2", 500 * MIB, False)
    assert 440 * MIB < pair.predicted_bytes < 460 * MIB


def test_running_out_says_that_at_least_the_limit_was_needed() -> None:
    out = OutOfMemory(tier="device", rank=0, phase="step", evidence="", limit_bytes=600 * MIB)
    pair = observe_trial(ASK, SIMULATED, out)
    assert pair is not None
    assert (pair.measured_bytes, pair.at_least) == (600 * MIB, True)


def test_a_failure_or_another_tier_shows_nothing() -> None:
    host = OutOfMemory(tier="host", rank=0, phase="step", evidence="", limit_bytes=600 * MIB)
    failed = Failed(failure="user_code", rank=0, phase="build", evidence="", action="fix_code", advice="")
    assert observe_trial(ASK, SIMULATED, host) is None
    assert observe_trial(ASK, SIMULATED, failed) is None


def test_a_cuda_trial_is_compared_with_bytes_reserved_in_its_limit() -> None:
    # 300 MiB are cached when 400 are asked for: 700 on a large card, 400 where 600 of 1600 are left.
    events = (300 * MIB, -1, 400 * MIB)
    traces = {"device": Trace(events=events, marks=((0, "init"),))}
    cuda, made = replace(ASK, device="cuda", device_bytes=2**36), replace(SIMULATED, traces=traces)
    large, small = (
        observe_trial(cuda, made, fit(740, beside=1000)),
        observe_trial(cuda, made, fit(440, limit=1600 * MIB, beside=1000)),
    )
    assert large is not None
    assert small is not None
    assert large.predicted_bytes - small.predicted_bytes == 300 * MIB
    assert (large.measured_bytes, small.measured_bytes) == (740 * MIB, 440 * MIB)


def test_bytes_beside_the_allocator_are_those_that_trials_measured() -> None:
    cuda = replace(ASK, device="cuda")
    pairs = [observe_trial(cuda, SIMULATED, fit(440, beside=beside)) for beside in (1000, 1200)]
    calibration = calibrate_forecast(cuda, [pair for pair in pairs if pair is not None])
    assert calibration.outside_allocator == Interval(low_bytes=1000 * MIB, peak_bytes=1200 * MIB, high_bytes=1200 * MIB)
    without = replace(calibration, outside_allocator=None)
    measured, stated = (
        judge_memory(cuda, SIMULATED, limits={}, calibration=each).memory["device"] for each in (calibration, without)
    )
    assert measured.peak_bytes - stated.peak_bytes == (1200 - 751 - 600) * MIB  # stated: the context and NCCL
    assert calibrate_forecast(cuda, ()).outside_allocator is None


def test_a_full_card_says_what_its_allocator_needed_at_least() -> None:
    out = OutOfMemory(tier="device", rank=0, phase="step", evidence="", limit_bytes=4000 * MIB)
    pair = observe_trial(replace(ASK, device="cuda"), SIMULATED, out)
    assert pair is not None
    assert pair.measured_bytes == (4000 - 850 - 1600) * MIB  # the context and NCCL at most


def test_a_machine_is_calibrated_by_the_spread_of_its_kind_of_device() -> None:
    stated = read_overheads().spread
    assert calibrate_forecast(ASK, ()).spread == stated["cpu"]
    assert calibrate_forecast(replace(ASK, device="cuda"), ()).spread == stated["cuda"]
