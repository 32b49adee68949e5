from __future__ import annotations

import html
from dataclasses import replace

import pytest

from autods.report.answers.fit import make_fit_document
from autods.report.render_html import to_page
from autods.report.results.doctor import Check, Checkup
from autods.report.results.explain import Explanation
from tests.support import plans, reports

EMPTY = replace(plans.forecast(), sites=())


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (reports.fitting_report(), "<FitReport: Use zero3, micro batch 4"),
        (reports.hopeless_report(), "<FitReport: nothing fits"),
        (plans.forecast(), "<PlanReport: "),
        (Checkup(checks=(Check.ok("Packages", "ray", "2.50"),)), "<Checkup: ready for plan, CPU ranks, GPUs"),
        (
            Explanation(config="ds.json", deepspeed="0.19.8", keys=(), findings=()),
            "<Explanation: Nothing is wrong with it.>",
        ),
        (EMPTY, "<PlanReport>"),
        (plans.comparison().best, "<RungForecast: "),
    ],
)
def test_a_result_is_shown_by_its_headline(result: object, shown: str) -> None:
    assert repr(result).startswith(shown)
    assert len(repr(result)) < 200


def test_a_notebook_shows_the_page_of_a_result() -> None:
    report = reports.fitting_report()
    frame = report._repr_html_()
    assert frame.startswith("<iframe ")
    assert html.unescape(frame.split('"')[1]) == to_page(make_fit_document(report))


def test_the_best_of_a_plan_is_on_a_machine_where_it_fits() -> None:
    best = plans.comparison().best
    assert best is not None
    assert (best.rung, best.verdict) == ("zero2", "fits")
    assert plans.hopeless().best is None


def test_a_checkup_as_json_has_the_answer_too() -> None:
    broken = Check.broken("Software", "compiler", "g++ is not installed", "apt-get install g++")
    said = Checkup(checks=(broken,)).to_dict()
    assert said["ready_for"] == ["CPU ranks", "GPUs"]
    assert said["obstacles"] == {"plan": "compiler", "offload to the CPU": "compiler", "NVMe": "compiler"}
    assert said["checks"][0]["remedy"] == "apt-get install g++"
