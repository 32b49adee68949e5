"""What trials teach a forecast: a ratio with an interval, by machine and rung."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from autods.forecast.predict.calibration import (
    Calibration,
    Observation,
    StepFactors,
    StepObservation,
    StepParts,
    fit_calibration,
    fit_step_factors,
)
from autods.schema import read_as


def pair(ratio: float, rung: str = "zero2", *, at_least: bool = False) -> Observation:
    return Observation(rung=rung, predicted_bytes=10**9, measured_bytes=int(ratio * 10**9), at_least=at_least)


def after(*pairs: Observation) -> Calibration:
    return fit_calibration(pairs, spread=0.03, least=0.01)


def width(calibration: Calibration, rung: str = "zero2") -> float:
    ratios = calibration.ratios(rung)
    return ratios.high / ratios.low - 1


def test_without_trials_the_forecast_stands_with_the_stated_interval() -> None:
    ratios = after().ratios("zero2")
    assert ratios.middle == 1
    assert (ratios.low, ratios.high) == (pytest.approx(0.942, abs=0.001), pytest.approx(1.062, abs=0.001))


def test_trials_that_agree_narrow_the_interval_to_a_floor() -> None:
    assert width(after(*[pair(1.0)] * 4)) < width(after(pair(1.0))) < width(after())
    assert width(after(*[pair(1.0)] * 10_000)) == pytest.approx(0.0202, abs=0.0001)


def test_trials_that_disagree_widen_it() -> None:
    assert width(after(pair(0.8), pair(1.25))) > width(after())


def test_a_steady_error_is_learned_within_a_few_trials() -> None:
    assert after(pair(1.2)).ratios("zero2").middle == pytest.approx(1.146, abs=0.01)
    assert after(*[pair(1.2)] * 5).ratios("zero2").middle == pytest.approx(1.195, abs=0.01)


def test_a_rungs_error_counts_most_for_itself() -> None:
    learned = after(*[pair(1.2, "zero2")] * 3)
    assert 1.1 < learned.ratios("zero3").middle < learned.ratios("zero2").middle < 1.2


def test_a_rung_whose_error_differs_keeps_its_error() -> None:
    learned = after(*[pair(1.0, "zero1")] * 6, *[pair(1.3, "zero3")] * 6)
    assert learned.ratios("zero1").middle < 1.05
    assert learned.ratios("zero3").middle > 1.2


def test_running_out_where_the_forecast_was_higher_teaches_nothing() -> None:
    assert after(pair(0.7, at_least=True)) == after()


def test_running_out_where_the_forecast_was_lower_moves_it_up() -> None:
    assert after(pair(1.3, at_least=True)).ratios("zero2").middle > 1.1


def test_it_goes_into_a_journal_line_and_comes_back() -> None:
    learned = after(pair(1.1), pair(1.05, "zero3"), pair(1.3, at_least=True))
    assert read_as(Calibration, json.loads(json.dumps(asdict(learned)))) == learned


def test_the_order_of_trials_does_not_matter() -> None:
    pairs = (pair(1.1), pair(0.97, "zero3"), pair(1.02), pair(1.2, "ddp"))
    one, other = after(*pairs), after(*reversed(pairs))
    assert one.ratios("zero2").middle == pytest.approx(other.ratios("zero2").middle)


def timed(
    computed_s: float, moved_s: float, measured_s: float, launched_s: float = 0.0, issued_s: float = 0.0
) -> Observation:
    parts = StepParts(computed_s=computed_s, launched_s=launched_s, moved_s=moved_s, issued_s=issued_s)
    step = StepObservation(parts=parts, measured_s=measured_s)
    return Observation(rung="zero2", predicted_bytes=1, measured_bytes=1, step=step)


def test_without_timed_steps_the_factors_are_the_earlier_ones() -> None:
    earlier = StepFactors(compute=1.2, link=0.9)
    assert fit_step_factors([pair(1.0)], earlier) == earlier


def test_a_slow_card_and_a_slow_link_are_told_apart() -> None:
    steps = [timed(1.0, 0.0, 1.3), timed(1.0, 1.0, 3.3), timed(0.5, 2.0, 4.65)] * 8  # 1.3 and 2 times as slow
    learned = fit_step_factors(steps, StepFactors())
    assert (learned.compute, learned.link) == (pytest.approx(1.3, rel=0.05), pytest.approx(2.0, rel=0.05))


def test_a_slow_processor_does_not_make_the_card_slow() -> None:
    # An H200 in a virtual machine: small steps are bound by its processor, the last one is not.
    small = [timed(0.03, 0.0, 0.234, launched_s=0.085, issued_s=0.112)]
    middle = [timed(0.18, 0.0, 0.25, launched_s=0.012, issued_s=0.112)]
    large = [timed(0.4, 0.0, 0.4, launched_s=0.0, issued_s=0.112)]
    learned = fit_step_factors([*small, *middle, *large] * 3, StepFactors())
    assert learned.launch == pytest.approx(2.1, abs=0.15)
    assert learned.compute == pytest.approx(1.0, abs=0.05)
    assert learned.correct(StepParts(computed_s=0.1, launched_s=0.01, moved_s=0, issued_s=0.11)) > 0.2


def test_one_timed_step_moves_the_factor_most_of_the_way() -> None:
    learned = fit_step_factors([timed(1.0, 0.0, 2.0)], StepFactors())
    assert 1.5 < learned.compute < 2.0
    assert learned.link == pytest.approx(1.0)


def test_a_factor_stays_within_reason() -> None:
    assert fit_step_factors([timed(1.0, 0.0, 10.0)] * 50, StepFactors()).compute == 4.0
