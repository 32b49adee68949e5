"""`autods fit`: walk the ladder, grow the micro batch, race the rungs, tune, certify, report.

Read this module first. `fit` opens the journal, the runner and the forecaster; `search` has the steps in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..config.deepspeed import allow_gathering, get_key
from ..config.key_rules import find_misspelt_keys
from ..config.profiles import Profile
from ..config.releases import name_defaults
from ..config.settings import Settings, apply_survey
from ..config.trainers import find_library
from ..devices import DEVICES
from ..diagnosis.trial_outcome import make_input_error
from ..errors import EnvironmentBroken, InputError
from ..events import Listener, Note, SearchStarted, Stage, StageStarted
from ..forecast.simulation_cache import why_not_forecast
from ..journal import JOURNAL, STUDY, Journal, TrialStore, keep_warnings, make_other_fit_error, workspace
from ..report import serialize
from ..report.answers.fit import make_fit_document
from ..report.render_html import PAGE, write_page
from ..report.results.fit import FitReport
from ..types import Failed, ModelFacts, Record, Trial
from ..workload.hf_config import describe_omissions
from ..workload.script_source import describe_kind, find_early_variables
from .candidates import idle_stages_warning, list_candidates
from .certify import certify
from .fit_report import FitResult, NothingFits, build_report
from .forecaster import NO_FORECASTER, Forecaster
from .ladder_walk import WalkResult, find_closest_rung, propose_partitioned_build, untried_rungs, walk_ladder
from .optuna_search import tune
from .prospects import offload_where_needed
from .race import run_race
from .trial_forecasts import open_forecaster
from .trials import FitContext, open_journal

# Variables that are read before a rank runs its script: the cards are in use then, and the threads are counted.
_READ_BEFORE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *(device.visible_variable for device in DEVICES.values()))

_USUAL_GROWTH, _LIKELY_RIVALS = 3, 2  # trials of the leader's growth, configs that come close to it


class Runner(Protocol):
    """Runs trials on real ranks. `runner.runner.RayRunner` is the one of a fit, `runner.testing` has a scripted one."""

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]:
        """The facts of the model, and DeepSpeed op → the reason that it cannot be built here."""

    def run(self, trial: Trial, *, id: int) -> Record:
        """Run one trial to its end."""

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """The DeepSpeed config of a trial as the user gets it."""


StartRunner = Callable[[Settings, Listener], AbstractContextManager[Runner]]
OpenForecaster = Callable[[Settings, ModelFacts, TrialStore, Listener], AbstractContextManager[Forecaster]]


def fit(
    settings: Settings,
    *,
    listen: Listener,
    start: StartRunner | None = None,
    forecaster: OpenForecaster = open_forecaster,
    estimate_real_s: Callable[[FitResult | NothingFits, FitContext], float] | None = None,
) -> FitReport:
    """Find the fastest config that fits, prove it with real trials, and write the report to `settings.out`.

    A fit that was killed goes on where it stopped. A finished one returns its report again, unless `settings.fresh`, or
    goes on where a larger budget or other forecasts are asked for.
    `start` and `forecaster` replace Ray and the simulator. A rehearsal gives `estimate_real_s`, which returns the
    seconds that the real fit would take. Raises InputError when the workload or the folder is at fault,
    EnvironmentBroken when the machine is, and Interrupted on Ctrl-C.
    """
    with workspace(settings.out, fresh=settings.fresh) as out:
        fingerprint = settings.fingerprint()
        if (finished := _read_finished(settings, fingerprint, listen)) is not None:
            return finished
        journal, past, settings = open_journal(settings, fingerprint, listen)
        listen, warnings = keep_warnings(listen, journal, past)
        for note in _describe_workload(settings):
            listen(Note(text=note))
        began = time.monotonic()
        # The seconds of a rehearsal's trials are simulated: nobody has waited for them.
        earlier_s = 0.0 if settings.rehearsed else sum(record.seconds for record in past.records.values())

        with (start or _start_ray_runner)(settings, listen) as runner:
            memory = TrialStore(journal, past, runner.run, listen)
            facts, op_problems = runner.survey()
            settings = apply_survey(settings, facts)
            library = find_library(settings.source)
            sets = () if library is None else library.sets

            earlier = {record.id for record in past.records.values()}

            def count_elapsed_s() -> float:
                # A trial of the journal counts once it is asked for. With all of them the budget would be spent before
                # they are, and the search would end without what they have shown.
                asked_s = sum(record.seconds for record in memory.records if record.id in earlier)
                return time.monotonic() - began + asked_s

            def final_config(trial: Trial) -> dict[str, Any]:
                config = name_defaults(runner.final_config(trial), without=sets)
                return allow_gathering(config) if get_key(config, "zero_optimization.stage") == 3 else config

            with forecaster(settings, facts, memory, listen) as opened:
                memory.adapt = opened.choose_allocator
                context = FitContext(
                    settings=settings,
                    facts=facts,
                    op_problems=op_problems,
                    memory=memory,
                    forecaster=opened,
                    study=out / STUDY,
                    final_config=final_config,
                    save_best=partial(_save_best, final_config, settings),
                    elapsed_s=None if settings.rehearsed else count_elapsed_s,
                )
                result = search(context)
                if isinstance(result, NothingFits):
                    _check_that_memory_decided(result.walked, context)

        report = build_report(result, context, fingerprint=fingerprint, seconds=time.monotonic() - began + earlier_s)
        report = replace(report, warnings=tuple(warnings))
        if estimate_real_s is not None:
            report = replace(report, real_fit_seconds=estimate_real_s(result, context))
        serialize.write(report, out)
        write_page(make_fit_document(report, out), out / PAGE)
        return report


def _describe_workload(settings: Settings) -> Iterator[str]:
    """Yield sentences about the workload that its user should know before anything runs."""
    source = settings.source
    if source.form.runs_as_main:
        script = f"{Path(source.path).name} is {describe_kind(source)} (--kind says otherwise)"
        yield f"{script}; it runs unmodified, and in trials its output files are kept out of your folders"
        for name, place in find_early_variables(source).items():
            if name in _READ_BEFORE:
                yield f"{place} sets {name}, which has no effect in a rank: set it for autods itself"
    yield from describe_omissions(source)
    yield from find_misspelt_keys(settings.base)


def _read_finished(settings: Settings, fingerprint: str, listen: Listener) -> FitReport | None:
    """Return the report in the folder if it answers these settings; None where the search begins or goes on.

    Raises InputError for the report of another fit, and for a damaged one where no journal could make it again.
    """
    path, journal = settings.out / serialize.REPORT, settings.out / JOURNAL
    if not path.exists():
        return None
    try:
        report = serialize.read(settings.out)
    except InputError:
        if not (path.is_file() and journal.is_file() and journal.stat().st_size):
            raise
        listen(Note(text=f"{serialize.REPORT} is damaged, as a power cut leaves it: the journal makes it again"))
        return None
    question = report.question
    if question.fingerprint != fingerprint:
        raise make_other_fit_error(path, Journal(journal).read_options(), settings.options)
    if question.budget.covers(settings.budget) and question.forecast == settings.forecast:
        again = "`autods fit … --fresh` measures again"  # a run's --fresh forgets its checkpoints
        listen(Note(text=f"the fit in {settings.out} is finished, and its report is taken ({again})"))
        return report
    listen(Note(text="this fit is finished, within a smaller budget or by other forecasts: it goes on from its trials"))
    return None


def search(context: FitContext) -> FitResult | NothingFits:
    """Every step of a fit that runs trials, from the ladder's walk to the certificate."""
    settings, facts, listen = context.settings, context.facts, context.memory.listen
    if (warning := idle_stages_warning(facts, settings.global_batch)) is not None:
        listen(Note(text=warning))
    if (reason := why_not_forecast(facts)) is not None:
        context = replace(context, forecaster=NO_FORECASTER)
        if settings.forecast:
            listen(Note(text=f"{reason}; rungs are tried instead"))
    rungs = list_candidates(settings, facts, context.op_problems)
    listen(_describe_search(context))

    _begin_stage("walk", context)
    rungs = offload_where_needed(rungs, context)
    walked = walk_ladder(rungs, context)
    if walked.winner is None:
        return NothingFits(
            walked=walked,
            closest=find_closest_rung(walked, context),
            partitioned=None if walked.stopped else propose_partitioned_build(rungs, walked, context),
        )
    context = replace(context, least_micro_batch=walked.least_micro_batch, own_batch=walked.own_batch)
    context.save_best(walked.winner)
    _begin_stage("race", context, walked.winner)
    raced = run_race(walked, rungs, context)  # grows the micro batch of each rung that it tries
    context.save_best(raced.best)
    _begin_stage("tune", context, walked.winner)
    tuned = tune(raced.best, context)
    context.save_best(tuned.best)
    _begin_stage("certify", context, walked.winner)
    lessons = walked.lessons
    untried = untried_rungs(rungs, walked) if settings.profile.race.stop == "first-fit" else ()
    certified = certify(
        tuned.best,
        context,
        alternates=(raced.best, *raced.others),
        reference=walked.winner,
        untried=[each for each in untried if lessons.reason_to_skip(each.rung, each.ops) is None],
    )
    best = tuned.best if certified is None else certified.best
    ds_config = context.final_config(best.trial)
    return FitResult(best=best, walked=walked, raced=raced, tuned=tuned, certified=certified, ds_config=ds_config)


