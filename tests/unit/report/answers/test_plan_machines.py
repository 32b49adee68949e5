from __future__ import annotations

from dataclasses import replace

import pytest

from autods.planner.plan import list_assumptions
from autods.report.answers.plan import make_plan_document
from autods.report.answers.plan_machines import describe_machines_answer
from autods.report.results.plan import PlanReport
from tests.support import terminal
from tests.support.plans import FACTS, SOURCE, comparison, speed, with_rungs


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
