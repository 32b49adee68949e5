"""The machines of a plan side by side: which is enough, how fast it is, and what a training costs on it.

A row is a `MachineRow`. A column is one entry of `list_columns`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from ...forecast.predict.step_time import Speed
from ...forecast.values import RungForecast
from ...units import format_bytes, format_count
from .. import document as doc
from ..document import Cell, Column, line, tabulate
from ..results.plan import PlanReport, SiteForecast, Training, find_closest
from ..text import MARKS, TimeUnit, format_number_of, format_predicted, format_rate
from .plan_advice import explain_tight, list_suggestions
from .plan_figures import (
    choose_unit_of_training,
    convert_days,
    explain_no_time,
    format_cost,
    format_duration,
    format_money,
    format_ranks_by_node,
    format_ranks_of_site,
    format_speed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """A machine with its best rung, or with the one that comes closest where none fits; then it has no speed."""

    site: SiteForecast
    rung: RungForecast
    training: Training | None

    @property
    def speed(self) -> Speed | None:
        return None if self.site.best is None else self.site.best.speed


def _describe_rung(row: MachineRow) -> Cell:
    best, rung = row.site.best, row.rung
    batch = f", batch {best.largest_micro_batch}" if best is not None and best.largest_micro_batch else ""
    return line((rung.rung, "" if best is None else "bold")), line(MARKS[rung.verdict].words, batch)


def _describe_rate(row: MachineRow, *, tokens: bool) -> Cell:
    speed = row.speed
    if speed is None or (speed.tokens_per_second is not None) is not tokens:
        return "" if row.site.best is None else "–"
    rate = speed.tokens_per_second or speed.samples_per_second
    bounds_s = (speed.step.high_seconds, speed.step.low_seconds)
    low, high = (rate * speed.step.seconds / bound_s if bound_s else math.inf for bound_s in bounds_s)
    return _with_bounds(format_rate(rate), low, high)


def _describe_cost(row: MachineRow) -> Cell:
    training = row.training
    if training is None or training.cost is None or training.low_cost is None or training.high_cost is None:
        return "–"
    return _with_bounds(format_money(training.cost), training.low_cost, training.high_cost)


def _describe_time(row: MachineRow, unit: TimeUnit) -> Cell:
    training = row.training
    if training is None:
        return "–"
    low, high = (convert_days(days, unit) for days in (training.low_days, training.high_days))
    return _with_bounds(format_rate(convert_days(training.days, unit)), low, high)


def _with_bounds(value: str, low: float, high: float) -> Cell:
    """'2,048,000', and below it '1.71M–2.56M', or the one bound that is known."""
    texts = [format_count(bound) if 1000 <= bound < math.inf else format_rate(bound) for bound in (low, high)]
    return value, f"from {texts[0]}" if high == math.inf else f"up to {texts[1]}" if not low else "–".join(texts)


def _describe_device(row: MachineRow) -> Cell:
    device = row.rung.memory.get("device")
    return format_bytes(row.site.site.machine.device_bytes) if device is None else format_predicted(device)


def list_columns(unit: TimeUnit) -> tuple[Column[MachineRow], ...]:
    """The columns of the machines' table, the time of a training in one unit."""
    return (
        Column(name="machine\nranks", read=lambda row: (row.site.site.machine.name, format_ranks_of_site(row.site))),
        Column(name="rung\nlargest batch", read=_describe_rung),
        Column(name="tokens/s", read=lambda row: _describe_rate(row, tokens=True), right=True),
        Column(name="samples/s", read=lambda row: _describe_rate(row, tokens=False), right=True),
        Column(name=unit.name, read=lambda row: _describe_time(row, unit), right=True),
        Column(name="cost", read=_describe_cost, right=True),
        Column(name="bound by", read=lambda row: "" if row.speed is None else row.speed.step.bound, spare=1),
        Column(name="device", read=_describe_device, spare=2),
        Column(name="why", read=lambda row: row.rung.reason, wraps=True, least_width=24, spare=3),
    )


def tabulate_machines(plan: PlanReport) -> doc.Table:
    """A row a machine, the fastest that is enough first."""
    rows = [
        MachineRow(site=site, rung=_choose_rung(site), training=plan.forecast_training(site, site.best))
        for site in plan.ranked_sites
    ]
    return tabulate(list_columns(choose_unit_of_training(row.training for row in rows)), rows)


