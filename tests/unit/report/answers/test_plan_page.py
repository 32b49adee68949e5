"""The page of a plan has what its table has, and escapes what users wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autods.report.answers.plan import make_plan_document
from autods.report.render_html import to_page
from autods.report.results.plan import PlanReport
from tests.support.pages import HOSTILE, check_page
from tests.support.plans import RUNGS, comparison, forecast, hopeless, rung, speed


@pytest.mark.parametrize("plan", [forecast(), comparison(), hopeless()], ids=["one machine", "several", "nothing fits"])
def test_the_page_of_a_plan_is_whole_and_requests_nothing(plan: PlanReport) -> None:
    check_page(to_page(make_plan_document(plan)))


def test_the_page_of_a_plan_has_every_rung_with_its_memory() -> None:
    words = check_page(to_page(make_plan_document(forecast()))).words
    assert "Use zero2, micro batch 6" in words
    for row in RUNGS:
        assert row.rung in words
        assert (row.reason in words) is (row.verdict != "fits")  # the table says the same of one that fits
    assert "✓ zero2 fits 40.0 6" in words
    assert "40.0 GiB (36.0 to 44.0) of 80.0 GiB" in words
    assert "host 320.0 (288.0–352.0) GiB / 1.0 TiB" in words
    assert "the loss scale starts at 65536" in words


def test_the_page_of_a_plan_has_each_rungs_time() -> None:
    plan = replace(forecast((rung("zero2", 14, verdict="fits", speed=speed(8, bound="host")),)), tokens=1e9)
    words = check_page(to_page(make_plan_document(plan))).words
    assert "zero2 1 0.5 (0.4–0.6) s 8 16,384 17 (13.6–20.3) host 80 %, launch 20 %" in words
    assert "1B tokens take 17 (13.6–20.3) hours" in words


def test_several_machines_have_a_section_each() -> None:
    words = check_page(to_page(make_plan_document(comparison()))).words
    assert "a100-80gb is the smallest that is enough: zero2 on 8 cards in bf16" in words
    for machine in ("l4-24gb", "a100-80gb", "h200-141gb"):
        assert f"{machine}: " in words


def test_a_plan_page_escapes_names_and_reasons() -> None:
    plan = forecast((replace(RUNGS[2], reason=HOSTILE, rung=HOSTILE), *RUNGS[3:]))
    plan = replace(plan, source=replace(plan.source, name=HOSTILE), assumed=(HOSTILE,))
    assert "alert(1)" in check_page(to_page(make_plan_document(plan))).text
