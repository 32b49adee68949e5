"""What a plan advises in sentences: the answer, other settings and rungs, a training's time, and machines compared."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from ...config.base_config import precision_name
from ...config.catalogue import HERE
from ...forecast.predict.step_time import Speed, StepTime
from ...forecast.values import RungForecast
from ...units import format_count
from ..results.plan import PlanReport, SiteForecast, Training
from ..text import format_rate, format_share
from .remedies import describe_need, find_fullest_tier, list_plan_remedies

_WORTH_NAMING = 0.1  # of a step
_WORTH_MENDING = 0.03
_CLEARLY_LEANER = 0.8  # of the best rung's device memory


def describe_site_answer(site: SiteForecast) -> str:
    """'zero2 is the fastest rung that fits, up to micro batch 6'."""
    best = site.best
    if best is None:
        return "nothing is forecast" if site.to_try else "nothing fits"
    size = f"at micro batch {best.micro_batch}"
    if best.largest_micro_batch is not None:
        size = f"up to micro batch {best.largest_micro_batch}"
    answer = f"{best.rung} is the fastest rung that {'fits' if best.verdict == 'fits' else 'may fit'}, {size}"
    if best.speed is None:
        return answer
    return f"{answer}: {format_speed(best.speed)}, bound by {best.speed.step.bound}"


def list_suggestions(plan: PlanReport, site: SiteForecast) -> Iterator[str]:
    """The needs of the neighbouring rungs and what to do next, the most useful first."""
    best, timeline = site.best, plan.timeline
    if timeline is not None:
        step = f"a step of {timeline.rung} at micro batch {timeline.micro_batch}"
        yield f"{step} is drawn in {timeline.path}: open it in https://ui.perfetto.dev"
    if best is None:
        if site.to_try:
            yield f"{' and '.join(site.to_try)} may fit: autods fit tries them"
        else:
            yield from list_plan_remedies(plan, site)
        return
    if best.verdict == "tight":
        yield f"only a real trial can tell: autods fit, with {best.rung} in the ladder"
    if (training := describe_training(plan, site)) is not None:
        yield training
    first = next(rung for rung in site.rungs if rung.verdict == best.verdict)
    if first is not best and first.speed is not None and best.speed is not None:
        times = best.speed.samples_per_second / first.speed.samples_per_second
        yield (
            f"{first.rung} comes first in the ladder, but {best.rung} is forecast {times:.2f} times as fast: a step of"
            f" {first.rung} is spent on {format_spent(first.speed.step)}"
        )
    yield from compare_speeds(site)
    faster = [rung for rung in site.rungs[: site.rungs.index(best)] if rung.memory and _may_be_faster(rung, best)]
    tight = [rung.rung for rung in faster if rung.verdict == "tight"]
    if tight and best.verdict == "fits":
        yield f"faster, but tight: {', '.join(tight)}; only a real trial can tell (autods fit)"
    if faster:
        yield f"the next faster one, {faster[-1].rung}, {describe_need(faster[-1])}"
    clearly_less = _CLEARLY_LEANER * best.memory["device"].peak_bytes
    fitting = [rung for rung in site.rungs if rung.verdict == "fits" and "device" in rung.memory]
    leaner = next((rung for rung in fitting if rung.memory["device"].peak_bytes < clearly_less), None)
    if leaner is not None:
        more = f", up to micro batch {leaner.largest_micro_batch}" if leaner.largest_micro_batch else ""
        yield f"{leaner.rung} leaves more memory free: {describe_need(leaner)}{more}"
    if best.verdict == "fits":
        yield "prove it on the machine itself: autods fit"


def _may_be_faster(rung: RungForecast, best: RungForecast) -> bool:
    """Whether a rung before the best in the ladder could beat it, if it fitted. Rates of other batches do not tell."""
    if rung.verdict == best.verdict:
        return False
    if rung.speed is None or best.speed is None or rung.speed.micro_batch != best.speed.micro_batch:
        return True
    return rung.speed.samples_per_second > best.speed.samples_per_second


def describe_training(plan: PlanReport, site: SiteForecast) -> str | None:
    """'300B tokens take 30.7 (23–39.9) days, 5,890 GPU-hours, and cost …'; None where no training was asked about."""
    if plan.tokens is None:
        return None
    tokens, best = f"{format_count(plan.tokens)} tokens", site.best
    if best is None:
        return f"{tokens}: no time, because no rung fits"
    training = plan.forecast_training(site, best)
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
    return "is tight" if find_fullest_tier(rung) is None else describe_need(rung)


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


def describe_machines_answer(plan: PlanReport) -> str:
    """'a100-80gb is the smallest that is enough: zero2 on 8 bf16; h100-80gb is the fastest: 70,100 tokens/s'."""
    enough = plan.smallest_enough
    if enough is None:
        return "no machine of the list is surely enough"
    rung = f"{enough.best_rung} on {format_ranks_of_site(enough)}"
    answer = f"{enough.site.machine.name} is the smallest that is enough: {rung}"
    fastest = next((site for site in plan.ranked_sites if site.rate), None)
    if fastest is None or fastest.best is None or fastest.best.speed is None:
        return answer
    rate = format_speed(fastest.best.speed)
    return f"{answer}; {fastest.site.machine.name} is the fastest: {rate} with {fastest.best_rung}"


def compare_machines(plan: PlanReport) -> Iterator[str]:
    """What follows: the duration and the cost of a training, machines without a time, the command for one of them."""
    ranked = [site for site in plan.ranked_sites if site.best is not None]
    known = ((site, plan.forecast_training(site, site.best)) for site in ranked)
    trainings = [(site, training) for site, training in known if training is not None]
    if plan.tokens is not None and trainings:
        (first, quickest), *_ = trainings
        tokens = f"{format_count(plan.tokens)} tokens"
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
    enough = plan.smallest_enough
    if enough is not None:
        machine = enough.site.machine.name
        command = f"autods plan {shlex.quote(plan.source.path)} --gpus {enough.site.world_size} --on {machine}"
        yield f"each machine has the first rung of the ladder that fits; all of its rungs: {command}"


def format_ranks_of_site(site_forecast: SiteForecast) -> str:
    """'2 × 8 bf16'."""
    site = site_forecast.site
    ranks = f"{site.nodes} × {site.ranks_per_node}" if site.nodes > 1 else str(site.world_size)
    return f"{ranks} {precision_name(site.base)}"


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