def _describe_search(context: FitContext) -> SearchStarted:
    settings = context.settings
    return SearchStarted(
        ladder=tuple(rung.name for rung in settings.ladder),
        device_bytes=settings.device_bytes,
        usable_bytes=context.usable_bytes,
        least_memory=settings.objective == "memory",
        most_trials=settings.budget.trials,
        most_seconds=settings.budget.seconds,
        rehearsed=settings.rehearsed,
        recomputes=context.facts.checkpointing,
    )


def _begin_stage(name: str, context: FitContext, first: Record | None = None) -> None:
    """Tell listeners which stage begins; `first` is the trial of the walk that fitted."""
    settings = context.settings
    is_forecast = context.forecaster is not NO_FORECASTER
    stages = tuple(
        plan_stages(
            settings.profile,
            rungs=len(settings.ladder),
            is_forecast=is_forecast,
            # Before the walk it is not known whether step times can be forecast.
            is_timed=is_forecast
            and settings.objective != "memory"
            and (first is None or context.forecaster.step_time(first.trial) is not None),
            recomputes=context.facts.checkpointing,
            rehearsed=settings.rehearsed,
        )
    )
    place = next((place for place, stage in enumerate(stages) if stage.name == name), None)
    if place is not None:
        context.memory.listen(StageStarted(stages=stages, place=place))


