"""`autods plan`: the memory that every rung needs on every tier, and the machine that is enough. No GPU, no trial."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.base_config import explain_refusal
from ..config.catalogue import Site
from ..config.checkpointing import make_knob
from ..config.deepspeed import ENOUGH_ACCUMULATION, count_replicas, says_accumulation
from ..config.plan_settings import PlanSettings, adopt_script_batch, apply_script_config_to_plan
from ..config.releases import find_tolerated
from ..config.rungs import Rung
from ..devices import find_device
from ..diagnosis.trial_outcome import wants_larger_batch
from ..errors import AutodsError, EnvironmentBroken, InputError, Interrupted
from ..events import Note
from ..files import check_outputs
from ..forecast.predict.step_time import find_fastest
from ..forecast.predict.verdict import judge_tier
from ..forecast.simulate.client import LIMIT_S, ProcessSimulator
from ..forecast.simulate.protocol import SimulationFailed
from ..forecast.simulation_cache import AllocConf, count_parallel_engines, read_alloc_conf, why_not_forecast
from ..forecast.stored_simulations import ANSWERS_AGAIN, store_answers
from ..forecast.values import STARTING, RungForecast, Simulator, StartSimulator
from ..report.results.plan import (
    WORTH_NAMING,
    AnswerSoFar,
    LoadingPeak,
    PlanListener,
    PlanReport,
    SiteForecast,
    Timeline,
    find_closest,
)
from ..runner.cleanup import open_session, simulator_variables
from ..system.host import installed_versions
from ..types import ModelFacts, Tier, WorkloadSource
from ..workload.hf_config import describe_omissions
from ..workload.lora import parse_lora
from .alternatives import NeighbourSearch, propose_partitioned_build
from .rung_forecasts import PlanRun, SiteGroup, choose_checkpointing, group_sites
from .timeline import name_timeline, write_timeline


def plan(settings: PlanSettings, *, listen: PlanListener, start: StartSimulator | None = None) -> PlanReport:
    """Forecast every rung on each machine.

    Several machines share simulations, and each gets only the rungs up to the fastest that fits. Raises InputError
    when the workload is at fault, EnvironmentBroken when it cannot be simulated here, Interrupted on Ctrl-C.
    """
    began, source, base = time.monotonic(), settings.source, settings.sites[0].base  # not yet with a script's own
    if settings.timeline is not None:
        check_outputs([name_timeline(settings.timeline)])
    if source.form.brings_config:  # its `{ds_config}` stands for the base config
        source = replace(source, base_config=settings.sites[0].base)

    def start_processes(source: WorkloadSource) -> AbstractContextManager[Simulator]:
        limit_s = LIMIT_S if settings.stall_s is None else settings.stall_s
        processes = ProcessSimulator(
            source,
            processes=count_parallel_engines(),
            limit_s=limit_s,
            report=lambda text: listen(Note(text=text, passing=True)),
            variables=simulator_variables(),
        )
        return store_answers(processes, source, anew=settings.fresh, note_use=lambda: listen(Note(text=ANSWERS_AGAIN)))

    try:
        session = open_session() if start is None else nullcontext()  # whatever happens to us, it ends the processes
        with session, (start or start_processes)(source) as simulator:
            listen(Note(text="preparing the simulated device"))
            facts = _read_facts(simulator, settings, listen)
            if settings.tokens is not None and facts.tokens_per_sample is None:
                raise InputError(
                    "--tokens: the tokens of this workload's samples are not known",
                    place=settings.source.path,
                    hint="tokens are integers of a model's batch, such as input_ids; without the option, divide the"
                    " training's samples by the samples/s",
                )
            settings = apply_script_config_to_plan(settings, facts)
            checkpointing = choose_checkpointing(settings, facts)
            allocator = read_alloc_conf(os.environ, settings.device)
            run = PlanRun(settings, facts, simulator, listen, expandable=allocator.expandable)
            try:
                sites = _forecast_sites(run)
            except SimulationFailed as failed:
                if failed.own_batch is None or not settings.adopts_batch:
                    raise
                settings = adopt_script_batch(settings, failed.own_batch)
                run = PlanRun(settings, facts, simulator, listen, expandable=allocator.expandable)
                sites = _forecast_sites(run)
            if len(sites) == 1 and sites[0].status in ("nothing_fits", "tight"):
                sites = (replace(sites[0], partitioned=propose_partitioned_build(run, sites[0].site)),)
            timeline, notes = _write_timeline(run, sites[0])
    except SimulationFailed as failed:
        raise make_user_error(
            failed, source, more_samples="--micro-batch 2", base=base, config_place=settings.config_place
        ) from None
    except KeyboardInterrupt:
        raise Interrupted("stopped; nothing of the simulation is left running") from None
    return PlanReport(
        sites=sites,
        source=settings.source,
        facts=facts,
        device=settings.device,
        checkpointing=make_knob(checkpointing),
        zero_init=settings.zero_init,
        tokens=settings.tokens,
        timeline=timeline,
        assumed=list_assumptions(
            (*settings.assumed, *notes, *_list_notes(settings, allocator)), settings.source, facts, sites
        ),
        versions=installed_versions(),
        seconds=time.monotonic() - began,
    )


def _read_facts(simulator: Simulator, settings: PlanSettings, listen: PlanListener) -> ModelFacts:
    """Read the model's facts, on the first machine. A script that does not run alone is one of all of its ranks."""
    ranks, machine = max(site.world_size for site in settings.sites), settings.sites[0].machine
    try:
        return simulator.facts(settings.device, machine=machine)
    except SimulationFailed:
        if not settings.source.form.runs_as_main or ranks == 1:
            raise
    facts = simulator.facts(settings.device, ranks=ranks, machine=machine)  # it may fail for another reason
    listen(Note(text=f"the script does not run on one rank alone, so its model is read on {ranks}"))
    return facts


