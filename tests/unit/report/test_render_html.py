"""The page of a report is one file that makes no request, escapes what users wrote, and stays small."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autods.forecast.values import RungForecast, TierForecast
from autods.report import FitReport
from autods.report.answers.fit import make_fit_document
from autods.report.document import Chart, Column, Gauge, make_document, tabulate
from autods.report.render_html import PAGE, draw_chart, find_reach, place_on_bar, summarize_chart, to_page, write_page
from autods.report.results.fit import Certificate
from autods.types import Failed, Knobs, Tier
from autods.units import format_bytes
from tests.support.pages import HOSTILE, Parsed, check_page
from tests.support.reports import LIMIT, MIB, WINNING, failed, fit, fitting_report, hopeless_report, oom, record


def forecast(mib: int, breakdown: Mapping[str, int] | None = None) -> RungForecast:
    """zero3 at micro batch 1, within 10 %."""
    size = mib * MIB
    device = TierForecast(peak_bytes=size, low_bytes=size * 9 // 10, high_bytes=size * 11 // 10, limit_bytes=LIMIT)
    memory: dict[Tier, TierForecast] = {"device": device}
    return RungForecast(
        rung="zero3", verdict="fits", reason="", micro_batch=1, memory=memory, breakdown=breakdown or {}
    )


@pytest.mark.parametrize("report", [fitting_report(), hopeless_report()], ids=["fit", "nothing fits"])
def test_every_tag_is_closed_and_nothing_is_requested(report: FitReport) -> None:
    check_page(to_page(make_fit_document(report)))


def test_the_page_has_answer_ladder_and_every_trial() -> None:
    parsed = Parsed(to_page(make_fit_document(fitting_report())))
    text = " ".join(parsed.text.split())
    assert "Use zero3, micro batch 4, gradient checkpointing" in text
    assert "deepspeed --num_accelerators 2 YOUR_SCRIPT.py" in text
    for rung in ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-nvme"):
        assert rung in text
    folded = 4  # the config, and three other ways to launch
    assert sum(tag == "details" for tag, _ in parsed.tags) == len(fitting_report().trials) + folded


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    outcome = replace(failed(), evidence=HOSTILE, advice=HOSTILE)
    report = replace(fitting_report(), trials=(record(1, "ddp", outcome),), reasons={"ddp": HOSTILE, HOSTILE: "x"})
    log = tmp_path / "logs" / "001-ddp" / f"rank{max(0, outcome.rank)}.log"
    log.parent.mkdir(parents=True)
    log.write_text(HOSTILE * 100_000)
    page = to_page(make_fit_document(report, tmp_path))
    assert "alert(1)" in check_page(page).text
    assert len(page) < 200_000
    assert isinstance(outcome, Failed)


def test_each_button_is_named_by_what_it_copies() -> None:
    page = to_page(make_fit_document(fitting_report()))
    names = dict(re.findall(r'<(?:span|button)[^>]* id="([^"]+)"[^>]*>([^<]*)<', page))
    labels = [each.split() for each in re.findall(r'aria-labelledby="([^"]+)"', page)]
    assert [" ".join(names[each] for each in label).strip() for label in labels][:3] == [
        "copy model",
        "copy code",
        "copy launch",
    ]


def test_a_page_keeps_letters_of_names_and_shows_controls() -> None:
    persian, japanese = "می\N{ZERO WIDTH NON-JOINER}خواهم", "全角\N{IDEOGRAPHIC SPACE}空白"
    workload = f"{persian} {japanese} \x1b[31mred\x1b[0m\x00"
    report = fitting_report()
    page = to_page(make_fit_document(replace(report, question=replace(report.question, workload=workload))))
    assert f"{persian} {japanese} red\\x00" in page


def test_a_page_that_is_written_replaces_the_former(tmp_path: Path) -> None:
    (tmp_path / PAGE).write_text("old")
    assert write_page(make_fit_document(fitting_report()), tmp_path / PAGE) == tmp_path / PAGE
    assert (tmp_path / PAGE).read_text().startswith("<!doctype html>")


def test_a_failed_certificate_is_shown() -> None:
    certificate = Certificate(passed=False, failures=("another loss",))
    text = Parsed(to_page(make_fit_document(replace(fitting_report(), certificate=certificate)))).text
    assert "Certificate: not passed" in text
    assert "another loss" in text


def test_a_rungs_bar_is_its_forecast_by_kind_and_the_measured_mark() -> None:
    foreseen = forecast(300, {"parameters": 100 * MIB, "optimizer": 150 * MIB})
    parsed = check_page(to_page(make_fit_document(replace(fitting_report(), forecast=(foreseen,)))))
    (bar,) = (attributes for tag, attributes in parsed.tags if attributes.get("class") == "bar stack")
    assert bar["aria-label"] == "weights: 100.0 MiB, optimizer states: 150.0 MiB, outside of tensors: 50.0 MiB"
    assert (
        "forecast at micro batch 1: 300.0 MiB (270.0 to 330.0) of 416.0 MiB, measured 380.0 MiB, a difference of −21.1%"
        in parsed.words
    )
    assert f"left: {round(100 * 380 / 505.4, 1)}%" in [attributes.get("style") for _, attributes in parsed.tags]


def test_a_bar_of_another_trials_size_has_no_mark() -> None:
    foreseen = replace(forecast(300), micro_batch=2)
    words = check_page(to_page(make_fit_document(replace(fitting_report(), forecast=(foreseen,))))).words
    assert "forecast at micro batch 2: 300.0 MiB (270.0 to 330.0) of 416.0 MiB " in words


def test_tuning_is_drawn_by_trial_with_the_best_so_far() -> None:
    rates = ((8, 40.0), (9, 43.0), (10, 41.0))
    tuned = tuple(record(number, "zero3", fit(380, rate), purpose="tune") for number, rate in rates)
    parsed = check_page(
        to_page(make_fit_document(replace(fitting_report(), trials=(*fitting_report().trials, *tuned))))
    )
    assert "Tuning: samples/s by trial" in parsed.words
    assert "best so far, trial 10: 43" in parsed.words
    assert "trial, trial 10: 41" in parsed.words
    assert "Tuning:" not in check_page(to_page(make_fit_document(fitting_report()))).words


def test_the_winners_row_has_the_speed_of_the_answer() -> None:
    trials = (record(1, "zero2", oom()), record(2, "zero3", fit(393.4, 55.5), knobs=WINNING))
    words = check_page(to_page(make_fit_document(replace(fitting_report(), trials=trials, reasons={})))).words
    assert "device 393.4 / 416.0 MiB host 1.3 / 64.0 GiB 41.7 " in words
    assert "device ≥505.4 / 416.0 MiB" in words


def test_a_bar_far_beyond_the_limit_holds_all_kinds() -> None:
    device = TierForecast(peak_bytes=4 * LIMIT, low_bytes=3 * LIMIT, high_bytes=5 * LIMIT, limit_bytes=LIMIT)
    kinds = {"parameters": LIMIT, "gradients": LIMIT, "optimizer": 2 * LIMIT}
    foreseen = replace(forecast(300, kinds), memory={"device": device})
    parsed = check_page(to_page(make_fit_document(replace(fitting_report(), forecast=(foreseen,)))))
    styles = [attributes.get("style", "") for tag, attributes in parsed.tags if tag in ("span", "b", "u")]
    drawn = [style.partition("; background")[0] for style in styles if style.startswith("left")]
    kinds_drawn = ["left: 0.0%; width: 20.0%", "left: 20.0%; width: 20.0%", "left: 40.0%; width: 40.0%"]
    limits_of_other_rows = ["left: 20.0%"] * 5
    assert drawn == [*limits_of_other_rows, *kinds_drawn, "left: 60.0%; width: 40.0%", "left: 20.0%"]


def test_all_bars_of_a_table_have_one_scale_and_limit() -> None:
    device = TierForecast(peak_bytes=2 * LIMIT, low_bytes=2 * LIMIT, high_bytes=2 * LIMIT, limit_bytes=LIMIT)
    foreseen = replace(forecast(300, {"parameters": LIMIT}), memory={"device": device})
    parsed = check_page(to_page(make_fit_document(replace(fitting_report(), forecast=(foreseen,)))))
    limits = {attributes["style"] for tag, attributes in parsed.tags if tag == "b"}
    assert limits == {"left: 50.0%"}
    lines = {
        attributes["style"] for tag, attributes in parsed.tags if (tag, attributes.get("class")) == ("span", "limit")
    }
    assert lines == {"--at: 0.5"}
    styles = [attributes.get("style") for tag, attributes in parsed.tags if tag == "span"]
    assert f"width: {round(100 * 393.4 / 416 / 2, 1)}%" in styles


def test_the_scale_of_bars_has_an_end() -> None:
    gauges = [Gauge(words="", share=share) for share in (0.5, 40.0)]
    table = tabulate([Column(name="memory", read=lambda gauge: (gauge,))], gauges)
    assert find_reach(table) == 6.0
    assert [place_on_bar(gauge.share, 6.0) for gauge in gauges] == [8.3, 100.0]


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (2.47, ["0", "0.5", "1", "1.5", "2", "2.5"]),
        (7.51, ["0", "2", "4", "6", "8"]),
        (0.0123, ["0", "0.005", "0.01", "0.015"]),
        (5.0, ["0", "1", "2", "3", "4", "5"]),
    ],
)
def test_ticks_are_round(highest: float, ticks: list[str]) -> None:
    chart = Chart(title="", lines={"a": {1: highest, 4: 0.0}}, format_value=lambda value: f"{value:g}")
    assert [words for _, words in draw_chart(chart).y_ticks] == ticks


def test_values_below_0_have_ticks_and_places() -> None:
    chart = Chart(title="", lines={"loss": {1: -0.9, 2: 0.3}}, format_value=lambda value: f"{value:g}")
    drawing = draw_chart(chart)
    assert [words for _, words in drawing.y_ticks] == ["-1", "-0.5", "0", "0.5"]
    (_, lower, _), (_, upper, _) = drawing.points["loss"]
    assert drawing.y_ticks[0][0] > lower > drawing.y_ticks[2][0] > upper > drawing.y_ticks[3][0]


def test_a_charts_name_tells_the_range_of_its_values() -> None:
    loss = Chart(title="loss", lines={"loss": {1: 2.5, 1200: 0.3}}, format_value=str, x_name="optimizer step")
    assert summarize_chart(loss) == "loss: 0.3 to 2.5, optimizer step 1 to 1,200"
    sizes = Chart(title="memory", lines={"a": {1: 1.0, 2: 2.0}, "b": {1: 3.0, 4: 4.0}}, format_value=str, limit=5.0)
    both = "memory: a 1.0 to 2.0, micro batch 1 to 2; b 3.0 to 4.0, micro batch 1 to 4; limit 5.0"
    assert summarize_chart(sizes) == both
    parsed = check_page(to_page(make_document(title="", question="", parts=(sizes,))))
    assert [dict(attributes)["aria-label"] for tag, attributes in parsed.tags if tag == "svg"] == [both]


def test_ticks_of_memory_are_round_in_its_unit_and_hold_the_limit() -> None:
    chart = Chart(title="", lines={"a": {1: 200.0 * MIB, 2: 354.0 * MIB}}, format_value=format_bytes, limit=416.0 * MIB)
    drawing = draw_chart(chart)
    sizes = ("100", "200", "300", "400", "500")
    assert [words for _, words in drawing.y_ticks] == ["0", *(f"{size} MiB" for size in sizes)]
    assert drawing.limit is not None
    assert drawing.limit[1] == "limit 416.0 MiB"
    highest_point = min(y for _, y, _ in drawing.points["a"])
    assert drawing.y_ticks[-1][0] < drawing.limit[0] < highest_point


def test_ticks_below_the_unit_of_the_limit_are_round_too() -> None:
    chart = Chart(title="", lines={"a": {1: 9.0 * MIB, 2: 60.0 * MIB}}, format_value=format_bytes, limit=1024.0 * MIB)
    names = [words for _, words in draw_chart(chart).y_ticks]
    assert names == ["0", "0.2 GiB", "0.4 GiB", "0.6 GiB", "0.8 GiB", "1 GiB"]


def test_steps_have_round_ticks_and_sizes_do_not_overlap() -> None:
    steps = Chart(title="", lines={"loss": dict.fromkeys(range(1, 240), 1.0)}, format_value=str, logarithmic=False)
    assert [words for _, words in draw_chart(steps).x_ticks] == [str(20 * number) for number in range(1, 12)]
    sizes = Chart(title="", lines={"a": dict.fromkeys((1, 2, 4, 8, 60, 62, 64), 1.0)}, format_value=str)
    assert [words for _, words in draw_chart(sizes).x_ticks] == ["1", "2", "4", "8", "60"]


@pytest.mark.parametrize("last", [999, 100_000, 1_000_000, 123_456_789])
def test_ticks_of_a_long_run_do_not_overlap(last: int) -> None:
    steps = Chart(title="", lines={"loss": {1: 1.0, last: 2.0}}, format_value=str, logarithmic=False)
    ticks = draw_chart(steps).x_ticks
    assert len(ticks) > 1
    assert ticks[1][0] - ticks[0][0] > 10.6 * len(ticks[-1][1])  # a digit at 19 pixels


def test_lines_of_one_colour_differ_by_their_dashes() -> None:
    lines = {f"config {number}": {1: 1.0, 2: float(number)} for number in range(10)}
    document = make_document(title="", question="", parts=(Chart(title="speed", lines=lines, format_value=str),))
    drawn = re.findall(r'<polyline [^>]*stroke="([^"]+)"[^>]*?( stroke-dasharray="[^"]+")?/>', to_page(document))
    assert len(set(drawn)) == len(drawn) == 10
    keys = re.findall(r'class="key" style="([^"]+)"', to_page(document))
    assert len(set(keys)) == 10


def test_the_memory_chart_of_a_fit_has_the_limit() -> None:
    trials = [record(number, "zero3", fit(300 + number), knobs=Knobs(micro_batch=number)) for number in (1, 2)]
    words = check_page(to_page(make_fit_document(replace(fitting_report(), trials=tuple(trials))))).words
    assert "limit 416.0 MiB" in words