def plan_stages(
    profile: Profile, *, rungs: int, is_forecast: bool, is_timed: bool, recomputes: bool, rehearsed: bool = False
) -> Iterator[Stage]:
    """Yield the stages of a search over so many rungs, with about as many trials as fits of its profile take.

    `is_forecast` says whether the memory of rungs is forecast, `is_timed` whether their step times are, too.
    `recomputes` says whether the model can recompute activations.
    """
    race, tuning, certify = profile.race, profile.tune, profile.certify
    yield Stage(name="walk", trials=1 if is_forecast else (rungs + 1) // 2)
    rivals = rungs - 1 if race.stop == "fastest" else 0
    if is_timed or not rivals:
        rivals = min(_LIKELY_RIVALS, rivals + (race.checkpointing and recomputes))
        entering = rivals + race.turns * (rivals + 1) if rivals else 0  # in a turn the leader is measured again, too
    else:  # each is tried, with its activations recomputed and kept
        entering = 2 * rivals + race.turns * (_LIKELY_RIVALS + 1)
    growth = 0 if is_timed else min(_USUAL_GROWTH, profile.grow.most_trials)  # the walk begins at the forecast's size
    yield Stage(name="race", trials=growth + entering)
    if tuning.trials:
        yield Stage(name="tune", trials=1 if is_timed and tuning.priced else tuning.trials + tuning.turns)
    if certify.most_trials and not rehearsed:
        yield Stage(name="certify", trials=1 if certify.parity is None else 3)


def _start_ray_runner(settings: Settings, listen: Listener) -> AbstractContextManager[Runner]:
    from ..runner.runner import RayRunner

    return RayRunner(settings, listen)


def _check_that_memory_decided(walked: WalkResult, context: FitContext) -> None:
    """Raise when no rung ran for a reason other than memory: InputError for the workload, else EnvironmentBroken."""
    if walked.stopped is not None:
        context.check(walked.stopped)
        assert isinstance(walked.stopped.outcome, Failed)
        log = context.log_path(walked.stopped)
        raise make_input_error(walked.stopped.outcome, context.settings.source.path, log)
    failures = [record.outcome for record in walked.records if isinstance(record.outcome, Failed)]
    if failures and len(failures) == len(walked.records):
        rung = walked.records[-1].trial.rung
        raise EnvironmentBroken(f"no rung could be tried: {rung}: {failures[-1].evidence}\n  {failures[-1].advice}")


def _save_best(final_config: Callable[[Trial], Mapping[str, Any]], settings: Settings, record: Record) -> None:
    """Write the best config so far, in case the fit is killed. A rehearsal has none that was measured."""
    if not settings.rehearsed:
        serialize.write_so_far(final_config(record.trial), settings.out)