_AT_A_LINE = re.compile(r"(.+):(\d+): (.+)")  # what a forecast assumes at a line of a file
# A rung to forecast on some sites of a group.
_Job = tuple[Rung, SiteGroup, Sequence[Site]]


def _forecast_sites(run: PlanRun) -> tuple[SiteForecast, ...]:
    """Forecast every rung on each site, and the neighbours of the best one where there is one site."""
    if len(run.settings.sites) > 1:
        _forecast_several(run)
        return tuple(_site_forecast(run, site) for site in run.settings.sites)
    (site,) = run.settings.sites
    search = NeighbourSearch(run, site)
    jobs = [(rung, (site,), (site,)) for rung in run.settings.ladder]
    then = _Answers(run, search, engines=count_parallel_engines()).add
    _run_in_parallel(run, jobs, search=run.settings.largest, until_one_fits=False, then=then)
    _raise_if_none_was_simulated(run)
    forecast = _site_forecast(run, site)
    if forecast.best is None:
        return (forecast,)
    neighbours = search.begin(forecast.best).result()
    forecast = replace(
        forecast,
        alternatives=neighbours.alternatives,
        unaccumulated=neighbours.unaccumulated,
        runs_full=neighbours.runs_full,
    )
    return (forecast,)


@dataclass(slots=True)
class _Answers:
    """Tells the listener of a plan for one site each time that the rungs which are done give another answer.

    Once no rung waits for one of the `engines`, it has the neighbours of that answer searched.
    """

    run: PlanRun
    search: NeighbourSearch
    engines: int
    _done: set[str] = field(default_factory=set)
    _told: RungForecast | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, rung: Rung) -> None:
        """Count a rung as done. The last one makes no answer so far, but the plan's."""
        run, site = self.run, self.run.settings.sites[0]
        with self._lock:
            self._done.add(rung.name)
            left = len(run.settings.ladder) - len(self._done)
            rungs = tuple(each for each in run.list_forecasts(site) if each.rung in self._done)
            best = choose_best(rungs)
            if not left or best is None or best.verdict != "fits" or run.stopped:
                return
            if left <= self.engines:
                self.search.begin(best)
            if best == self._told:
                return
            self._told = best
            report = PlanReport(
                sites=(SiteForecast(site=site, rungs=rungs, best=best),),
                source=run.settings.source,
                facts=run.facts,
                device=run.settings.device,
            )
            run.listen(AnswerSoFar(report=report, left=left))


