"""What a plan answers and advises for a machine, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...config.checkpointing import State, name_state
from ...config.deepspeed import count_replicas, count_sequence_sharers
from ...forecast.predict.step_time import Speed
from ...forecast.values import RungForecast
from ...units import format_bytes, format_count, format_factor
from ..results.plan import PlanReport, SiteForecast
from ..text import format_rate
from .plan_figures import (
    MAY_FIT,
    describe_batch,
    explain_no_time,
    format_cost,
    format_duration,
    format_speed,
    format_spent,
)
from .remedies import (
    describe_loading,
    describe_need,
    describe_partitioned_build,
    describe_way_out,
    find_fullest_tier,
    list_plan_remedies,
)

_WORTH_MENDING = 0.03
_CLEARLY_LEANER = 0.8  # of the best rung's device memory


def describe_site_answer(plan: PlanReport, site: SiteForecast) -> str:
    """'use zero2, micro batch 6 × accumulation 2 × 8 ranks = global batch 96: 15,403 tokens/s, bound by compute'."""
    best = site.best
    if best is None:
        return "nothing is forecast" if site.to_try else describe_way_out(site.partitioned) or "nothing fits"
    verb = "use" if best.verdict == "fits" else "try"
    answer = f"{verb} {best.rung}, {describe_batch(plan, site.site, best.largest_micro_batch or best.micro_batch)}"
    why = "the first that fits" if best.verdict == "fits" else "the first that may fit"
    if best.speed is not None:
        why = f"{format_speed(best.speed)}, bound by {best.speed.step.bound}"
    doubt = ", though its forecast exceeds the memory" if find_fullest_tier(best) else ""
    return f"{answer}: {why}{doubt}"


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
        yield from explain_tight(best)
        if site.partitioned is not None:
            yield describe_partitioned_build(site.partitioned)
    if (training := describe_training(plan, site)) is not None:
        yield training
    first = next(rung for rung in site.rungs if rung.verdict == best.verdict)
    if first is not best and first.speed is not None and best.speed is not None:
        times = format_factor(best.speed.samples_per_second / first.speed.samples_per_second)
        yield (
            f"{first.rung} comes first in the ladder, but {best.rung} is forecast {times} times as fast: a step of"
            f" {first.rung} is spent on {format_spent(first.speed.step)}"
        )
    yield from compare_speeds(site, faster=True)
    if site.runs_full:
        yield (
            f"{best.rung}'s allocator should run full in each step, as gathered weights come back late. It then waits"
            " for the card and gives its cache back: autods fit measures what that costs"
        )
    if (cost := describe_accumulation(site)) is not None:
        yield cost
    if (building := describe_loading(plan, site) or describe_building(site)) is not None:
        yield building
    if best.speed is not None and (unaligned := describe_unaligned(best.speed)) is not None:
        yield unaligned
    before = [rung for rung in site.rungs[: site.rungs.index(best)] if rung.memory and _may_be_faster(rung, best)]
    faster = [rung for rung in before if _has_comparable_speed(rung, best)]
    for rungs, word in ((faster, "faster"), ([each for each in before if each not in faster], "first in the ladder")):
        if (tight := [rung.rung for rung in rungs if rung.verdict == "tight"]) and best.verdict == "fits":
            yield f"{word}, but tight: {', '.join(tight)}; only a real trial can tell (autods fit)"
    if before:
        place = "next faster one" if before[-1] in faster else "one before it in the ladder"
        yield f"the {place}, {before[-1].rung}, {describe_need(before[-1])}"
    clearly_less = _CLEARLY_LEANER * best.memory["device"].peak_bytes
    fitting = [rung for rung in site.rungs if rung.verdict == "fits" and "device" in rung.memory]
    leaner = next((rung for rung in fitting if rung.memory["device"].peak_bytes < clearly_less), None)
    if leaner is not None:
        more = f", up to micro batch {leaner.largest_micro_batch}" if leaner.largest_micro_batch else ""
        yield f"{leaner.rung} leaves more memory free: {describe_need(leaner)}{more}"
    yield from (f"{rung.rung}: {rung.reason}" for rung in site.rungs if rung.verdict == "not_applicable")
    if best.verdict == "fits":
        yield f"prove it on the machine itself: autods {'probe' if _has_long_sequences(plan, site) else 'fit'}"


def explain_tight(rung: RungForecast) -> Iterator[str]:
    """What a rung that may fit needs of what there is, and what to do about it."""
    yield f"{rung.rung} is tight: {rung.reason}"
    yield f"only a real trial can tell: autods fit, with {rung.rung} in the ladder"


def _has_long_sequences(plan: PlanReport, site: SiteForecast) -> bool:
    """Whether the plan is of a model config's long sequences, which a fit does not train."""
    return plan.source.tiled_loss or count_sequence_sharers(plan.source, site.site.base) > 1


