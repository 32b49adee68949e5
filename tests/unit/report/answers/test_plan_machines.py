from __future__ import annotations

from dataclasses import replace

import pytest

from autods.forecast.values import RungForecast
from autods.planner.plan import list_assumptions
from autods.report.answers.plan import make_plan_document
from autods.report.answers.plan_machines import describe_machines_answer
from autods.report.results.plan import PlanReport
from tests.support import terminal
from tests.support.plans import FACTS, RUNGS, SOURCE, comparison, left_out, rung, speed, with_rungs


def broad() -> PlanReport:
    """Three machines with the longest name and rung, the largest rates, days and costs, and several nodes."""
    sites = []
    for each, name, rate in zip(
        comparison().sites, ("a100-pcie-80gb", "mi300x-192gb", "rtx4090-24gb"), (37.0, 0.31, 1000), strict=True
    ):
        rungs = tuple(
            replace(
                row,
                rung="zero3-offload-param" if row.rung == each.best_rung else row.rung,
                speed=speed(rate),
                largest_micro_batch=4096,
            )
            for row in each.rungs
        )
        machine = replace(each.site.machine, name=name)
        site = replace(each.site, machine=machine, world_size=128, ranks_per_node=8, price_per_gpu_hour=2.5)
        sites.append(with_rungs(replace(each, site=site), rungs))
    return replace(comparison(), sites=tuple(sites), tokens=3e12)


@pytest.mark.parametrize("width", [80, 100, 112, 150])
def test_nothing_of_the_machines_table_is_cut(width: int) -> None:
    text = terminal.printed(make_plan_document(broad()), width)
    assert "…" not in text
    for cell in ("a100-pcie-80gb", "zero3-offload-param", "✗ cannot fit", "✓ fits, batch 4096", "16 × 8 bf16"):
        assert cell in text, cell
    for cell in ("2,048,000", "1.71M–2.56M", "54,691", "43.8K–65.6K", "336M–504M"):
        assert cell in text, cell


def test_short_trainings_of_machines_share_a_unit_without_exponents() -> None:
    plan = broad()
    sites = tuple(replace(each, site=replace(each.site, price_per_gpu_hour=0.004)) for each in plan.sites)
    text = terminal.printed(make_plan_document(replace(plan, sites=sites, tokens=5e6)), 80)
    assert "2.44" in text
    assert "1.95–2.93" in text
    assert "5M tokens take 2.44 (1.95–2.93) seconds on rtx4090-24gb" in " ".join(text.split())
    assert "e-0" not in text
    assert "days" not in text


def test_an_upper_bound_of_time_has_one_bound_in_each_table() -> None:
    sites = []
    for site in comparison().sites:
        timed = speed(1000)
        timed = replace(timed, step=replace(timed.step, low_seconds=0.0))
        sites.append(with_rungs(site, tuple(replace(row, speed=timed) for row in site.rungs)))
    text = terminal.printed(make_plan_document(replace(comparison(), sites=tuple(sites), tokens=3e12)), 150)
    assert "from 1.71M" in text
    assert "up to" in text
    assert "inf" not in text


def test_what_shows_one_machine_of_a_file_names_the_file() -> None:
    plan = comparison()
    machines = [replace(each.site.machine, file=f"my {each.site.machine.name}.toml") for each in plan.sites]
    sites = [
        replace(each, site=replace(each.site, machine=machine))
        for each, machine in zip(plan.sites, machines, strict=True)
    ]
    text = terminal.printed(make_plan_document(replace(plan, sites=tuple(sites))), 300)
    assert plan.smallest_enough is not None
    assert f"the same, but --on 'my {plan.smallest_enough.site.machine.name}.toml'" in text


def test_what_a_rung_assumes_on_some_machines_names_them() -> None:
    sentences = (("zero2: 5 fits; 7 does not", "sequences of 8", "zero2: all"), ("sequences of 8", "zero2: all"))
    sites = tuple(
        with_rungs(each, [replace(each.rungs[0], rung="zero2", assumed=assumed)])
        for each, assumed in zip(comparison().sites[:2], sentences, strict=True)
    )
    name = sites[0].site.machine.name
    said = (f"{name}: zero2: 5 fits; 7 does not", "sequences of 8", "zero2: all")
    assert list_assumptions((), SOURCE, FACTS, sites)[-3:] == said
    alone = list_assumptions((), SOURCE, FACTS, sites[:1])
    assert "zero2: 5 fits; 7 does not" in alone


