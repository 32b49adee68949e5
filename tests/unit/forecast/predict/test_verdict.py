"""Verdicts: from what an engine allocated, through allocators and constants, to a sentence with bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autods.forecast.predict.calibration import Observation, fit_calibration
from autods.forecast.predict.memory_model import Overheads, compute_rank_memory, read_overheads
from autods.forecast.predict.verdict import judge_memory, may_fit_offloaded
from autods.forecast.values import EngineSpec, ForecastPhase, RungForecast, Simulation, TierForecast, Trace
from autods.types import Tier
from tests.support.growth import FRAGMENTED_LIVE, GIB, MIB, fragment

NOTHING_BESIDE = Overheads(spread={"cuda": 0.02, "cpu": 0.02}, least={"cuda": 0.01, "cpu": 0.01})


def ask(**changes: Any) -> EngineSpec:
    zero2 = EngineSpec(
        rung="zero2",
        ds_config={"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "bf16": {"enabled": True}},
        world_size=8,
        ranks_per_node=4,
        device_bytes=24 * GIB,
    )
    return replace(zero2, **changes)


def simulated(
    *, device: int = 10 * GIB, host: int = 0, pinned: int = 0, nvme: int = 0, traces: Mapping[Tier, Trace] | None = None
) -> Simulation:
    """An engine whose optimizer step needs `device`, and half of it before."""
    phases: tuple[ForecastPhase, ...] = ("init", "forward", "backward", "step")
    sizes = {"init": device // 2, "forward": device // 2, "backward": device // 2, "step": device}
    made: Mapping[Tier, Trace] = {
        "device": Trace(events=(device // 2, device - device // 2), marks=((0, "init"), (1, "step"))),
        "pinned": Trace(events=(pinned,) if pinned else (), marks=((0, "init"),)),
    }
    return Simulation(
        micro_batch=1,
        live_bytes={phase: {"device": sizes[phase], "host": host, "pinned": pinned} for phase in phases},
        traces=made if traces is None else traces,
        nvme_bytes=nvme,
    )


def said(*, limit: int = 24 * GIB, **changes: Any) -> RungForecast:
    return judge_memory(ask(), simulated(**changes), limits={"device": limit}, overheads=NOTHING_BESIDE)


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(11 * GIB, "fits"), (int(10.2 * GIB), "tight"), (int(9.8 * GIB), "tight"), (9 * GIB, "cannot_fit")],
)
def test_a_rung_cannot_fit_only_below_its_interval(limit: int, verdict: str) -> None:
    # 10 GiB and a spread of 2 %: 9.61 to 10.41 GiB.
    assert said(limit=limit).verdict == verdict


@pytest.mark.parametrize(("limit", "verdict"), [(9 * GIB, "tight"), (6 * GIB, "tight"), (4 * GIB, "cannot_fit")])
def test_an_upper_bound_cannot_fit_by_its_states_only(limit: int, verdict: str) -> None:
    breakdown = {"parameters": 2 * GIB, "optimizer": 4 * GIB, "activations": 4 * GIB}
    bound = replace(simulated(), is_upper_bound=True, breakdown=breakdown)  # building takes 5 GiB
    forecast = judge_memory(ask(), bound, limits={"device": limit}, overheads=NOTHING_BESIDE)
    assert forecast.verdict == verdict
    assert forecast.memory["device"].peak_bytes == said().memory["device"].peak_bytes


def test_the_reason_names_bytes_limit_and_deciding_phase() -> None:
    assert said().reason == "needs 10.0 GiB (9.6 to 10.4) of 24.0 GiB; the optimizer step decides"


def test_the_largest_phase_is_the_forecasts_peak() -> None:
    forecast = said()
    assert forecast.decides == "step"
    assert max(forecast.by_phase.values()) == forecast.memory["device"].peak_bytes
    assert forecast.by_phase["forward"] < 0.6 * forecast.by_phase["step"]


def test_a_card_holds_the_context_and_nccl_beside_the_allocator() -> None:
    need = compute_rank_memory(ask(), simulated(), read_overheads(), expandable=False)
    card = judge_memory(ask(), simulated(), limits={"device": 24 * GIB}).memory["device"]
    assert card.peak_bytes - need.device.peak_bytes == (751 + 600) * MIB
    assert card.high_bytes > need.device.high_bytes + (700 + 1600) * MIB


def test_one_rank_has_nccl_as_several_have() -> None:
    alone = judge_memory(ask(world_size=1, ranks_per_node=1), simulated(), limits={}).memory["device"]
    several = judge_memory(ask(), simulated(), limits={}).memory["device"]
    assert several.peak_bytes == alone.peak_bytes


def test_host_memory_counts_for_all_ranks_of_a_node() -> None:
    forecast = judge_memory(
        ask(), simulated(host=20 * GIB, pinned=8 * GIB), limits={"device": 24 * GIB, "host": 64 * GIB},
        overheads=NOTHING_BESIDE,
    )  # fmt: skip
    assert forecast.memory["host"].peak_bytes == 4 * 28 * GIB
    assert forecast.verdict == "cannot_fit"
    assert forecast.reason == "needs 112.0 GiB of 64.0 GiB of host memory a node"


def test_the_device_is_the_reason_while_everything_fits() -> None:
    limits: Mapping[Tier, int] = {"device": 240 * GIB, "host": 130 * GIB}
    forecast = judge_memory(ask(), simulated(host=28 * GIB), limits=limits, overheads=NOTHING_BESIDE)
    assert forecast.verdict == "fits"
    assert forecast.reason.startswith("needs 10.0 GiB (9.6 to 10.4) of 240.0 GiB; the optimizer step")


def test_of_two_tiers_that_do_not_fit_the_fuller_one_is_the_reason() -> None:
    limits: Mapping[Tier, int] = {"device": 9 * GIB, "host": 20 * GIB}
    forecast = judge_memory(ask(), simulated(host=28 * GIB), limits=limits, overheads=NOTHING_BESIDE)
    assert "host memory" in forecast.reason


def test_a_job_smaller_than_a_node_counts_its_own_ranks() -> None:
    forecast = judge_memory(
        ask(world_size=2, ranks_per_node=8), simulated(host=5 * GIB), limits={}, overheads=NOTHING_BESIDE
    )
    assert forecast.memory["host"].peak_bytes == 10 * GIB


def test_pinned_memory_is_rounded_to_powers_of_two() -> None:
    forecast = judge_memory(ask(), simulated(pinned=5 * GIB), limits={}, overheads=NOTHING_BESIDE)
    assert forecast.memory["pinned"] == TierForecast(
        peak_bytes=8 * GIB, low_bytes=5 * GIB, high_bytes=8 * GIB, limit_bytes=None
    )
    assert forecast.memory["host"].peak_bytes == 4 * 8 * GIB


def test_buffers_that_deepspeed_locks_itself_are_not_rounded() -> None:
    own = Trace(events=(5 * GIB,), marks=((0, "init"),), unrounded=frozenset({0}))
    traces: Mapping[Tier, Trace] = {"device": simulated().traces["device"], "pinned": own}
    forecast = judge_memory(ask(), simulated(pinned=5 * GIB, traces=traces), limits={}, overheads=NOTHING_BESIDE)
    assert forecast.memory["pinned"].high_bytes == 5 * GIB


def test_swap_files_of_a_node_are_held_against_its_nvme() -> None:
    forecast = judge_memory(
        ask(), simulated(nvme=100 * GIB), limits={"device": 24 * GIB, "nvme": 300 * GIB}, overheads=NOTHING_BESIDE
    )
    assert (forecast.verdict, forecast.memory["nvme"].peak_bytes) == ("cannot_fit", 400 * GIB)
    assert forecast.reason == "needs 400.0 GiB of 300.0 GiB of NVMe a node"


def test_the_host_of_a_node_is_known_by_phase() -> None:
    made = simulated(host=2 * GIB, pinned=GIB)
    lives = {**made.live_bytes, "build": {"device": 0, "host": 7 * GIB, "pinned": 0}}
    forecast = judge_memory(ask(), replace(made, live_bytes=lives), limits={}, overheads=NOTHING_BESIDE)
    phases = {"build": 28 * GIB, "init": 12 * GIB, "forward": 12 * GIB, "backward": 12 * GIB, "step": 12 * GIB}
    assert forecast.host_by_phase == phases
    assert (forecast.host_is_fullest_at_start, forecast.host_after_start_bytes) == (True, 12 * GIB)


def test_a_tier_without_a_limit_cannot_fail() -> None:
    assert judge_memory(ask(), simulated(host=900 * GIB, nvme=900 * GIB), limits={"device": 24 * GIB}).verdict == "fits"


def of_events(events: list[int], device: int, limit: int, marks: tuple[tuple[int, ForecastPhase], ...]) -> RungForecast:
    traces: Mapping[Tier, Trace] = {"device": Trace(events=events, marks=marks)}
    made = replace(simulated(device=device), traces=traces)
    return judge_memory(ask(), made, limits={"device": limit}, overheads=NOTHING_BESIDE)


def test_memory_that_is_cached_once_is_not_needed() -> None:
    # 3 GiB of init are cached when the step asks for 4: 7 reserved on a large card, 4 on a small one.
    events = [3 * GIB, -1, 4 * GIB]
    held = of_events(events, 4 * GIB, 6 * GIB, ((0, "init"), (2, "step"))).memory["device"]
    assert held.peak_bytes == pytest.approx(4 * GIB, rel=0.02)
    assert held.low_bytes < 4 * GIB < held.peak_bytes < held.high_bytes < 4.7 * GIB


def test_memory_that_each_step_would_give_back_is_needed() -> None:
    events, marks = fragment(steps=2)
    forecast = of_events(events, FRAGMENTED_LIVE, 2600 * MIB, marks)
    assert forecast.memory["device"].peak_bytes > 1.3 * FRAGMENTED_LIVE
    assert forecast.verdict == "tight"
    assert not forecast.expandable
    assert "would find no" in forecast.reason


def judge_fragments(limit: int, **options: Any) -> RungForecast:
    """The forecast of a step that leaves fragments, where the environment leaves open whether segments grow."""
    events, marks = fragment(steps=2)
    traces: Mapping[Tier, Trace] = {"device": Trace(events=events, marks=marks)}
    made = replace(simulated(device=FRAGMENTED_LIVE), traces=traces)
    given = {"expandable": None, **options}
    return judge_memory(ask(), made, limits={"device": limit}, overheads=NOTHING_BESIDE, **given)


def test_segments_grow_where_the_device_lacks_memory_else() -> None:
    forecast = judge_fragments(2600 * MIB)
    assert (forecast.expandable, forecast.verdict) == (True, "fits")
    assert "with expandable_segments:True" in forecast.reason
    assert judge_fragments(2600 * MIB, expandable=False).verdict == "tight"


@pytest.mark.parametrize("limit", [8000 * MIB, 1500 * MIB], ids=["fits without", "too small for its tensors"])
def test_segments_stay_fixed_where_growing_would_not_help(limit: int) -> None:
    assert not judge_fragments(limit).expandable


@pytest.mark.parametrize("expandable", [None, False, True])
def test_a_rough_judgement_fits_where_the_exact_one_does(expandable: bool | None) -> None:
    limits = range(1500 * MIB, 4000 * MIB, 100 * MIB)
    exact = [judge_fragments(limit, expandable=expandable).fill <= 1 for limit in limits]
    assert exact == [judge_fragments(limit, expandable=expandable, roughly=True).fill <= 1 for limit in limits]
    assert set(exact) == {False, True}


def test_segments_never_grow_for_a_device_without_that_allocator() -> None:
    events, marks = fragment(steps=2)
    made = replace(simulated(device=FRAGMENTED_LIVE), traces={"device": Trace(events=events, marks=marks)})
    cpu = judge_memory(ask(device="cpu"), made, limits={"device": 2600 * MIB}, expandable=None)
    assert not cpu.expandable


def test_trials_that_measured_more_raise_the_forecast() -> None:
    seen = [Observation(rung=rung, predicted_bytes=100, measured_bytes=110) for rung in ("ddp", "zero1", "zero2") * 3]
    learned = fit_calibration(seen, spread=0.02, least=0.01)
    before = said().memory["device"]
    after = judge_memory(
        ask(), simulated(), limits={"device": 24 * GIB}, overheads=NOTHING_BESIDE, calibration=learned
    ).memory["device"]
    assert 1.08 < after.peak_bytes / before.peak_bytes < 1.1
    assert after.low_bytes > before.peak_bytes


def test_a_phase_that_the_trace_does_not_hold_counts_its_live_bytes() -> None:
    later = Trace(events=(2 * GIB,), marks=((0, "forward"),))
    made = replace(simulated(device=10 * GIB), traces={"device": later})
    assert judge_memory(ask(), made, limits={}, overheads=NOTHING_BESIDE).memory["device"].peak_bytes == 10 * GIB


def test_cpu_ranks_hold_their_tensors_in_the_nodes_memory() -> None:
    forecast = judge_memory(ask(device="cpu"), simulated(), limits={"device": 24 * GIB}, overheads=NOTHING_BESIDE)
    assert forecast.memory["host"].peak_bytes == 4 * forecast.memory["device"].peak_bytes
    assert forecast.memory["device"].peak_bytes == pytest.approx(10 * GIB, rel=0.001)


def test_the_shipped_constants_are_read_and_each_has_a_source() -> None:
    rows = read_overheads().constant
    assert {row.device for row in rows} == {"cuda", "cpu"}
    assert all(row.source for row in rows)


@pytest.mark.parametrize(("full", "helps"), [("forward", True), ("backward", True), ("build", False), ("step", False)])
def test_inputs_on_the_host_help_forward_and_backward(full: ForecastPhase, helps: bool) -> None:
    device = TierForecast(low_bytes=9, peak_bytes=11, high_bytes=12, limit_bytes=10)
    forecast = RungForecast(
        rung="zero2", verdict="tight", reason="", micro_batch=1,
        memory={"device": device}, by_phase={full: 11}, breakdown={"activations": 2},
    )  # fmt: skip
    assert may_fit_offloaded(forecast) is helps
