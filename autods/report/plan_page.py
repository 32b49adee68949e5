"""The forecast of `autods plan` as one HTML file, which makes no request: the answer, and the memory of every rung."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config.catalogue import ASKED, HERE
from ..forecast.values import PHASES, RungForecast
from ..types import TIERS
from ..units import format_bytes, format_count
from .html_parts import render, stack_memory
from .machines_view import compare_machines, describe_machines_answer
from .plan_speed import format_cost, format_days, format_speed, format_spent, format_step
from .plan_view import (
    describe_site,
    describe_site_answer,
    describe_workload,
    suggestions,
)
from .results.plan import PlanReport, SiteForecast, forecast_training
from .serialize import write_whole
from .text import MARKS, TIER_NAMES, format_predicted, format_seconds

_CLASSES = {"fits": "good", "tight": "fair", "cannot_fit": "bad", "not_applicable": "dim"}


def render_plan_page(forecast: PlanReport) -> str:
    """The page of a plan, with a section for each machine."""
    several = len(forecast.sites) > 1
    answer = describe_machines_answer(forecast) if several else describe_site_answer(forecast.sites[0])
    return render(
        "plan_page.html",
        title=forecast.source.name,
        headline=answer,
        question=describe_workload(forecast),
        effort=format_seconds(forecast.seconds),
        several=several,
        compared=list(compare_machines(forecast)) if several else [],
        sites=[_site(forecast, site) for site in forecast.sites],
        assumed=list(forecast.assumed),
        facts=sorted(forecast.versions.items()),
    )


def write_plan_page(forecast: PlanReport, path: Path) -> None:
    """Write the page to a file. Raises the error of `errors.make_write_error`."""
    write_whole(path, render_plan_page(forecast))


def _site(forecast: PlanReport, site_forecast: SiteForecast) -> dict[str, Any]:
    site = site_forecast.site
    name = site.machine.name
    return {
        "name": "this machine" if name == HERE else "the machine" if name == ASKED else name,
        "question": describe_site(forecast, site),
        "answer": describe_site_answer(site_forecast),
        "rungs": [_rung(forecast, site_forecast, rung) for rung in site_forecast.rungs],
        "suggestions": list(suggestions(forecast, site_forecast)),
        "timed": any(rung.speed for rung in site_forecast.rungs),
    }


def _rung(forecast: PlanReport, site_forecast: SiteForecast, rung: RungForecast) -> dict[str, Any]:
    return {
        "rung": rung.rung,
        "verdict": MARKS[rung.verdict].word,
        "class": _CLASSES[rung.verdict],
        "stack": stack_memory(rung) if "device" in rung.memory else None,
        "tiers": list(_other_tiers(rung)),
        "phases": [(phase, format_bytes(rung.by_phase[phase])) for phase in PHASES if phase in rung.by_phase],
        "largest": "" if rung.largest_micro_batch is None else f"{rung.largest_micro_batch:,}",
        "reason": rung.reason,
        "speed": list(_speed(forecast, site_forecast, rung)),
    }


def _speed(forecast: PlanReport, site: SiteForecast, rung: RungForecast) -> Iterator[str]:
    """Step time, rate, what the step is spent on, and the duration and cost of a training; nothing without a time."""
    speed = rung.speed
    if speed is None:
        return
    yield f"step {format_step(speed.step)} at micro batch {speed.micro_batch}"
    yield format_speed(speed)
    yield format_spent(speed.step)
    training = None if forecast.tokens is None else forecast_training(site.site, speed, forecast.tokens)
    if training is not None:
        yield f"{format_count(training.tokens)} tokens: {format_days(training)} days"
        if training.cost is not None:
            yield f"cost {format_cost(training)}"


def _other_tiers(rung: RungForecast) -> Iterator[str]:
    for tier in TIERS:
        if tier != "device" and tier in rung.memory and rung.memory[tier].peak_bytes:
            yield f"{TIER_NAMES[tier]}: {format_predicted(rung.memory[tier])}"
