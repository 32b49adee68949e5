"""`autods plan`: the memory that every rung needs on every tier, and the machine that is enough. No GPU, no trial."""

from __future__ import annotations

import os
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from ..config.plan_settings import PlanSettings, Site, apply_script_config_to_plan
from ..config.strategies import Rung
from ..diagnosis.trial_outcome import wants_larger_batch
from ..errors import AutodsError, EnvironmentBroken, InputError, Interrupted
from ..events import Note
from ..forecast.allocator import AllocConf, read_alloc_conf
from ..forecast.forecaster import PARALLEL_ENGINES
from ..forecast.simulator.client import SimulationFailed
from ..forecast.simulator.client import Simulator as ProcessSimulator
from ..forecast.values import ForecastListener, Simulator, StartSimulator
from ..report.results import Forecast, SiteForecast
from ..system.host import installed_versions
from ..tuner.candidates import why_not_forecast
from ..types import ModelFacts, WorkloadSource
from .simulate import PlanRun, SiteGroup, choose_checkpointing, group_sites

_ENVIRONMENT = ("no_compiler", "build_failed", "crashed")


def plan(settings: PlanSettings, *, listen: ForecastListener, start: StartSimulator | None = None) -> Forecast:
    """Forecast every rung on each machine.

    Several machines share simulations, and each gets only the rungs up to the fastest that fits. Raises InputError
    when the workload is at fault, EnvironmentBroken when it cannot be simulated here, Interrupted on Ctrl-C.
    """
    began = time.monotonic()
    try:
        with (start or ProcessSimulator)(_source_to_simulate(settings)) as simulator:
            listen(Note(text="preparing the simulated device"))
            facts = _read_facts(simulator, settings, listen)
            settings = apply_script_config_to_plan(settings, facts)
            checkpointing = choose_checkpointing(settings, facts)
            allocator = read_alloc_conf(os.environ) if settings.device == "cuda" else AllocConf()
            run = PlanRun(settings, facts, simulator, listen, expandable=allocator.expandable)
            _forecast_all(run)
    except SimulationFailed as failed:
        raise _as_user_error(failed, settings.source) from None
    except KeyboardInterrupt:
        raise Interrupted("stopped; nothing of the simulation is left running") from None
    return Forecast(
        sites=tuple(_site_forecast(run, site) for site in settings.sites),
        source=settings.source,
        facts=facts,
        device=settings.device,
        checkpointing=checkpointing,
        zero_init=settings.zero_init,
        assumed=(*settings.assumed, *_notes_on_sharing(settings), *_notes_on_allocator(allocator)),
        versions=installed_versions(),
        seconds=time.monotonic() - began,
    )


def _source_to_simulate(settings: PlanSettings) -> WorkloadSource:
    """Return the workload; a script comes with the base config, which its `{ds_config}` stands for."""
    if settings.source.kind != "script":
        return settings.source
    return replace(settings.source, base_config=settings.sites[0].base)


def _read_facts(simulator: Simulator, settings: PlanSettings, listen: ForecastListener) -> ModelFacts:
    """Read the model's facts. A script that does not run alone is run as one of all of its ranks."""
    ranks = max(site.world_size for site in settings.sites)
    try:
        return simulator.facts(settings.device)
    except SimulationFailed:
        if settings.source.kind != "script" or ranks == 1:
            raise
    listen(Note(text=f"the script does not run on one rank alone, so its model is read on {ranks}"))
    return simulator.facts(settings.device, ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A rung on sites of one group; search: find its largest micro batch, too."""

    rung: Rung
    sites: tuple[Site, ...]
    group: SiteGroup
    search: bool


def _forecast_all(run: PlanRun) -> None:
    settings, several = run.settings, len(run.settings.sites) > 1
    jobs = [
        _Job(rung=rung, sites=group.sites, group=group, search=settings.largest and not several)
        for group in group_sites(settings.sites)
        for rung in settings.ladder
    ]
    _run_in_parallel(run, jobs, until_one_fits=several)
    if run.failures and not any(forecast.memory for forecast in run.forecasts.values()):
        raise run.failures[0]
    if several and settings.largest:
        searches = [_search_where_best(run, job) for job in jobs]
        _run_in_parallel(run, [job for job in searches if job.sites], until_one_fits=False)


def _search_where_best(run: PlanRun, job: _Job) -> _Job:
    """Return the search for the largest micro batch on the sites where this rung is the answer."""
    sites = tuple(site for site in job.sites if _site_forecast(run, site).best_rung == job.rung.name)
    return replace(job, sites=sites, search=True)


def _run_in_parallel(run: PlanRun, jobs: list[_Job], *, until_one_fits: bool) -> None:
    """Run the jobs in order, some at a time. The first that raises ends the others.

    With `until_one_fits` a site is done when one of its rungs fits.
    """

    def forecast(job: _Job) -> None:
        sites = [site for site in job.sites if not (until_one_fits and run.has_fitting_rung(site))]
        if sites:
            run.forecast_rung(job.rung, sites, job.group, search=job.search)

    pool = ThreadPoolExecutor(PARALLEL_ENGINES, thread_name_prefix="forecast")
    try:
        tasks = [pool.submit(forecast, job) for job in jobs]
        for done in wait(tasks, return_when=FIRST_EXCEPTION).done:
            done.result()
    except BaseException:
        run.stopped = True
        raise
    finally:
        # Threads are not waited for: leaving the simulator ends its processes, and then the threads end.
        pool.shutdown(wait=False, cancel_futures=True)


def _site_forecast(run: PlanRun, site: Site) -> SiteForecast:
    known = (run.forecasts.get((site.machine.name, rung.name)) for rung in run.settings.ladder)
    rungs = tuple(forecast for forecast in known if forecast is not None)
    reason = why_not_forecast(run.facts)
    to_try = tuple(rung.rung for rung in rungs if reason is not None and rung.reason == reason)
    lacks_nvme = tuple(rung.name for rung in run.settings.ladder if rung.needs.nvme_path and site.nvme_path is None)
    return SiteForecast(site=site, rungs=rungs, to_try=to_try, lacks_nvme=lacks_nvme)


def _notes_on_sharing(settings: PlanSettings) -> tuple[str, ...]:
    if all(len(group.sites) == 1 for group in group_sites(settings.sites)):
        return ()
    return ("machines with the same ranks and precision share simulations: their buckets suit the smallest of them",)


def _notes_on_allocator(conf: AllocConf) -> tuple[str, ...]:
    expandable = f"expandable segments, as {conf.variable} has them" if conf.expandable else None
    return tuple(note for note in (expandable, conf.warning) if note is not None)


def _as_user_error(failed: SimulationFailed, source: WorkloadSource) -> AutodsError:
    """Return EnvironmentBroken if the machine is at fault, else InputError for the workload."""
    if failed.kind in _ENVIRONMENT:
        return EnvironmentBroken(str(failed))
    place = failed.place or (None if failed.kind == "engine" else source.path)
    larger = "the model cannot be trained with so few samples: give --micro-batch 2 or more"
    return InputError(failed.problem, place=place, hint=larger if wants_larger_batch(failed.problem) else failed.hint)