def _forecast_several(run: PlanRun) -> None:
    """Forecast the rungs of each site up to the first that fits; only this one is searched for its micro batch."""
    settings = run.settings
    jobs = [(rung, group, group) for group in group_sites(settings.sites) for rung in settings.ladder]
    _run_in_parallel(run, jobs, search=False, until_one_fits=True)
    _raise_if_none_was_simulated(run)
    if settings.largest:
        best = {site.machine.name: _site_forecast(run, site).best_rung for site in settings.sites}
        searches: list[_Job] = []
        for rung, group, sites in jobs:
            answered = [site for site in sites if best[site.machine.name] == rung.name]
            searches += [(rung, group, answered)] if answered else []
        _run_in_parallel(run, searches, search=True, until_one_fits=False)


def _raise_if_none_was_simulated(run: PlanRun) -> None:
    if run.failures and not any(forecast.memory for forecast in run.forecasts.values()):
        raise next(run.failures[rung.name] for rung in run.settings.ladder if rung.name in run.failures)


def _run_in_parallel(
    run: PlanRun,
    jobs: Sequence[_Job],
    *,
    search: bool,
    until_one_fits: bool,
    then: Callable[[Rung], None] | None = None,
) -> None:
    """Run the jobs in order, some at a time. The first that raises ends the others.

    With `search` they find the largest micro batch, too. With `until_one_fits` a site is done when a rung fits.
    `then` is called when a rung is done, from any thread.
    """

    def forecast(rung: Rung, group: SiteGroup, sites: Sequence[Site]) -> None:
        sites = [site for site in sites if not (until_one_fits and _site_forecast(run, site).status == "fits")]
        run.forecast_rung(rung, sites, group, search=search)
        if then is not None:
            then(rung)

    pool = ThreadPoolExecutor(count_parallel_engines(), thread_name_prefix="forecast")
    try:
        tasks = [pool.submit(forecast, *job) for job in jobs]
        done = wait(tasks, return_when=FIRST_EXCEPTION).done
        for task in tasks:
            if task in done:
                task.result()
    except BaseException:
        run.stopped = True
        raise
    finally:
        # Threads are not waited for: leaving the simulator ends its processes, and then the threads end.
        pool.shutdown(wait=False, cancel_futures=True)


def _site_forecast(run: PlanRun, site: Site) -> SiteForecast:
    rungs, reason = run.list_forecasts(site), why_not_forecast(run.facts)
    best = choose_best(rungs)
    return SiteForecast(
        site=site,
        rungs=rungs,
        best=best,
        to_try=tuple(rung.rung for rung in rungs if reason is not None and rung.reason == reason),
        lacks_nvme=tuple(rung.name for rung in run.settings.ladder if rung.uses_nvme and site.nvme_path is None),
        built_whole=_list_built_whole(run, site, best),
        loading=_find_loading_peak(run, site, best or find_closest(rungs)),
    )


def _list_built_whole(run: PlanRun, site: Site, best: RungForecast | None) -> tuple[str, ...]:
    """The best rung and those that may not fit, where memory is short or near its limit only while ranks build."""
    settings = run.settings
    if best is None or settings.zero_init or settings.source.form.runs_as_main:
        return ()

    names = [rung.name for rung in settings.ladder if rung.stage == 3]
    forecasts = [each for each in run.list_forecasts(site) if each.rung in names and each.memory]
    counting = [each for each in forecasts if each.rung == best.rung or each.verdict != "fits"]
    return tuple(each.rung for each in counting if _is_full_at_start_alone(each))


def _is_full_at_start_alone(forecast: RungForecast) -> bool:
    """Whether each tier that may be short, or one that is nearly full where none is, holds clearly less in a step."""
    limited = {tier: held for tier, held in forecast.memory.items() if held.limit_bytes}
    if short := [tier for tier, held in limited.items() if judge_tier(held) != "fits"]:
        return all(_is_clearly_fullest_at_start(forecast, tier) for tier in short)
    full = [tier for tier, held in limited.items() if held.high_bytes >= (1 - WORTH_NAMING) * (held.limit_bytes or 0)]
    return any(_is_clearly_fullest_at_start(forecast, tier) for tier in full)


def _is_clearly_fullest_at_start(forecast: RungForecast, tier: Tier) -> bool:
    by_phase = {"device": forecast.by_phase, "host": forecast.host_by_phase}.get(tier, {})
    start_bytes = max((by_phase.get(phase, 0) for phase in STARTING), default=0)
    later_bytes = max((size for phase, size in by_phase.items() if phase not in STARTING), default=0)
    return start_bytes - later_bytes >= WORTH_NAMING * (forecast.memory[tier].limit_bytes or 0)


