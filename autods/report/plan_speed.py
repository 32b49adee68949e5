"""How fast the rungs of a plan are: their table, what other settings would give, and how long a training takes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from ..config.catalogue import HERE
from ..forecast.predict.step_time import Speed, StepTime
from ..forecast.values import RungForecast
from ..units import format_bytes, format_count
from .results.plan import PlanReport, SiteForecast, Training, forecast_training
from .text import PLAN_WITH_BARS, TIER_NAMES, format_rate, format_share, plain_table

_WORTH_NAMING = 0.1  # of a step
_WORTH_MENDING = 0.03
_WITH_DAYS = 150  # columns of a terminal in which both rates, days and cost stand in one line


def speed_table(forecast: PlanReport, site: SiteForecast, *, width: int) -> RenderableType:
    """A row a rung: seconds of an optimizer step, rates of all ranks, what the step is spent on; a line without any.

    A narrow terminal gets one rate. With the tokens of a training there are its days, and its cost with a price.
    """
    known = [rung for rung in site.rungs if rung.memory]
    if not any(rung.speed for rung in known):
        return Text(f"step time: –, because {explain_no_time(site)}", style="dim")
    counts_tokens = any(rung.speed and rung.speed.tokens_per_second for rung in known)
    has_days = forecast.tokens is not None
    has_price = has_days and site.site.price_per_gpu_hour is not None
    wide, with_bounds = width >= (_WITH_DAYS if has_days else PLAN_WITH_BARS), width >= PLAN_WITH_BARS or not has_days
    columns = [
        ("rung", True), ("micro\nbatch", True), ("step (low to high)" if with_bounds else "step, s", True),
        ("samples/s", wide or not counts_tokens), ("tokens/s", wide or counts_tokens), ("days", has_days),
        ("cost", has_price), ("spent on", True),
    ]  # fmt: skip
    table = plain_table()
    for name, shown in columns:
        numbers = name not in ("rung", "spent on")
        if shown:
            no_wrap = name not in ("step (low to high)", "spent on")
            table.add_column(name, no_wrap=no_wrap, justify="right" if numbers else "left")
    for rung in known:
        cells = _speed_cells(forecast, site, rung)
        if has_days and not wide:
            cells = [_narrow(cell, with_bounds=with_bounds) for cell in cells]
        table.add_row(*(cell for cell, (_, shown) in zip(cells, columns, strict=True) if shown))
    return table


def _narrow(cell: str | Text, *, with_bounds: bool) -> str | Text:
    """The cell with its interval in a line of its own, or without it. Days and cost have that of the step."""
    if isinstance(cell, Text):
        return cell
    figure, bracket, interval = cell.partition(" (")
    return f"{figure}\n({interval}" if with_bounds and bracket else figure


def _speed_cells(forecast: PlanReport, site: SiteForecast, rung: RungForecast) -> list[str | Text]:
    name, speed = Text(rung.rung, style="bold" if rung.rung == site.best_rung else ""), rung.speed
    if speed is None:
        return [name, *["–"] * 7]
    step, tokens = speed.step, speed.tokens_per_second
    training = None if forecast.tokens is None else forecast_training(site.site, speed, forecast.tokens)
    return [
        name,
        str(speed.micro_batch),
        format_step(step),
        format_rate(speed.samples_per_second),
        "–" if tokens is None else format_rate(tokens),
        "–" if training is None else format_days(training),
        "–" if training is None else format_cost(training),
        format_spent(step),
    ]


def explain_no_time(site: SiteForecast) -> str:
    """'the file of the machine lacks dram_gb_per_s'."""
    machine, lacks = site.site.machine, []
    if machine.rates is None:
        card = machine.title if machine.name == HERE else "the card"
        return f"the rates of {card} are not known (--on NAME or FILE.toml has them)"
    if machine.links is None:
        lacks.append("links")
    elif site.site.nodes > 1 and machine.links.network_gb_per_s is None:
        lacks.append("network_gb_per_s")
    if machine.dram_gb_per_s is None:
        lacks.append("dram_gb_per_s")
    if machine.nvme_gb_per_s is None and site.best is not None and "nvme" in site.best.memory:
        lacks.append("nvme_gb_per_s")
    return f"the file of the machine lacks {' or '.join(lacks)}" if lacks else "no step was recorded"


def format_step(step: StepTime) -> str:
    """'2.13 (1.6–2.77) s'."""
    return f"{step.seconds:.3g} ({step.low_seconds:.3g}–{step.high_seconds:.3g}) s"


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


def format_days(training: Training) -> str:
    """'30.7 (23–39.9)'."""
    return f"{format_rate(training.days)} ({format_rate(training.low_days)}–{format_rate(training.high_days)})"


def format_cost(training: Training) -> str:
    """'11,800 (8,830–15,300)'; '–' without a price."""
    if training.cost is None or training.low_cost is None or training.high_cost is None:
        return "–"
    low, cost, high = map(format_money, (training.low_cost, training.cost, training.high_cost))
    return f"{cost} ({low}–{high})"


def format_money(amount: float) -> str:
    """'11,800': three significant digits."""
    return f"{float(f'{amount:.3g}'):,.10g}"


# In sentences.


def describe_training(forecast: PlanReport, site: SiteForecast) -> str | None:
    """'300B tokens take 30.7 (23–39.9) days, 5,890 GPU-hours, and cost …'; None where no training was asked about."""
    if forecast.tokens is None:
        return None
    tokens, best = f"{format_count(forecast.tokens)} tokens", site.best
    if best is None:
        return f"{tokens}: no time, because no rung fits"
    training = None if best.speed is None else forecast_training(site.site, best.speed, forecast.tokens)
    if training is None:
        return f"{tokens}: no time, because {explain_no_time(site)}"
    hours = f"{format_rate(training.gpu_hours)} GPU-hours"
    cost = "" if training.cost is None else f", and cost {format_cost(training)}"
    return f"{tokens} take {format_days(training)} days with {best.rung}: {hours}{cost}"


def compare_speeds(site: SiteForecast) -> Iterator[str]:
    """What other settings of the best rung, and other rungs, would give; nothing where the time is not known."""
    best = site.best
    if best is None or best.speed is None:
        return
    checkpointing = "without" if any(not other.checkpointing for other in site.alternatives) else "with"
    for alternative in site.alternatives:
        forecast, switched = alternative.forecast, alternative.switched
        size = f"micro batch {forecast.micro_batch}"
        if switched:
            state = "on" if alternative.checkpointing else "off"
            change = f"{checkpointing} activation checkpointing"
            option = f" (--checkpointing {state})"
            if forecast.verdict == "cannot_fit":
                yield f"{change} even {size} {_describe_lack(forecast)}"
                continue
            size = f"{change}, {size}"
        else:
            size, option = f"{size} instead of {best.speed.micro_batch}", ""
        if forecast.speed is None:
            continue
        times = _format_times(forecast.speed.samples_per_second / best.speed.samples_per_second)
        lack = "" if forecast.verdict == "fits" else f", but {_describe_lack(forecast)}"
        yield f"{size}: {times} {_name_rate(best)}{lack}{option}"
    lost = best.speed.step.unaligned_seconds / best.speed.step.seconds
    if lost >= _WORTH_MENDING:
        yield (
            f"{lost:.0%} of the step goes to matmuls whose rows do not begin at multiples of 16 bytes:"
            " make sizes such as the vocabulary's multiples of 64"
        )
    others = [
        f"{rung.rung} {_format_times(rung.speed.samples_per_second / best.speed.samples_per_second)}"
        for rung in site.rungs
        if rung is not best and rung.verdict in ("fits", "tight") and rung.speed is not None
    ]
    if others:
        yield f"the other rungs beside {best.rung}, each at its micro batch: {', '.join(others)}"


def _name_rate(rung: RungForecast) -> str:
    known = rung.speed is not None and rung.speed.tokens_per_second is not None
    return "the tokens/s" if known else "the samples/s"


def _format_times(times: float) -> str:
    """'1.30 ×'."""
    return f"{times:.2f} ×"


def _describe_lack(rung: RungForecast) -> str:
    """'needs 36.1 GiB of device memory, of which there are 32.0 GiB'; 'is tight'."""
    over = [tier for tier, predicted in rung.memory.items() if predicted.fill > 1]
    tier = max(over, key=lambda tier: rung.memory[tier].fill, default=None)
    if tier is None:
        return "is tight"
    predicted = rung.memory[tier]
    return (
        f"needs {format_bytes(predicted.peak_bytes)} of {TIER_NAMES[tier]},"
        f" of which there are {format_bytes(predicted.limit_bytes or 0)}"
    )
