"""What a forecast recommends, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from ..forecast.values import Predicted, RungForecast
from ..outcomes import Tier
from ..units import show_bytes
from .plan_result import Forecast, SiteForecast

_TIERS = {"device": "of device memory", "host": "of host memory on a node", "pinned": "of pinned memory",
          "nvme": "of NVMe on a node", "shm": "of shared memory"}  # fmt: skip


def headline(said: SiteForecast) -> str:
    """'zero2 is the fastest rung that fits: …'."""
    best = said.best
    if best is None:
        return "nothing is forecast" if said.to_try else "nothing fits"
    what = "the fastest rung that fits" if best.verdict == "fits" else "the fastest rung that may fit"
    return f"{best.rung} is {what}{_batch(best)}"


def sentences(forecast: Forecast, said: SiteForecast) -> Iterator[str]:
    """What a neighbour would need, and what to do, the most useful first."""
    best = said.best
    if best is None and said.to_try:
        yield f"{' and '.join(said.to_try)} may fit: autods fit tries them"
        return
    if best is None:
        yield from _when_nothing_fits(forecast, said)
        return
    if best.verdict == "tight":
        yield f"only a real trial can tell: autods fit, with {best.rung} in the ladder"
    faster = [rung for rung in said.rungs if _comes_before(said, rung, best) and rung.memory]
    tight = [rung.rung for rung in faster if rung.verdict == "tight"]
    if tight and best.verdict == "fits":
        yield f"faster, but tight: {', '.join(tight)}; only a real trial can tell (autods fit)"
    if faster:
        yield f"the next faster one, {faster[-1].rung}, {_need(faster[-1])}"
    leaner = next((rung for rung in said.rungs if _is_leaner(rung, best)), None)
    if leaner is not None:
        more = f", up to micro batch {leaner.largest_micro_batch}" if leaner.largest_micro_batch else ""
        yield f"{leaner.rung} leaves more room: {_need(leaner)}{more}"
    if best.verdict == "fits":
        yield "prove it on the machine itself: autods fit"


def missing(rung: RungForecast) -> tuple[Tier, Predicted] | None:
    """The tier that is overdrawn most, by share of its limit, if one is."""
    over = [(tier, said) for tier, said in rung.memory.items() if said.fill > 1]
    return max(over, key=lambda item: item[1].fill, default=None)


def _batch(rung: RungForecast) -> str:
    if rung.largest_micro_batch is None:
        return f", at micro batch {rung.micro_batch}"
    return f", up to micro batch {rung.largest_micro_batch}"


def _need(rung: RungForecast) -> str:
    """'needs 36.1 GiB of device memory, 4.1 GiB more than there is'."""
    over = missing(rung)
    if over is None:
        device = rung.memory.get("device")
        return f"needs {show_bytes(device.peak_bytes)} of device memory" if device else rung.reason
    tier, said = over
    lacking = said.peak_bytes - (said.limit_bytes or 0)
    return f"needs {show_bytes(said.peak_bytes)} {_TIERS[tier]}, {show_bytes(lacking)} more than there is"


def _when_nothing_fits(forecast: Forecast, said: SiteForecast) -> Iterator[str]:
    tried = [rung for rung in said.rungs if rung.memory]
    if not tried:
        yield "no rung applies: see the reasons above"
        return
    closest = min(tried, key=_overdraft)
    yield f"{closest.rung} comes closest: it {_need(closest)}"
    over = missing(closest)
    if over is not None and over[0] == "host" and not forecast.zero_init:
        yield "--zero-init: under deepspeed.zero.Init no rank builds the whole model in host memory (stage 3)"
    for rung in said.rungs:
        if rung.verdict == "not_applicable" and "NVMe" in rung.reason:
            yield f"--nvme 2TiB, if a node has a disk: {rung.rung} was left out for want of it"
    yield f"more ranks (--gpus {said.site.world_size * 2}): ZeRO splits the model over them"
    if any(rung.micro_batch > 1 for rung in tried):
        yield "a smaller micro batch (--micro-batch 1)"
    yield "a shorter sequence (--seq-len), or --on all: which machine would do?"


def _overdraft(rung: RungForecast) -> float:
    over = missing(rung)
    return 0.0 if over is None else over[1].fill


def _comes_before(said: SiteForecast, rung: RungForecast, best: RungForecast) -> bool:
    return said.rungs.index(rung) < said.rungs.index(best)


def _is_leaner(rung: RungForecast, best: RungForecast) -> bool:
    if rung.verdict != "fits" or "device" not in rung.memory or rung.rung == best.rung:
        return False
    return rung.memory["device"].peak_bytes < 0.8 * best.memory["device"].peak_bytes