def _find_loading_peak(run: PlanRun, site: Site, forecast: RungForecast | None) -> LoadingPeak | None:
    """What a node's host holds with this rung before the first step; None where it holds more in a step."""
    if forecast is None or not forecast.host_is_fullest_at_start or find_device(site.device).shares_host_memory:
        return None
    spec, parameters = run.find_engine(site, forecast.rung), run.facts.parameters
    simulation = None if spec is None else run.cache.get(spec, site.micro_batch)
    if spec is None or simulation is None:
        return None
    build_bytes, init_bytes = (forecast.host_by_phase.get(phase, 0) for phase in STARTING)
    return LoadingPeak(
        stage=next(rung.stage for rung in run.settings.ladder if rung.name == forecast.rung),
        ranks=spec.ranks_of_node,
        build_bytes=build_bytes,
        init_bytes=init_bytes,
        later_bytes=forecast.host_after_start_bytes,
        whole=simulation.builds_whole(parameters),
        in_fp32=simulation.builds_whole(2 * parameters),
    )


def choose_best(rungs: Sequence[RungForecast]) -> RungForecast | None:
    """Return the fastest rung that fits; if none fits, the fastest that may; None without either.

    The forecast of step time decides, if the first candidate of the ladder has one; a later one without counts as
    slower. Rungs that are as good as equal keep the order of the ladder.
    """
    candidates = [rung for rung in rungs if rung.verdict == "fits"]
    candidates = candidates or [rung for rung in rungs if rung.verdict == "tight"]
    if not candidates or candidates[0].speed is None:
        return next(iter(candidates), None)
    rates = [None if rung.speed is None else rung.speed.samples_per_second for rung in candidates]
    return candidates[find_fastest(rates) or 0]


def list_assumptions(
    settled: Sequence[str], source: WorkloadSource, facts: ModelFacts, sites: Sequence[SiteForecast]
) -> tuple[str, ...]:
    """Return each assumption once: those of the settings, the workload's, then those of the rungs."""

    def about_steps() -> Iterator[str]:
        if source.form.runs_as_main or all(says_accumulation(each.site) for each in sites):
            return
        each = sites[0].site
        none = each.micro_batch * count_replicas(each.base, each.world_size)
        yield (
            f"accumulation {ENOUGH_ACCUMULATION}: a step keeps gradients, as any longer one"
            f" (--global-batch, and --global-batch {none} for none)"
        )

    def about_workload() -> Iterator[str]:
        if source.seq_len is None and facts.seq_len is not None:
            why = (
                "as build_batch makes them" if not source.form.is_model_config else "the config's longest, at most 2048"
            )
            yield f"sequences of {facts.seq_len} tokens, {why}{' (--seq-len)' if source.takes_seq_len else ''}"
        if source.form.is_model_config:
            weights = "the folder's weights" if source.weights else "random weights"
            yield f"task {source.task} (--task), {weights} built in fp32"
            yield from describe_omissions(source)
        if source.lora is not None:
            lora = parse_lora(source.lora)
            frozen = ", in 4 bits (NF4, double quantization) but for the head" if lora.quantized else ""
            adapters = f"LoRA of rank {lora.rank} on {', '.join(lora.targets)} (--lora), without dropout"
            yield f"{adapters}; all else is frozen{frozen}"
        if not facts.checkpointing and not source.form.runs_as_main:  # a script decides that by itself
            yield "no gradient checkpointing: the model has no gradient_checkpointing_enable()"

    of_rungs = join_assumptions(_name_machines(sites))
    return tuple(dict.fromkeys((*settled, *about_steps(), *about_workload(), *of_rungs)))


def _name_machines(sites: Sequence[SiteForecast]) -> Iterator[RungForecast]:
    """Yield all forecasts. What a rung assumes on some of several machines begins with their names."""
    machines: dict[str, list[str]] = {}
    for site in sites:
        for sentence in dict.fromkeys(sentence for rung in site.rungs for sentence in rung.assumed):
            machines.setdefault(sentence, []).append(site.site.machine.name)

    def name(rung: RungForecast, sentence: str) -> str:
        everywhere = len(machines[sentence]) == len(sites)
        about_it = sentence.startswith(f"{rung.rung}: ")
        return f"{', '.join(machines[sentence])}: {sentence}" if about_it and not everywhere else sentence

    for site in sites:
        for rung in site.rungs:
            yield replace(rung, assumed=tuple(name(rung, sentence) for sentence in rung.assumed))