def _choose_rung(site: SiteForecast) -> RungForecast:
    """The best rung or the closest; 'none', with the reasons of all of them, where no rung was forecast."""
    rung = site.best or (None if site.to_try else find_closest(site.rungs))
    if rung is not None:
        return rung
    reasons = (each.reason for each in site.rungs if not site.to_try or each.rung in site.to_try)
    return RungForecast(rung="none", verdict="not_applicable", reason="; ".join(dict.fromkeys(reasons)), micro_batch=1)


def _find_nearest_site(plan: PlanReport) -> SiteForecast | None:
    """Where no machine is surely enough, the one to go on with: it may be enough, or it lacks the least.

    None where no rung applies on any of them.
    """
    first = plan.ranked_sites[0]
    if first.status != "nothing_fits":
        return first
    closest = find_closest(rung for site in plan.sites for rung in site.rungs)
    return next((site for site in plan.sites if any(rung is closest for rung in site.rungs)), None)


def describe_machines_answer(plan: PlanReport) -> str:
    """'a100-80gb is the smallest that is enough: zero2 on 8 cards in bf16; h100-80gb is the fastest: 70,100 …'."""
    enough = plan.smallest_enough
    if enough is None:
        return _describe_nearest(plan)
    noun = "card" if enough.site.world_size == 1 else "cards"
    rung = f"{enough.best_rung} on {format_ranks_by_node(enough.site)} {noun} in {enough.site.precision}"
    answer = f"{enough.site.machine.name} is the smallest that is enough: {rung}"
    fastest = next((site for site in plan.ranked_sites if site.rate), None)
    if fastest is None or fastest.best is None or fastest.best.speed is None:
        return answer
    rate = format_speed(fastest.best.speed)
    return f"{answer}; {fastest.site.machine.name} is the fastest: {rate} with {fastest.best_rung}"


def _describe_nearest(plan: PlanReport) -> str:
    """'no machine of the list is enough; l4-24gb comes closest', or 'is surely enough' and which may be."""
    nearest = _find_nearest_site(plan)
    if plan.status == "nothing_fits":
        closest = "" if nearest is None else f"; {nearest.site.machine.name} comes closest"
        return f"no machine of the list is enough{closest}"
    rung = "" if nearest is None or nearest.best is None else f", with {nearest.best.rung}"
    may_be = "" if nearest is None else f"; {nearest.site.machine.name} may be{rung}"
    return f"no machine of the list is surely enough{may_be}"


def compare_machines(plan: PlanReport) -> Iterator[str]:
    """What follows: what the nearest machine lacks where none is enough; the duration and the cost of a training.

    Then machines without a time, and how to see one of them.
    """
    nearest = _find_nearest_site(plan) if plan.smallest_enough is None else None
    if nearest is not None:
        yield from list_suggestions(plan, nearest) if nearest.best is None else explain_tight(nearest.best)
    ranked = [site for site in plan.ranked_sites if site.best is not None]
    known = ((site, plan.forecast_training(site, site.best)) for site in ranked)
    trainings = [(site, training) for site, training in known if training is not None]
    if plan.tokens is not None and trainings:
        (first, quickest), *_ = trainings
        tokens = f"{format_count(plan.tokens)} tokens"
        yield f"{tokens} take {format_duration(quickest)} on {first.site.machine.name}"
        priced = [(site, training) for site, training in trainings if training.cost is not None]
        if priced:
            cheap, least = min(priced, key=lambda pair: pair[1].cost or math.inf)
            name = cheap.site.machine.name
            unpriced = len(trainings) - len(priced)  # one of them may cost less
            among = f", of {format_number_of(len(priced), 'machine')} with a price" if unpriced else ""
            yield f"{tokens} cost least on {name}{among}: {format_cost(least)}, in {format_duration(least)}"
    reasons: dict[str, list[str]] = {}
    for site in ranked:
        if site.best is not None and site.best.speed is None:
            reasons.setdefault(explain_no_time(site), []).append(site.site.machine.name)
    for reason, names in reasons.items():
        yield f"no time of {', '.join(names)}, because {reason}"
    shown = plan.smallest_enough or nearest
    if shown is not None:
        rows = "first rung of the ladder that fits" if nearest is None else "first rung that may fit, or the closest"
        on = shlex.quote(shown.site.machine.on)
        yield f"each machine has the {rows}; all of its rungs: the same, but --on {on}"
