"""How the figures of a plan are written, and why one is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal

from ...config.catalogue import HERE, Site
from ...config.deepspeed import choose_accumulation, count_replicas
from ...forecast.predict.step_time import Speed, StepTime
from ...forecast.values import RungForecast
from ...types import Knobs
from ..results.plan import PlanReport, SiteForecast, Training
from ..text import TIME_UNITS, TimeUnit, choose_time_unit, format_batch, format_rate, format_share

MAY_FIT = ("fits", "tight")
_WORTH_NAMING = 0.1  # of a step


def describe_batch(plan: PlanReport, site: Site, micro_batch: int) -> str:
    """'micro batch 1 × accumulation 2 × 8 ranks = global batch 16'."""
    replicas = count_replicas(site.base, site.world_size)
    accumulation = choose_accumulation(site, micro_batch, plan.source.form)
    knobs = Knobs(micro_batch=micro_batch, accumulation=accumulation)
    return format_batch(knobs, replicas, "rank" if replicas == site.world_size else "replica")


def explain_no_time(site: SiteForecast, rung: RungForecast | None = None) -> str:
    """Why a rung, or the best one, has no time: 'the file of the machine lacks dram_gb_per_s'."""
    rung = rung or site.best
    machine, links = site.site.machine, site.site.machine.links
    if machine.rates is None and machine.file is None:
        card = machine.title if machine.name == HERE else "the card"
        return f"the rates of {card} are not known (--on NAME or FILE.toml has them)"
    figures: dict[str, object] = {
        "rates": machine.rates,
        "links": links,
        "dram_gb_per_s": machine.dram_gb_per_s,
    }
    if links is not None and site.site.nodes > 1:
        figures["network_gb_per_s"] = links.network_gb_per_s
    if rung is not None and "nvme" in rung.memory:
        figures["nvme_gb_per_s"] = machine.nvme_gb_per_s
    lacks = [name for name, figure in figures.items() if figure is None]
    return f"the file of the machine lacks {', '.join(lacks)}" if lacks else "no step was recorded"


def format_ranks_of_site(site_forecast: SiteForecast) -> str:
    """'2 × 8 bf16'."""
    return f"{format_ranks_by_node(site_forecast.site)} {site_forecast.site.precision}"


def format_ranks_by_node(site: Site) -> str:
    """'2 × 8'; '8' on one node."""
    return f"{site.nodes} × {site.ranks_per_node}" if site.nodes > 1 else str(site.world_size)


def _format_interval(write: Callable[[float], str], value: float, low: float, high: float) -> str:
    """'30.7 (23–39.9)'; '30.7 (up to 39.9)' without a low bound."""
    if not low:
        return f"{write(value)} (up to {write(high)})"
    return f"{write(value)} ({write(low)}–{write(high)})"


def format_step(step: StepTime) -> str:
    """'2.13 (1.6–2.77) s'."""
    return f"{_format_interval(format_rate, step.seconds, step.low_seconds, step.high_seconds)} s"


def format_speed(speed: Speed) -> str:
    """'15,403 tokens/s', or samples/s where a sample has no fixed number of tokens."""
    if speed.tokens_per_second is None:
        return f"{format_rate(speed.samples_per_second)} samples/s"
    return f"{format_rate(speed.tokens_per_second)} tokens/s"


def format_spent(step: StepTime) -> str:
    """'compute 62 %, memory 30 %'; parts below a tenth are left out."""
    parts = sorted(step.spent.items(), key=lambda part: -part[1])
    named = [(cause, seconds / step.seconds) for cause, seconds in parts if seconds >= _WORTH_NAMING * step.seconds]
    return ", ".join(f"{cause} {format_share(round(share, 2))}" for cause, share in named)


def choose_unit_of_training(trainings: Iterable[Training | None]) -> TimeUnit:
    """The unit of a column: that in which a sentence names the first training, and days where there is none.

    The first is the one that a reader takes, so the table and the sentence show the same figure.
    """
    first = next((training for training in trainings if training is not None), None)
    return TIME_UNITS[0] if first is None else choose_time_unit(first.days * TIME_UNITS[0].seconds)


def convert_days(days: float, unit: TimeUnit) -> float:
    """Days in another unit."""
    return days * TIME_UNITS[0].seconds / unit.seconds


def format_training_time(training: Training, unit: TimeUnit) -> str:
    """'30.7 (23–39.9)', in the unit."""
    days = (training.days, training.low_days, training.high_days)
    return _format_interval(format_rate, *(convert_days(bound, unit) for bound in days))


def format_duration(training: Training) -> str:
    """'30.7 (23–39.9) days', '28.7 (21.5–38.6) minutes'."""
    unit = choose_unit_of_training([training])
    return f"{format_training_time(training, unit)} {unit.name}"


def format_cost(training: Training) -> str:
    """'11,800 (8,830–15,300)'; '–' without a price."""
    if training.cost is None or training.low_cost is None or training.high_cost is None:
        return "–"
    return _format_interval(format_money, training.cost, training.low_cost, training.high_cost)


def format_money(amount: float) -> str:
    """'11,800', '0.00073': three significant digits, no exponent."""
    return f"{Decimal(f'{amount:.3g}'):,f}"
