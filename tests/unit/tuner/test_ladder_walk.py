"""The ladder's walk: the rungs it tries and skips, the winner, and the closest rung when none fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from autods.config.deepspeed import accumulation_for
from autods.config.profiles import Budget
from autods.config.settings import Settings
from autods.errors import InputError
from autods.forecast.values import RungForecast
from autods.report.results.fit import ClosestRung
from autods.runner.testing import ScriptedRunner, failed, fit, out_of_memory
from autods.tuner.candidates import Candidate, list_candidates
from autods.tuner.forecaster import Forecaster, StepForecast
from autods.tuner.ladder_walk import WalkResult, find_closest_rung, propose_partitioned_build, walk_ladder
from autods.types import Action, Failed, Outcome, Tier, Trial
from tests.support.contexts import make_context
from tests.support.forecasters import ScriptedForecaster, scripted_forecast
from tests.support.walks import FACTS, FITS, OOM, SETTINGS, STEPS, TOO_SMALL

BROKEN_OP = failed(failure="toolchain", action="fix_environment", evidence="ninja: not found", op="cpu_adam")
NO_DISK = out_of_memory(tier="nvme", action="fix_environment")


def climb(answers: Mapping[str, Outcome], default: Outcome = OOM) -> tuple[WalkResult, ScriptedRunner]:
    """Walk the whole ladder; answers by rung, by 'rung again', or by 'rung without the headroom'."""

    def answer(trial: Trial) -> Outcome:
        kept = f"{trial.rung} without the headroom" if trial.knobs.keeps_headroom else ""
        names = (f"{trial.rung} again" if trial.repeat else "", kept, trial.rung)
        return next((answers[name] for name in names if name in answers), default)

    runner = ScriptedRunner(answer)
    return walk_ladder(list_candidates(SETTINGS, FACTS, {}), make_context(runner.run)), runner


def rungs_tried(runner: ScriptedRunner) -> list[str]:
    return list(dict.fromkeys(trial.rung for trial in runner.trials))


def by_name(settings: Settings, op_problems: Mapping[str, str] | None = None) -> dict[str, Candidate]:
    return {one.rung.name: one for one in list_candidates(settings, FACTS, op_problems or {})}


def test_walk_stops_at_the_first_rung_that_fits() -> None:
    walked, runner = climb({"ddp": FITS}, default=FITS)
    assert walked.winner is not None
    assert walked.winner.trial.rung == "ddp"
    assert len(runner.trials) == 1


def test_walk_tries_every_rung_although_a_faster_one_ran_out() -> None:
    walked, runner = climb({"zero3-nvme": FITS})
    assert rungs_tried(runner) == [rung.name for rung in SETTINGS.ladder]
    assert walked.winner is not None
    assert walked.winner.trial.rung == "zero3-nvme"


def test_the_walk_starts_with_the_least_memory() -> None:
    _, runner = climb({})
    for trial in runner.trials:
        assert (trial.purpose, trial.steps, trial.limited) == ("walk", STEPS, True)
        assert (trial.knobs.micro_batch, trial.knobs.accumulation, trial.knobs.checkpointing) == (1, 1, True)
    zero2 = next(trial for trial in runner.trials if trial.rung == "zero2")
    bucket = zero2.knobs.settings["zero_optimization.reduce_bucket_size"]
    assert isinstance(bucket, int)
    assert bucket * 2 <= SETTINGS.device_bytes * 0.005


def test_a_broken_op_disables_only_the_rungs_that_need_it() -> None:
    walked, runner = climb({"zero2-offload": BROKEN_OP})
    tried, skipped = rungs_tried(runner), {skip.rung: skip.reason for skip in walked.skipped}
    assert "zero3" in tried
    assert "zero3-offload-param" in tried  # its optimizer stays on the device
    lacking = ("zero3-offload-optimizer", "zero3-offload", "zero3-nvme")
    assert skipped == dict.fromkeys(lacking, "it needs cpu_adam: ninja: not found")


def test_a_machine_that_has_to_be_mended_stops_the_walk() -> None:
    lost = failed(failure="infrastructure", action="fix_environment", evidence="GPU has fallen off the bus")
    for fault in (lost, NO_DISK):
        walked, runner = climb({"zero1": fault, "zero2": FITS})
        assert rungs_tried(runner) == ["ddp", "zero1"]
        assert walked.stopped is not None
        assert walked.stopped.outcome == fault
        assert len(runner.trials) == 2  # and it is not asked again


def test_a_rung_whose_pinned_memory_ran_out_is_tried_unpinned() -> None:
    pins = "zero_optimization.offload_optimizer.pin_memory"

    def answer(trial: Trial) -> Outcome:
        if trial.rung != "zero2-offload":
            return OOM
        return FITS if trial.knobs.settings.get(pins) is False else out_of_memory(tier="pinned")

    walked = walk_ladder(list_candidates(SETTINGS, FACTS, {}), make_context(ScriptedRunner(answer).run))
    assert walked.winner is not None
    assert walked.winner.trial.rung == "zero2-offload"
    assert walked.winner.trial.knobs.settings[pins] is False


def test_rungs_with_as_much_host_memory_are_skipped() -> None:
    walked, runner = climb({"zero2-offload": out_of_memory(tier="pinned")})
    assert [trial.rung for trial in runner.trials].count("zero2-offload") == 2
    assert "zero3-offload" in {skip.rung for skip in walked.skipped}
    assert "zero3-nvme" in rungs_tried(runner)


def test_a_rung_with_a_full_allocator_loses_to_a_leaner_one() -> None:
    full = fit(peak_bytes=1, alloc_retries=3)
    walked, _ = climb({"zero1": full, "zero1 without the headroom": OOM, "zero2": FITS})
    assert walked.winner is not None
    assert walked.winner.trial.rung == "zero2"


def test_a_rung_with_a_full_allocator_wins_without_the_headroom() -> None:
    walked, runner = climb({"zero1": fit(peak_bytes=1, alloc_retries=3)})
    assert walked.winner is not None
    assert walked.winner.trial == runner.trials[-1]
    assert walked.winner.trial.knobs.keeps_headroom


def test_it_wins_where_no_other_rung_fits_at_all() -> None:
    walked, runner = climb({"zero1": fit(peak_bytes=1, alloc_retries=3), "zero1 without the headroom": OOM})
    assert walked.winner is not None
    assert walked.winner.trial.rung == "zero1"
    assert rungs_tried(runner) == [rung.name for rung in SETTINGS.ladder]


@pytest.mark.parametrize(("action", "asked"), [("retry", 2), ("leaner_rung", 2), ("fix_environment", 1)])
def test_only_what_may_be_a_fluke_is_asked_once_more(action: Action, asked: int) -> None:
    _, runner = climb({"zero1": failed(action=action)})
    assert [trial.rung for trial in runner.trials].count("zero1") == asked


def test_a_failure_that_every_rung_shares_stops_the_walk() -> None:
    user_code = failed(failure="user_code", action="fix_code")
    walked, runner = climb({"zero1": user_code, "zero2": FITS})
    assert [trial.rung for trial in runner.trials] == ["ddp", "zero1"]
    assert walked.winner is None
    assert walked.stopped is not None
    assert walked.stopped.outcome == user_code


REFUSED = failed(failure="config", action="fix_config", evidence="AssertionError: ZeRO-3 does not take it")


def test_a_config_that_one_stage_refuses_ends_no_walk() -> None:
    walked, runner = climb({"zero3": REFUSED, "zero3-nvme": FITS, "zero2": FITS}, default=OOM)
    assert walked.winner is not None
    assert walked.winner.trial.rung == "zero2"
    refused_first = [*list_candidates(SETTINGS, FACTS, {})][::-1]
    runner = ScriptedRunner(lambda trial: REFUSED if "zero3" in trial.rung else FITS)
    walked = walk_ladder([each for each in refused_first if each.rung.name != "zero3-nvme"], make_context(runner.run))
    assert walked.winner is not None
    assert walked.winner.trial.rung == "zero2-offload"


def test_a_refused_stage_is_tried_with_less_offloading_alone() -> None:
    walked, runner = climb({"zero3": REFUSED})
    skipped = {skip.rung: skip.reason for skip in walked.skipped}
    assert "zero3" in rungs_tried(runner)
    assert {"zero3-offload-optimizer", "zero3-offload-param", "zero3-offload", "zero3-nvme"} <= set(skipped)
    why = "it sets all that zero3 does, whose config is refused: AssertionError: ZeRO-3 does not take it"
    assert skipped["zero3-offload"] == why
    _, runner = climb({"zero3-offload-param": REFUSED})
    assert "zero3-offload-optimizer" in rungs_tried(runner)
    assert "zero3-offload" not in rungs_tried(runner)


def test_a_config_that_two_stages_refuse_alike_stops_the_walk() -> None:
    walked, runner = climb({"zero1": REFUSED, "zero2": REFUSED, "zero3": FITS})
    assert rungs_tried(runner) == ["ddp", "zero1", "zero2"]
    assert walked.winner is None
    assert walked.stopped is not None
    assert walked.stopped.outcome == REFUSED


def test_where_nothing_fits_a_refused_config_is_the_users_error() -> None:
    walked, runner = climb({"zero1": REFUSED})
    assert "zero3-nvme" in rungs_tried(runner)
    assert walked.stopped is not None
    assert (walked.stopped.trial.rung, walked.stopped.outcome) == ("zero1", REFUSED)


def test_a_fluke_is_asked_once_more() -> None:
    walked, runner = climb({"ddp": failed(), "ddp again": FITS})
    assert [trial.repeat for trial in runner.trials] == [0, 1]
    assert walked.winner is not None
    assert walked.winner.trial.rung == "ddp"
    assert len(walked.records) == 2


def test_a_rung_that_fails_twice_is_left() -> None:
    walked, runner = climb({"ddp": failed(), "zero1": FITS})
    assert [trial.rung for trial in runner.trials] == ["ddp", "ddp", "zero1"]
    assert walked.winner is not None
    assert walked.stopped is None


def test_one_rank_has_no_sharding_to_gain() -> None:
    result = by_name(replace(SETTINGS, gpus=1))
    skipped = {name for name, one in result.items() if one.skip}
    assert skipped == {"zero1", "zero2", "zero3"}
    assert result["zero1"].skip == "one rank: no sharding to gain"


def test_rungs_that_lack_something_are_skipped_with_the_reason() -> None:
    listed = list_candidates(replace(SETTINGS, nvme_path=None), FACTS, {"cpu_adam": "no C++ compiler"})
    runner = ScriptedRunner(lambda trial: OOM)
    context = make_context(runner.run)
    walked = walk_ladder(listed, context)
    reasons = {one.rung: one.reason for one in walked.skipped}
    assert context.memory.events == walked.skipped
    assert reasons["zero3-nvme"] == "no --nvme-path was given"
    assert reasons["zero2-offload"] == "its op cpu_adam cannot be built: no C++ compiler"
    assert not set(reasons) & set(rungs_tried(runner))


def test_the_walk_accumulates_at_most_twice() -> None:
    assert by_name(replace(SETTINGS, global_batch=64))["ddp"].knobs.accumulation == 2
    assert by_name(replace(SETTINGS, global_batch=2))["ddp"].knobs.accumulation == 1


def test_a_global_batch_that_cannot_be_split_is_an_error() -> None:
    assert accumulation_for(64, 4, 2) == 8
    with pytest.raises(ValueError, match="no multiple of 3 × 2"):
        accumulation_for(64, 3, 2)


def closest(
    peaks: Mapping[str, int], *, can_unlimit: bool = True, limit: int = 100, most_s: float = 0.0
) -> ClosestRung | None:
    """The shortfall when the named rungs ran out of device memory and would peak there without the limit."""

    def answer(trial: Trial) -> Outcome:
        if trial.rung not in peaks:
            return failed()
        return out_of_memory(missing_bytes=3) if trial.limited else fit(peak_bytes=peaks[trial.rung])

    runner = ScriptedRunner(answer)
    device = "cpu" if can_unlimit else "cuda"
    context = make_context(
        runner.run, device=device, device_bytes=limit, device_bytes_asked=False, budget=Budget(seconds=most_s)
    )
    walked = walk_ladder(list_candidates(SETTINGS, FACTS, {}), context)
    assert walked.winner is None
    return find_closest_rung(walked, context)


def test_the_closest_rung_is_the_one_that_lacks_least() -> None:
    assert closest({"ddp": 500, "zero3": 120, "zero3-offload": 300}) == ClosestRung(
        rung="zero3", missing_bytes=20, exact=True
    )


def test_a_limit_that_cannot_be_lifted_leaves_a_lower_bound() -> None:
    assert closest({"zero3": 120}, can_unlimit=False) == ClosestRung(rung="zero3", missing_bytes=3, exact=False)


def test_a_spent_budget_leaves_a_lower_bound() -> None:
    a_trial_s = 1.0
    assert closest({"zero3": 120}, most_s=a_trial_s) == ClosestRung(rung="zero3", missing_bytes=3, exact=False)


def test_a_peak_below_the_limit_reports_the_failed_allocation() -> None:
    assert closest({"zero3": 90}) == ClosestRung(rung="zero3", missing_bytes=3, exact=False)


def test_nothing_is_closest_when_no_rung_ran_out_of_device_memory() -> None:
    assert closest({}) is None


def test_the_shortfall_is_measured_without_the_limit() -> None:
    _, runner = climb({})
    walked = walk_ladder(list_candidates(SETTINGS, FACTS, {}), make_context(runner.run))
    free = ScriptedRunner(lambda trial: fit(peak_bytes=2**30))
    find_closest_rung(walked, make_context(free.run))
    assert [trial.rung for trial in free.trials] == [record.trial.rung for record in walked.records]
    assert not any(trial.limited for trial in free.trials)


@pytest.mark.parametrize("tier", ["host", "pinned"])
def test_a_full_host_rules_out_rungs_with_as_much_on_it(tier: Tier) -> None:
    walked, runner = climb({"zero2-offload": replace(OOM, tier=tier), "zero3-nvme": OOM})
    tried = rungs_tried(runner)
    assert "zero3" in tried
    assert "zero3-offload-param" in tried  # the parameters alone are less than the optimizer
    assert "zero3-offload" not in tried
    reason = next(skip.reason for skip in walked.skipped if skip.rung == "zero3-offload")
    assert reason == "it needs as much host memory as zero2-offload, which ran out of it"


def walk_with_sizes(
    trains: Callable[[int], bool], refused: Outcome, global_batch: int | None
) -> tuple[WalkResult, ScriptedRunner]:
    """Walk with a model that trains with these micro batches alone; zero2 is the first rung that fits."""

    def answer(trial: Trial) -> Outcome:
        fits_or_not = FITS if trial.rung == "zero2" else OOM
        return fits_or_not if trains(trial.knobs.micro_batch) else refused

    runner = ScriptedRunner(answer)
    context = make_context(runner.run, global_batch=global_batch)
    return walk_ladder(list_candidates(context.settings, FACTS, {}), context), runner


def walked_with_least(least: int, global_batch: int | None = None) -> tuple[WalkResult, ScriptedRunner]:
    """Of a model that needs so many samples."""
    return walk_with_sizes(lambda size: size >= least, TOO_SMALL, global_batch)


def test_a_model_that_needs_more_samples_gets_them_once() -> None:
    walked, runner = walked_with_least(3)
    sizes = [trial.knobs.micro_batch for trial in runner.trials]
    assert sizes == [1, 2] + [4] * (len(sizes) - 2)
    assert walked.winner is not None
    assert (walked.winner.trial.rung, walked.winner.trial.knobs.micro_batch) == ("zero2", 4)


def test_a_model_that_needs_more_samples_keeps_the_global_batch() -> None:
    walked, runner = walked_with_least(2, global_batch=18)  # a rank's share is 9
    assert [trial.knobs.micro_batch for trial in runner.trials][:2] == [1, 3]
    assert walked.winner is not None
    walked, runner = walked_with_least(2, global_batch=2)
    assert [trial.knobs.micro_batch for trial in runner.trials] == [1]
    assert walked.stopped is not None


def test_what_wants_ever_more_samples_stops_the_walk() -> None:
    walked, runner = walked_with_least(100)
    assert [trial.knobs.micro_batch for trial in runner.trials] == [1, 2, 4, 8]
    assert walked.stopped is not None
    assert walked.stopped.outcome == TOO_SMALL


def walked_with_own(own: int, global_batch: int | None = None) -> tuple[WalkResult, ScriptedRunner]:
    """Of a script whose command line cannot change its micro batch."""
    refused = replace(failed(action="fix_code", evidence=f"its batches hold {own} samples"), own_batch=own)
    return walk_with_sizes(lambda size: size == own, refused, global_batch)


def test_a_script_s_own_micro_batch_is_the_only_one_tried() -> None:
    walked, runner = walked_with_own(6)
    sizes = [trial.knobs.micro_batch for trial in runner.trials]
    assert sizes == [1] + [6] * (len(sizes) - 1)
    assert walked.own_batch == 6
    assert walked.winner is not None
    assert (walked.winner.trial.rung, walked.winner.trial.knobs.micro_batch) == ("zero2", 6)


@pytest.mark.parametrize("first", [failed(), TOO_SMALL], ids=["accidental", "too few samples"])
def test_a_failure_before_hides_no_script_s_own_micro_batch(first: Outcome) -> None:
    own = replace(failed(action="fix_code"), own_batch=6)

    def answer(trial: Trial) -> Outcome:
        if trial.knobs.micro_batch == 6:
            return FITS if trial.rung == "zero2" else OOM
        return first if (trial.knobs.micro_batch, trial.repeat) == (1, 0) else own

    runner = ScriptedRunner(answer)
    context = make_context(runner.run)
    walked = walk_ladder(list_candidates(context.settings, FACTS, {}), context)
    sizes = [trial.knobs.micro_batch for trial in runner.trials]
    assert sizes[2:] == [6] * (len(sizes) - 2)
    assert walked.own_batch == 6


def test_a_script_s_own_micro_batch_has_to_divide_the_global() -> None:
    with pytest.raises(InputError, match="own micro batch 6 × 2 ranks does not divide the global batch 16"):
        walked_with_own(6, global_batch=16)


def test_a_script_s_own_micro_batch_may_be_too_small_to_train() -> None:
    """Its loader gives one sample, and batch normalisation needs two."""
    own = replace(failed(action="fix_code"), own_batch=1)
    runner = ScriptedRunner(lambda trial: TOO_SMALL if trial.knobs.micro_batch == 1 else own)
    context = make_context(runner.run)
    walked = walk_ladder(list_candidates(context.settings, FACTS, {}), context)
    assert [trial.knobs.micro_batch for trial in runner.trials] == [1, 2, 1]
    assert walked.stopped is not None
    assert walked.stopped.outcome == TOO_SMALL


def test_the_rungs_that_ran_out_while_they_built_are_told() -> None:
    answers = {"zero3": replace(out_of_memory(tier="host"), phase="build"), "zero2": out_of_memory(tier="host")}
    forecaster = ScriptedForecaster(lambda trial: None)
    candidates = list_candidates(SETTINGS, FACTS, {})
    walked, runner = climb(answers)
    context = make_context(runner.run, forecaster=forecaster)  # type: ignore[arg-type]
    assert propose_partitioned_build(candidates, walked, context) is None
    assert forecaster.ran_out == {"zero3": "host"}


@dataclass
class Known(Forecaster):
    """Forecasts that 16 samples fit, and a step of one second and `sample_s` a sample."""

    sample_s: float = 0.1

    def forecast(self, trial: Trial) -> RungForecast:
        return scripted_forecast(trial.rung, "fits", limit=2)

    def step_time(self, trial: Trial) -> StepForecast:
        step_s = trial.knobs.accumulation * (1 + self.sample_s * trial.knobs.micro_batch)
        return StepForecast(seconds=step_s, low_seconds=step_s / 2, computed_seconds=step_s)

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int:
        return max(size for size in sizes if size <= 16)


def sizes_walked(most: int, beyond: Outcome = OOM, sample_s: float = 0.1, **asked: Any) -> list[int]:
    """The micro batches that the walk tries of a rung in which `most` fit; `beyond` is how larger ones end."""
    runner = ScriptedRunner(lambda trial: FITS if trial.knobs.micro_batch <= most else beyond)
    context = make_context(runner.run, forecaster=Known(sample_s), **asked)
    walked = walk_ladder(list_candidates(context.settings, FACTS, {}), context)
    assert walked.winner is not None
    assert [trial.rung for trial in runner.trials] == ["ddp"] * len(runner.trials)
    assert walked.winner.trial == runner.trials[-1]
    return [trial.knobs.micro_batch for trial in runner.trials]


def test_the_walk_starts_at_the_forecasts_micro_batch() -> None:
    assert sizes_walked(16) == [16]


@pytest.mark.parametrize(("most", "tried"), [(15, [16, 8]), (7, [16, 8, 1])])
def test_a_forecast_that_is_too_high_costs_two_trials_at_most(most: int, tried: list[int]) -> None:
    assert sizes_walked(most) == tried


def test_the_smallest_shows_whether_a_large_batch_failed_alone() -> None:
    assert sizes_walked(4, failed(action="fix_code", evidence="int32 overflow")) == [16, 1]


@pytest.mark.parametrize(
    ("failure", "trials"),
    [
        (failed(failure="toolchain", action="fix_environment", op="fused_adam"), 1),
        (replace(failed(), hung_at="a.py:3"), 2),
    ],
)
def test_no_smaller_batch_is_tried_for_what_no_size_causes(failure: Failed, trials: int) -> None:
    runner = ScriptedRunner(lambda trial: failure if trial.rung == "ddp" else FITS)
    context = make_context(runner.run, forecaster=Known())
    walk_ladder(list_candidates(context.settings, FACTS, {}), context)
    sizes = [trial.knobs.micro_batch for trial in runner.trials if trial.rung == "ddp"]
    assert (set(sizes), len(sizes)) == ({16}, trials)


def test_the_walk_takes_what_divides_the_global_batch() -> None:
    assert sizes_walked(16, global_batch=24) == [12]
    assert sizes_walked(11, global_batch=24) == [12, 6]


def test_the_walk_starts_where_a_step_is_short_enough_to_time() -> None:
    assert sizes_walked(16, sample_s=2.0) == [5]  # 11 s; the shortest takes 3 s


def test_the_least_memory_is_walked_at_the_smallest() -> None:
    assert sizes_walked(16, objective="memory") == [1]
