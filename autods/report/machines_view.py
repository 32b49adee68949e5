"""The result of `autods plan` for several machines: ranked by time, with the smallest that is enough."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..config.base_config import precision_name
from ..units import format_bytes, format_count
from .plan_speed import explain_no_time, format_cost, format_days, format_money, format_speed
from .results.plan import PlanReport, SiteForecast, Training, forecast_training
from .text import (
    MARKS,
    PLAN_WITH_BARS,
    PLAN_WITH_REASONS,
    bullets,
    format_predicted,
    format_rate,
    format_seconds,
    plain_table,
)


def print_machines(forecast: PlanReport, console: Console) -> None:
    """Print the table, the answer and what follows from it."""
    console.print(machines_table(forecast, width=console.width))
    enough = forecast.smallest_enough
    spent = Text(f"({format_seconds(forecast.seconds)})", style="dim")
    style = "bold red" if enough is None else "bold green"
    console.print(Text(describe_machines_answer(forecast), style=style), spent)
    console.print(bullets(compare_machines(forecast)))


def machines_table(forecast: PlanReport, *, width: int) -> Table:
    """A row a machine, ranked. Wider terminals get what bounds the step, and then the memory with its reason.

    A cell has two lines, such as a rate and its interval, so that nothing is cut at 80 columns.
    """
    wide, with_reasons = width >= PLAN_WITH_BARS, width >= PLAN_WITH_REASONS
    sites = forecast.ranked_sites
    with_price = forecast.tokens is not None and any(site.site.price_per_gpu_hour for site in sites)
    has_tokens = any(site.best and site.best.speed and site.best.speed.tokens_per_second for site in sites)
    columns = [
        ("machine\nranks", True), ("rung\nlargest batch", True), (f"{'tokens' if has_tokens else 'samples'}/s", True),
        ("days", forecast.tokens is not None), ("cost", with_price), ("bound by", wide),
        ("device", with_reasons), ("why", with_reasons),
    ]  # fmt: skip
    table = plain_table(expand=with_reasons)
    for name, shown in columns:
        if shown:
            numbers = name.startswith(("tokens", "samples", "days", "cost"))
            table.add_column(
                name,
                justify="right" if numbers else "left",
                overflow="fold",
                ratio=1 if name == "why" else None,
            )
    for site in sites:
        table.add_row(*(cell for cell, (_, shown) in zip(_cells(forecast, site), columns, strict=True) if shown))
    return table


def _cells(forecast: PlanReport, site: SiteForecast) -> list[RenderableType]:
    name = Text(f"{site.site.machine.name}\n{format_ranks_of_site(site)}")
    rung = site.best or (site.rungs[-1] if site.rungs else None)
    if rung is None:
        return [name, *[""] * 7]
    verdict = rung.verdict if site.best is not None or rung.verdict == "not_applicable" else "cannot_fit"
    batch = f", batch {rung.largest_micro_batch}" if site.best is not None and rung.largest_micro_batch else ""
    device, speed, training = rung.memory.get("device"), rung.speed, _training(forecast, site)
    rate, days, cost, bound = "" if site.best is None else "–", "–", "–", ""
    if site.best is not None and speed is not None:
        share = speed.tokens_per_second or speed.samples_per_second
        bounds = (share * speed.step.seconds / seconds for seconds in (speed.step.high_seconds, speed.step.low_seconds))
        rate, bound = _with_bounds(format_rate(share), *bounds), speed.step.bound
    if training is not None:
        days = _with_bounds(format_rate(training.days), training.low_days, training.high_days)
        if training.cost is not None and training.low_cost is not None and training.high_cost is not None:
            cost = _with_bounds(format_money(training.cost), training.low_cost, training.high_cost)
    memory = format_predicted(device) if device is not None else format_bytes(site.site.machine.device_bytes)
    return [
        name,
        Text.assemble((f"{site.best_rung or 'none'}\n", "bold"), MARKS[verdict].text(), batch),
        rate,
        days,
        cost,
        bound,
        memory.replace(" (", "\n("),
        Text(rung.reason),
    ]


def _with_bounds(value: str, low: float, high: float) -> str:
    """'2,048,000', and below it '1.71M–2.56M'."""
    return f"{value}\n{'–'.join(format_count(bound) if bound >= 1000 else format_rate(bound) for bound in (low, high))}"


def _training(forecast: PlanReport, site: SiteForecast) -> Training | None:
    if forecast.tokens is None or site.best is None or site.best.speed is None:
        return None
    return forecast_training(site.site, site.best.speed, forecast.tokens)


def describe_machines_answer(forecast: PlanReport) -> str:
    """'a100-80gb is the smallest that is enough: zero2 on 8 bf16; h100-80gb is the fastest: 70,100 tokens/s'."""
    enough = forecast.smallest_enough
    if enough is None:
        return "no machine of the list is surely enough"
    rung = f"{enough.best_rung} on {format_ranks_of_site(enough)}"
    answer = f"{enough.site.machine.name} is the smallest that is enough: {rung}"
    fastest = next((site for site in forecast.ranked_sites if site.rate), None)
    if fastest is None or fastest.best is None or fastest.best.speed is None:
        return answer
    rate = format_speed(fastest.best.speed)
    return f"{answer}; {fastest.site.machine.name} is the fastest: {rate} with {fastest.best_rung}"


def compare_machines(forecast: PlanReport) -> Iterator[str]:
    """What follows: the duration and the cost of a training, machines without a time, the command for one of them."""
    ranked = [site for site in forecast.ranked_sites if site.best is not None]
    trainings = [(site, training) for site in ranked if (training := _training(forecast, site)) is not None]
    if forecast.tokens is not None and trainings:
        (first, quickest), *_ = trainings
        tokens = f"{format_count(forecast.tokens)} tokens"
        yield f"{tokens} take {format_days(quickest)} days on {first.site.machine.name}"
        priced = [(site, training) for site, training in trainings if training.cost is not None]
        if priced:
            cheap, least = min(priced, key=lambda pair: pair[1].cost or math.inf)
            name = cheap.site.machine.name
            yield f"{tokens} cost least on {name}: {format_cost(least)}, in {format_days(least)} days"
    reasons: dict[str, list[str]] = {}
    for site in ranked:
        if site.best is not None and site.best.speed is None:
            reasons.setdefault(explain_no_time(site), []).append(site.site.machine.name)
    for reason, names in reasons.items():
        yield f"no time of {', '.join(names)}, because {reason}"
    enough = forecast.smallest_enough
    if enough is not None:
        machine = enough.site.machine.name
        command = f"autods plan {shlex.quote(forecast.source.path)} --gpus {enough.site.world_size} --on {machine}"
        yield f"each machine has the first rung of the ladder that fits; all of its rungs: {command}"


def format_ranks_of_site(site_forecast: SiteForecast) -> str:
    """'2 × 8 bf16'."""
    site = site_forecast.site
    ranks = f"{site.nodes} × {site.ranks_per_node}" if site.nodes > 1 else str(site.world_size)
    return f"{ranks} {precision_name(site.base)}"
