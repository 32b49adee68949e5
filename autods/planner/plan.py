"""`autods plan`: what every rung needs on every tier, and which machine is enough. No GPU, no trial."""

from __future__ import annotations

import os
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from ..config.strategies import Rung
from ..diagnosis.trial_outcome import wants_larger_batch
from ..errors import AutodsError, EnvironmentBroken, InputError, Interrupted
from ..events import Note
from ..forecast.allocator import AllocConf, read_alloc_conf
from ..forecast.simulator.client import SimulationFailed
from ..forecast.simulator.client import Simulator as ProcessSimulator
from ..forecast.values import ForecastListener, Simulator, StartSimulator
from ..report.results import Forecast, SiteForecast
from ..settings import PlanSettings, Site, apply_script_config_to_plan
from ..system.host import installed_versions
from ..tuner.candidates import why_not_forecast
from ..types import ModelFacts, WorkloadSource
from .simulate import Sizing, Work, checkpointing_of, forecast_rung, groups_of

_PROCESSES = 2  # engines simulated at a time; each holds half a gigabyte
_ENVIRONMENT = ("no_compiler", "build_failed", "crashed")


def plan(question: PlanSettings, *, listen: ForecastListener, start: StartSimulator | None = None) -> Forecast:
    """The forecast of every rung on the machine that was asked about.

    Several machines share simulations, and of each only the rungs up to the fastest that fits are forecast. Raises
    InputError when the workload is at fault, EnvironmentBroken when it cannot be simulated here, Interrupted on Ctrl-C.
    """
    began = time.monotonic()
    try:
        with (start or ProcessSimulator)(_to_look_at(question)) as simulator:
            listen(Note(text="preparing the simulated device"))
            facts = _looked(simulator, question, listen)
            question = apply_script_config_to_plan(question, facts)
            checkpointing = checkpointing_of(question, facts)
            allocator = read_alloc_conf(os.environ) if question.device == "cuda" else AllocConf()
            work = Work(question, facts, simulator, listen, expandable=allocator.expandable)
            _work_through(work)
    except SimulationFailed as failed:
        raise _told(failed, question.source) from None
    except KeyboardInterrupt:
        raise Interrupted("stopped; nothing of the simulation is left running") from None
    return Forecast(
        sites=tuple(_of_site(work, site) for site in question.sites),
        source=question.source,
        facts=facts,
        device=question.device,
        checkpointing=checkpointing,
        zero_init=question.zero_init,
        assumed=(*question.assumed, *_shared(question), *_of_allocator(allocator)),
        versions=installed_versions(),
        seconds=time.monotonic() - began,
    )


def _to_look_at(question: PlanSettings) -> WorkloadSource:
    """The workload; a script with the base config that was asked for, which its `{ds_config}` holds then."""
    if question.source.kind != "script":
        return question.source
    return replace(question.source, base_config=question.sites[0].base)


def _work_through(work: Work) -> None:
    question, several = work.question, len(work.question.sites) > 1
    jobs = [
        _Job(rung=rung, sites=sites, sizing=sizing, search=question.largest and not several)
        for sizing, sites in groups_of(question.sites)
        for rung in question.ladder
    ]
    _in_parallel(work, jobs, only_unsettled=several)
    if work.failures and not any(forecast.memory for forecast in work.found.values()):
        raise work.failures[0]
    if several and question.largest:
        _in_parallel(work, [best for job in jobs if (best := _where_best(work, job)).sites], only_unsettled=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A rung on sites that share simulations; search: also for its largest micro batch."""

    rung: Rung
    sites: tuple[Site, ...]
    sizing: Sizing
    search: bool


def _where_best(work: Work, job: _Job) -> _Job:
    """The search for the largest micro batch, on the sites where this rung is the answer."""
    sites = tuple(site for site in job.sites if _of_site(work, site).best_rung == job.rung.name)
    return replace(job, sites=sites, search=True)


def _in_parallel(work: Work, jobs: list[_Job], *, only_unsettled: bool) -> None:
    """Every job, some at a time, in order. The first that raises ends the others."""

    def do(job: _Job) -> None:
        sites = [site for site in job.sites if not (only_unsettled and work.settled(site))]
        if sites:
            forecast_rung(work, job.rung, sites, job.sizing, search=job.search)

    pool = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="forecast")
    try:
        tasks = [pool.submit(do, job) for job in jobs]
        for done in wait(tasks, return_when=FIRST_EXCEPTION).done:
            done.result()
    except BaseException:
        work.stopped = True
        raise
    finally:
        # Not waited for: leaving the simulator ends its processes, and with them whoever waits for an answer.
        pool.shutdown(wait=False, cancel_futures=True)


def _shared(question: PlanSettings) -> tuple[str, ...]:
    """What is said of simulations that answer for more than one machine."""
    if all(len(sites) == 1 for _, sites in groups_of(question.sites)):
        return ()
    return ("machines with the same ranks and precision share simulations: their buckets suit the smallest of them",)


def _of_allocator(conf: AllocConf) -> tuple[str, ...]:
    expandable = f"expandable segments, as {conf.variable} has them" if conf.expandable else None
    return tuple(said for said in (expandable, conf.warning) if said is not None)


def _of_site(work: Work, site: Site) -> SiteForecast:
    said = (work.found.get((site.machine.name, rung.name)) for rung in work.question.ladder)
    rungs = tuple(forecast for forecast in said if forecast is not None)
    reason = why_not_forecast(work.facts)
    to_try = tuple(rung.rung for rung in rungs if reason is not None and rung.reason == reason)
    lacks_nvme = tuple(rung.name for rung in work.question.ladder if rung.needs_nvme_path and site.nvme_path is None)
    return SiteForecast(site=site, rungs=rungs, to_try=to_try, lacks_nvme=lacks_nvme)


def _looked(simulator: Simulator, question: PlanSettings, listen: ForecastListener) -> ModelFacts:
    """What a look at the model finds: of a script alone, as in a fit, else among all of its ranks."""
    ranks = max(site.world_size for site in question.sites)
    try:
        return simulator.facts(question.device)
    except SimulationFailed:
        if question.source.kind != "script" or ranks == 1:
            raise
    listen(Note(text=f"it does not run on one rank alone, so it is looked at on {ranks}"))
    return simulator.facts(question.device, ranks=ranks)


def _told(failed: SimulationFailed, source: WorkloadSource) -> AutodsError:
    """Whose it is to mend: the machine's, else the workload's."""
    if failed.kind in _ENVIRONMENT:
        return EnvironmentBroken(str(failed))
    where = failed.where or (None if failed.kind == "engine" else source.path)
    larger = "the model cannot be trained with so few samples: give --micro-batch 2 or more"
    return InputError(failed.what, where=where, hint=larger if wants_larger_batch(failed.what) else failed.hint)