def test_the_least_cost_is_of_the_machines_with_a_price() -> None:
    plan = broad()
    assert "with a price" not in terminal.printed(make_plan_document(plan), 300)
    fitting = [each for each in plan.sites if each.best is not None]
    unpriced = replace(fitting[0], site=replace(fitting[0].site, price_per_gpu_hour=None))
    sites = tuple(unpriced if each is fitting[0] else each for each in plan.sites)
    text = terminal.printed(make_plan_document(replace(plan, sites=sites)), 300)
    assert len(fitting) == 2
    assert f"cost least on {fitting[1].site.machine.name}, of 1 machine with a price: " in text


def test_a_machine_with_a_single_card_has_one_card() -> None:
    plan = comparison()
    sites = tuple(replace(each, site=replace(each.site, world_size=1, ranks_per_node=1)) for each in plan.sites)
    assert " on 1 card in bf16" in describe_machines_answer(replace(plan, sites=sites))
    assert " on 8 cards in bf16" in describe_machines_answer(plan)


def short(*lasts: RungForecast) -> PlanReport:
    """Two machines on which ddp cannot fit; it is closer on the second. Rungs that do not apply come after it."""
    sites = (
        with_rungs(each, (rung("ddp", gib, verdict="cannot_fit"), *lasts))
        for each, gib in zip(comparison().sites[:2], (131, 96), strict=True)
    )
    return replace(comparison(), sites=tuple(sites))


def test_where_no_machine_is_enough_the_closest_rung_has_the_row() -> None:
    plan = short(RUNGS[4])
    for width in (80, 300):
        text = terminal.printed(make_plan_document(plan), width)
        assert "✗ cannot fit" in text
        assert "not applicable" not in text
        assert "no NVMe was named" not in text
    assert "needs 96 GiB of 80.0 GiB" in text


def test_where_no_machine_is_enough_the_shortage_is_named() -> None:
    text = " ".join(terminal.printed(make_plan_document(short(RUNGS[4])), 80).split())
    assert "no machine of the list is enough; a100-80gb comes closest" in text
    assert "ddp comes closest: it needs 96.0 GiB of device memory, 16.0 GiB more than there is" in text
    assert "a shorter sequence (--seq-len)" in text
    assert "all of its rungs: the same, but --on a100-80gb" in text
    assert "surely" not in text


def test_a_machine_that_may_be_enough_is_named() -> None:
    plan = short()
    sites = (plan.sites[0], with_rungs(plan.sites[1], (RUNGS[1],)))
    text = " ".join(terminal.printed(make_plan_document(replace(plan, sites=sites)), 80).split())
    assert "no machine of the list is surely enough; a100-80gb may be, with zero1" in text
    assert "zero1 is tight: needs 77 GiB of 80.0 GiB; the optimizer step decides" in text
    assert "autods fit, with zero1 in the ladder" in text


def test_machines_that_no_rung_applies_to_have_all_reasons() -> None:
    rungs = (left_out("zero1", "one rank"), left_out("zero2", "one rank"), RUNGS[4])
    sites = tuple(with_rungs(each, rungs) for each in comparison().sites)
    text = " ".join(terminal.printed(make_plan_document(replace(comparison(), sites=sites)), 300).split())
    assert "one rank; no NVMe was named" in text
    assert "no machine of the list is enough" in text
    assert "closest" not in text


def test_a_machine_whose_rungs_were_not_forecast_may_be_enough() -> None:
    plan = short(left_out("zero3", "pipelines are not forecast"))
    sites = (plan.sites[0], replace(plan.sites[1], to_try=("zero3",)))
    text = " ".join(terminal.printed(make_plan_document(replace(plan, sites=sites)), 300).split())
    assert "no machine of the list is surely enough; a100-80gb may be" in text
    assert "pipelines are not forecast" in text
    assert "zero3 may fit: autods fit tries them" in text