def describe_accumulation(site: SiteForecast) -> str | None:
    """What accumulation costs the best rung; None where the user said how many micro batches a step has."""
    best, alone = site.best, site.unaccumulated
    if best is None or alone is None or "device" not in best.memory or "device" not in alone.memory:
        return None
    need_bytes, batch = (
        alone.memory["device"].peak_bytes,
        best.micro_batch * count_replicas(site.site.base, site.site.world_size),
    )
    cost_bytes = best.memory["device"].peak_bytes - need_bytes
    if cost_bytes < _WORTH_MENDING * need_bytes:
        return None
    return (
        f"accumulation costs {best.rung} {format_bytes(cost_bytes)} of device memory for gradients: one micro batch a"
        f" step needs {format_bytes(need_bytes)} at micro batch {best.micro_batch} (--global-batch {batch})"
    )


def describe_building(site: SiteForecast) -> str | None:
    """Where building decides the memory of a rung, and how it is split; None where `partitioned` says it."""
    if not site.built_whole or site.partitioned is not None:
        return None
    rungs = ", ".join(site.built_whole)
    return (
        f"building the whole model in each rank decides the memory of {rungs};"
        " the HF Trainer builds it split, as --zero-init does"
    )


def _may_be_faster(rung: RungForecast, best: RungForecast) -> bool:
    """Whether a rung before the best in the ladder could beat it, if it fitted."""
    if rung.verdict == best.verdict:
        return False
    if rung.speed is None or best.speed is None or not _has_comparable_speed(rung, best):
        return True
    return rung.speed.samples_per_second > best.speed.samples_per_second


def _has_comparable_speed(rung: RungForecast, best: RungForecast) -> bool:
    """Whether both have a time. Rates of other batches do not tell which is faster."""
    return rung.speed is not None and best.speed is not None and rung.speed.micro_batch == best.speed.micro_batch


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
    return f"{tokens} take {format_duration(training)} with {best.rung}: {hours}{cost}"


_MANNERS: Mapping[State, str] = {
    "off": "without",
    "on": "with",
    "offload": "with layers' inputs on the host under",
}


def compare_speeds(site: SiteForecast, *, faster: bool | None = None) -> Iterator[str]:
    """What other settings of the best rung, and other rungs, would give; nothing where the time is not known.

    With `faster` only what may fit and is clearly faster than the answer, or only the rest.
    """
    best = site.best
    if best is None or best.speed is None:
        return
    rate, measure = best.speed.samples_per_second, "samples/s" if best.speed.tokens_per_second is None else "tokens/s"
    for alternative in site.alternatives:
        forecast, size = alternative.forecast, f"micro batch {alternative.forecast.micro_batch}"
        factor = 0.0 if forecast.speed is None else forecast.speed.samples_per_second / rate
        is_faster = forecast.verdict in MAY_FIT and factor >= 1 + _WORTH_MENDING
        if faster is not None and faster is not is_faster:
            continue
        option = ""
        if alternative.opt_in:
            size, option = forecast.rung, f"; only by name (--with {forecast.rung}): {alternative.opt_in}"
        elif alternative.switched:
            state = name_state(alternative.checkpointing, on_host=forecast.offloads_inputs)
            manner = _MANNERS.get(state, f"with {state}")
            size, option = f"{manner} activation checkpointing, {size}", f" (--checkpointing {state})"
        else:
            size = f"{size} instead of {best.speed.micro_batch}"
        gain = f"{format_factor(factor)} × the {measure}" if factor else ""
        lack = describe_need(forecast) if find_fullest_tier(forecast) else "is tight"
        if known := ", but ".join(filter(None, (gain, "" if forecast.verdict == "fits" else lack))):
            yield f"{size}: {known}{option}"
    others = [
        f"{rung.rung} {format_factor(rung.speed.samples_per_second / rate)} ×"
        for rung in site.rungs
        if rung is not best and rung.verdict in MAY_FIT and rung.speed is not None
    ]
    if others and not faster:
        yield f"the other rungs beside {best.rung}, each at its micro batch: {', '.join(others)}"


def describe_unaligned(speed: Speed) -> str | None:
    """'12 % of the step goes to matmuls whose rows …'; None where that is little."""
    lost = speed.step.unaligned_seconds / speed.step.seconds
    if lost < _WORTH_MENDING:
        return None
    return (
        f"{lost:.0%} of the step goes to matmuls whose rows do not begin at multiples of 16 bytes:"
        " make sizes such as the vocabulary's multiples of 64"
    )