def join_assumptions(forecasts: Iterable[RungForecast]) -> tuple[str, ...]:
    """Return what the forecasts assume: one sentence for all rungs and lines of a file that assume the same."""
    rungs: dict[str, list[str]] = {}
    for forecast in forecasts:
        for sentence in forecast.assumed:
            about_it = sentence.startswith(f"{forecast.rung}: ")
            names = rungs.setdefault(sentence.removeprefix(f"{forecast.rung}: "), [])
            names += [forecast.rung] if about_it and forecast.rung not in names else []
    return _join_lines(f"{', '.join(names)}: {sentence}" if names else sentence for sentence, names in rungs.items())


def _join_lines(sentences: Iterable[str]) -> tuple[str, ...]:
    lines: dict[tuple[str, str], list[int]] = {}
    for sentence in sentences:
        if parts := _AT_A_LINE.fullmatch(sentence):
            lines.setdefault((parts[1], parts[3]), []).append(int(parts[2]))
        else:
            lines[sentence, ""] = []
    return tuple(
        f"{file}:{', '.join(map(str, sorted(numbers)))}: {assumption}" if numbers else file
        for (file, assumption), numbers in lines.items()
    )


def _write_timeline(run: PlanRun, site: SiteForecast) -> tuple[Timeline | None, tuple[str, ...]]:
    """Write the trace of the best rung's step, or of the first with a time. Returns it, or a sentence without one."""
    path = run.settings.timeline
    if path is None:
        return None, ()
    drawn = next((rung for rung in (site.best, *site.rungs) if rung is not None and rung.speed is not None), None)
    spec = None if drawn is None else run.find_engine(site.site, drawn.rung)
    if drawn is None or drawn.speed is None or spec is None:
        return None, ("no timeline was written, because no rung has a time",)
    simulation = run.cache.get(spec, drawn.speed.micro_batch)
    assert simulation is not None
    try:
        write_timeline(simulation, spec, path)
    except AutodsError as error:  # the disk filled up meanwhile: the forecast is not lost
        return None, (f"no timeline was written: {' '.join(str(error).split())}",)
    return Timeline(path=str(path), rung=drawn.rung, micro_batch=drawn.speed.micro_batch), ()


def _list_notes(settings: PlanSettings, allocator: AllocConf) -> tuple[str, ...]:
    notes = []
    if any(len(group) > 1 for group in group_sites(settings.sites)):
        shared = "machines with the same ranks and precision share simulations"
        notes.append(f"{shared}: their buckets suit the smallest of them")
    if allocator.expandable:
        notes.append(f"expandable segments, as {allocator.variable} has them")
    if allocator.warning is not None:
        notes.append(allocator.warning)
    faults = (fault for site in settings.sites for fault in find_tolerated(settings.ladder, site.precision, site.base))
    version = installed_versions()["deepspeed"]
    notes += dict.fromkeys(f"{fault.describe(version)}; {fault.remedy}" for fault in faults)
    return tuple(notes)


def make_user_error(
    failed: SimulationFailed,
    source: WorkloadSource,
    *,
    more_samples: str,
    base: Mapping[str, Any] | None = None,
    config_place: str | None = None,
) -> AutodsError:
    """Return EnvironmentBroken if the machine is at fault, else InputError for the workload or the base config.

    `more_samples` is the option that gives the model more samples at a time. `base` is the base config, which stands
    in `config_place`: what DeepSpeed refuses of it is told by its key.
    """
    if failed.kind in ("no_compiler", "build_failed", "environment", "crashed"):
        return EnvironmentBroken(str(failed))
    place = failed.place or (None if failed.kind == "engine" else source.path)
    if failed.kind == "engine" and base and config_place is not None:
        refusal = explain_refusal(base, failed.problem, place=config_place, hint=failed.hint)
        if refusal is not None:
            return refusal
    larger = f"the model cannot be trained with so few samples: give {more_samples} or more"
    return InputError(failed.problem, place=place, hint=larger if wants_larger_batch(failed.problem) else failed.hint)
