"""Made-up forecasts for the tests of their table, their JSON and the command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autods.config.catalogue import Site, find_machines
from autods.forecast.predict.step_time import Bound, Speed, StepTime
from autods.forecast.values import RungForecast, TierForecast, Verdict
from autods.planner.plan import choose_best, list_assumptions
from autods.report.results.plan import PlanReport, SiteForecast
from autods.system.host import Hardware
from autods.types import ModelFacts, Tier, WorkloadSource
from tests.support.settings import plan_settings

GIB = 2**30
LIMIT = 80 * GIB
LAPTOP = Hardware(cpu="a CPU", cores=4, host_bytes=16 * GIB, host_free_bytes=8 * GIB, cards=())
SOURCE = WorkloadSource(
    kind="hf_config", path="/models/llama/config.json", name="llama", digest="abc", task="causal-lm"
)
FACTS = ModelFacts(
    parameters=6_738_415_616, largest_parameter=131_072_000, checkpointing=True, tokens_per_sample=2048,
    has_optimizer=False, seq_len=2048,
)  # fmt: skip


def predicted(gib: float, limit: int | None = LIMIT) -> TierForecast:
    """An interval of 10 % about that many GiB."""
    peak = int(gib * GIB)
    return TierForecast(peak_bytes=peak, low_bytes=int(0.9 * peak), high_bytes=int(1.1 * peak), limit_bytes=limit)


def rung(
    name: str, gib: float, *, verdict: Verdict, largest: int | None = None, host: float | None = None, **fields: object
) -> RungForecast:
    memory: dict[Tier, TierForecast] = {"device": predicted(gib)}
    if host is not None:
        memory["host"] = predicted(host, 1024 * GIB)
        memory["pinned"] = predicted(host / 16, None)
    size = int(gib * GIB)
    return RungForecast(
        rung=name,
        verdict=verdict,
        reason=f"needs {gib} GiB of 80.0 GiB; the optimizer step decides",
        micro_batch=1,
        memory=memory,
        live_peak_bytes=int(0.8 * size),
        by_phase={"init": size // 4, "forward": size // 2, "backward": size // 2, "step": size},
        breakdown={"parameters": size // 4, "optimizer": size // 2, "activations": size // 20},
        largest_micro_batch=largest,
        **fields,  # type: ignore[arg-type]
    )


def speed(
    samples_per_s: float, *, seconds: float = 0.5, bound: Bound = "compute", micro_batch: int = 1, tokens: int = 2048
) -> Speed:
    """A step of which 80 % are spent on `bound`, and the rest on launches."""
    spent: dict[Bound, float] = {bound: 0.8 * seconds, "launch": 0.2 * seconds}
    return Speed(
        step=StepTime(
            seconds=seconds, low_seconds=0.8 * seconds, high_seconds=1.2 * seconds, spent=spent, issued_seconds=0.0
        ),
        micro_batch=micro_batch,
        accumulation=1,
        samples_per_second=samples_per_s,
        tokens_per_second=samples_per_s * tokens,
    )


def left_out(name: str, reason: str) -> RungForecast:
    return RungForecast(rung=name, verdict="not_applicable", reason=reason, micro_batch=1)


RUNGS = (
    rung("ddp", 131, verdict="cannot_fit"),
    rung("zero1", 77, verdict="tight", largest=1),
    rung("zero2", 40, verdict="fits", largest=6),
    rung("zero3-offload", 6, verdict="fits", largest=40, host=320, assumed=("the loss scale starts at 65536",)),
    left_out("zero3-nvme", "no NVMe was named (--nvme 2TiB)"),
)


def with_rungs(forecast: SiteForecast, rungs: Iterable[RungForecast]) -> SiteForecast:
    """The same site with other rungs."""
    rungs = tuple(rungs)
    return replace(forecast, rungs=rungs, best=choose_best(rungs))


def site(on: str | None = None) -> Site:
    asked: Mapping[str, object] = {"on": on} if on else {"gpu_memory": LIMIT, "host_memory": "1TiB"}
    return plan_settings(SOURCE, hardware=LAPTOP, gpus=8, **asked).sites[0]  # type: ignore[arg-type]


def forecast(rungs: tuple[RungForecast, ...] = RUNGS) -> PlanReport:
    """One machine, as asked."""
    lacks_nvme = tuple(rung.rung for rung in rungs if rung.rung == "zero3-nvme")
    sites = (SiteForecast(site=site(), rungs=rungs, best=choose_best(rungs), lacks_nvme=lacks_nvme),)
    assumed = list_assumptions(("micro batch 1 (--micro-batch)",), SOURCE, FACTS, sites)
    return PlanReport(sites=sites, source=SOURCE, facts=FACTS, assumed=assumed, seconds=12.3)


def comparison() -> PlanReport:
    """Three machines of the catalogue: the first is too small, the second is enough."""
    rungs = ((rung("zero3-offload", 90, verdict="cannot_fit"),), (RUNGS[2],), (rung("ddp", 50, verdict="fits"),))
    names = [machine.name for machine in find_machines("l4-24gb,a100-80gb,h200-141gb")]
    sites = tuple(
        SiteForecast(site=site(name), rungs=said, best=choose_best(said))
        for name, said in zip(names, rungs, strict=True)
    )
    return PlanReport(
        sites=sites, source=SOURCE, facts=FACTS, assumed=list_assumptions((), SOURCE, FACTS, sites), seconds=12.3
    )


def hopeless() -> PlanReport:
    return forecast((RUNGS[0], rung("zero3-offload", 96, verdict="cannot_fit", host=320), RUNGS[4]))
