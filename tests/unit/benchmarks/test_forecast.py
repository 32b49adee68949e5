"""The pure parts of the forecast's benchmarks: what they count, and how they score."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autods.forecast.values import TierForecast

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import forecast_accuracy as accuracy
import forecast_verdicts as verdicts

MIB = 2**20


def row(measured_mib: int, *, low: int, peak: int, high: int, micro_batch: int = 1) -> verdicts.Row:
    said = TierForecast(low_bytes=low * MIB, peak_bytes=peak * MIB, high_bytes=high * MIB)
    return verdicts.Row(
        setup="gpt",
        rung="zero2",
        micro_batch=micro_batch,
        seen=False,
        measured_bytes=measured_mib * MIB,
        before=said,
        after=said,
    )


def tally(*rows: verdicts.Row, budgets: tuple[int, ...] = verdicts.BUDGETS) -> verdicts.Tally:
    return verdicts.tally(rows, lambda row: row.before, budgets)


def test_a_run_of_one_setup_keeps_the_others(tmp_path: Path) -> None:
    whole = row(500, low=480, peak=500, high=520)
    old, other, new = whole, replace(whole, setup="t5"), replace(whole, measured_bytes=7)
    cases = [{"setup": "gpt"}, {"setup": "t5"}]
    verdicts.write(tmp_path / "out.json", [old, other], cases)
    rows, verified = verdicts.read([tmp_path / "out.json"])
    assert verdicts.replace_setups(rows, verified, [new], []) == ([other, new], [{"setup": "t5"}])


def test_a_false_cannot_fit_is_counted() -> None:
    said = tally(row(500, low=520, peak=540, high=560), budgets=(510, 530))
    assert (said.false_cannot_fit, said.tight, said.false_fits) == (1, 1, 0)


def test_a_false_fits_is_counted() -> None:
    assert tally(row(500, low=450, peak=460, high=470), budgets=(480, 510)).false_fits == 1


def test_tight_is_right_only_near_the_limit() -> None:
    said = tally(row(500, low=400, peak=500, high=600), budgets=(300, 440, 460, 540, 560, 700))
    assert (said.cases, said.far, said.right_far) == (6, 4, 2)
    assert said.right_share == 0.5


def test_rows_without_a_trial_or_a_forecast_do_not_count() -> None:
    whole = row(500, low=480, peak=500, high=520)
    said = tally(whole, replace(whole, measured_bytes=None, problem="no compiler"), replace(whole, before=None))
    assert (said.rows, said.cases) == (1, len(verdicts.BUDGETS))


def test_the_bar_needs_two_hundred_cases_and_no_false_cannot_fit() -> None:
    good, bad = row(500, low=490, peak=500, high=510), row(500, low=520, peak=530, high=540)
    assert not verdicts.passes([good])
    assert verdicts.passes([good] * 6)
    assert not verdicts.passes([good] * 6 + [bad])


def test_only_the_trials_at_micro_batch_one_are_learned_from() -> None:
    pairs = verdicts.pairs_of([row(500, low=1, peak=490, high=999), row(600, low=1, peak=490, high=999, micro_batch=2)])
    assert [(pair.predicted_bytes, pair.measured_bytes) for pair in pairs] == [(490 * MIB, 500 * MIB)]


def test_a_setup_on_one_rank_leaves_out_what_only_shards() -> None:
    alone = verdicts.by_name("gpt, 1 rank")
    assert "zero1" not in verdicts.rungs_of(alone, nvme=False)
    assert "zero3-offload" in verdicts.rungs_of(alone, nvme=False)
    assert "zero3-nvme" in verdicts.rungs_of(alone, nvme=True)


def test_scores_are_of_absolute_errors_but_too_low_is_one_sided() -> None:
    score = accuracy.Score.of([0.5, -0.04, -0.06, 0.01])
    assert (score.cases, score.median, score.worst, score.too_low) == (4, 0.04, 0.5, 0.25)


@pytest.mark.parametrize(("share", "value"), [(0.5, 10), (0.95, 19), (1.0, 20), (0.0, 1)])
def test_a_quantile_is_one_of_the_values(share: float, value: int) -> None:
    assert accuracy.quantile(list(range(1, 21)), share) == value


def test_a_tool_that_has_nothing_for_a_rung_is_scored_on_the_others() -> None:
    case = accuracy.Case(
        truth="engine",
        model="gpt2",
        rung="ddp",
        world_size=8,
        micro_batch=1,
        checkpointing=False,
        true_bytes=100,
        said_bytes={"autods": 101},
    )
    other = replace(case, rung="zero2", said_bytes={"autods": 99, "estimator": 50})
    scores = accuracy.scored([case, other])
    assert scores["autods", "all"].cases == 2
    assert scores["estimator", "all"] == scores["estimator", "zero2"]
    assert ("estimator", "ddp") not in scores


@pytest.mark.parametrize(
    ("rung", "variant"),
    [
        ("ddp", None),
        ("zero1", None),
        ("zero3-nvme", None),
        ("zero2", {"cpu_offload": False}),
        ("zero2-offload", {"cpu_offload": True}),
        ("zero3", {"cpu_offload": False, "cpu_offload_params": False}),
        ("zero3-offload-param", {"cpu_offload": False, "cpu_offload_params": False}),
        ("zero3-offload", {"cpu_offload": True, "cpu_offload_params": True}),
    ],
)
def test_each_rung_gets_its_variant_of_deepspeeds_estimator(rung: str, variant: dict[str, bool] | None) -> None:
    assert accuracy.deepspeed_variant(rung) == variant
