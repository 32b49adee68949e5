"""`autods fit`: walk the ladder, grow the micro batch, race the rungs, tune, certify, report.

Read this module first. `fit` opens the journal, the runner and the forecaster; `search` has the steps in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..config.base_config import precision_name
from ..config.rungs import unmet_need
from ..config.settings import Settings, apply_survey
from ..config.validator import find_misspelt_keys
from ..devices import find_device
from ..diagnosis.trial_outcome import make_input_error
from ..errors import EnvironmentBroken, InputError
from ..events import Listener, Note, SearchStarted
from ..forecast.simulation_cache import why_not_forecast
from ..journal import JOURNAL, STUDY, TrialStore, make_other_fit_error, workspace
from ..rank.ops import ops_folder
from ..report import serialize, text
from ..report.page import write_page
from ..report.results.fit import ClosestRung, FitQuestion, FitReport, Throughput
from ..system.host import installed_versions, threads_per_rank
from ..types import Failed, Fit, ModelFacts, Record, Trial, is_machines_fault
from ..workload.script_source import describe_kind, describe_launch
from .candidates import idle_stages_warning, list_candidates
from .certify import CertifyResult, certify
from .ladder_walk import WalkResult, find_closest_rung, untried_rungs, walk_ladder
from .optuna_search import TuneResult, tune
from .race import RaceResult, run_race
from .trial_forecasts import NO_FORECASTER, Forecaster, open_forecaster
from .trials import FitContext, open_journal


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
        if settings.source.form.runs_as_main:
            script = f"{Path(settings.source.path).name} is {describe_kind(settings.source)}"
            kept_out = "it runs unmodified, and in trials its output files are kept out of your folders"
            listen(Note(text=f"{script} (--kind says otherwise); {kept_out}"))
        for note in find_misspelt_keys(settings.base):
            listen(Note(text=note))
        began = time.monotonic()
        earlier_s = sum(record.seconds for record in past.records.values())
        with (start or _start_ray_runner)(settings, listen) as runner:
            memory = TrialStore(journal, past, lambda trial, id: runner.run(trial, id=id), listen)
            facts, op_problems = runner.survey()
            settings = apply_survey(settings, facts)
            with forecaster(settings, facts, memory, listen) as opened:
                context = FitContext(
                    settings=settings,
                    facts=facts,
                    op_problems=op_problems,
                    memory=memory,
                    forecaster=opened,
                    study=out / STUDY,
                    final_config=runner.final_config,
                    check=lambda record: _check_machine(record, settings),
                    save_best=lambda record: _save_best(record, runner, settings),
                )
                result = search(context)
                if isinstance(result, NothingFits):
                    _check_that_memory_decided(result.walked, settings)
        if settings.rehearsed:
            earlier_s = 0.0  # simulated seconds: nobody has waited for them
        seconds = time.monotonic() - began + earlier_s
        report = build_report(result, context, fingerprint=fingerprint, seconds=seconds)
        if estimate_real_s is not None:
            report = replace(report, real_fit_seconds=estimate_real_s(result, context))
        serialize.write(report, out)
        write_page(report, out)
        return report


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
        raise make_other_fit_error(path)
    if question.budget.covers(settings.budget) and question.forecast == settings.forecast:
        listen(Note(text=f"this fit is finished; this is its report (--fresh measures again): {settings.out}"))
        return report
    listen(Note(text="this fit is finished, within a smaller budget or by other forecasts: it goes on from its trials"))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """A config that fits, with the result of each step. `ds_config` is the config as the user gets it."""

    best: Record
    walked: WalkResult
    raced: RaceResult
    tuned: TuneResult
    certified: CertifyResult | None
    ds_config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingFits:
    """No rung fits, or a failure stopped the walk. `closest` is the rung that lacked least."""

    walked: WalkResult
    closest: ClosestRung | None


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

    walked = walk_ladder(rungs, context)
    if walked.winner is None:
        return NothingFits(walked=walked, closest=find_closest_rung(walked, context))
    context = replace(context, least_micro_batch=walked.winner.trial.knobs.micro_batch)
    context.save_best(walked.winner)
    raced = run_race(walked.winner, walked, rungs, context)  # grows the micro batch of each rung that it tries
    context.save_best(raced.best)
    tuned = tune(raced.best, context)
    context.save_best(tuned.best)
    certified = certify(
        tuned.best,
        context,
        alternates=(raced.best, *raced.others),
        reference=walked.winner,
        untried=untried_rungs(rungs, walked) if settings.profile.race.stop == "first-fit" else (),
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
    )


def build_report(
    result: FitResult | NothingFits, context: FitContext, *, fingerprint: str, seconds: float
) -> FitReport:
    """The report of a fit: the config that fits, or the closest rung and the memory that it lacks."""
    settings, facts, walked = context.settings, context.facts, result.walked
    outcomes = {record.trial.rung: text.format_outcome(record.outcome) for record in walked.records}
    reasons = {**outcomes, **{skipped.rung: skipped.reason for skipped in walked.skipped}}
    report = FitReport(
        status="nothing_fits",
        reasons=reasons,
        trials=tuple(context.memory.records),
        skipped=tuple(walked.skipped),
        forecast=tuple(context.forecaster.forecasts.values()),
        hardware=settings.hardware,
        versions=installed_versions(),
        seconds=seconds,
        out=str(settings.out),
        question=_make_question(context, fingerprint),
    )
    if isinstance(result, NothingFits):
        return replace(report, closest=result.closest)

    outcome, knobs = result.best.outcome, result.best.trial.knobs
    assert isinstance(outcome, Fit)
    raced = settings.profile.race.stop == "fastest"
    leaner = f"not tried: {'its states would pass through NVMe, and ' if raced else ''}a rung before it fits"
    not_tried = {
        rung.name: unmet_need(rung, settings.site, facts) or leaner
        for rung in settings.ladder
        if rung.name not in reasons
    }
    holders = "ranks" if not facts.pipeline_stages else "replica" if context.world_size == 1 else "replicas"
    chosen = "chosen for throughput: give --global-batch to keep yours"
    chosen = chosen if settings.global_batch is None else "as requested"
    certified, growth = result.certified, result.raced.growth
    return replace(
        report,
        status="fit",
        rung=result.best.trial.rung,
        knobs=knobs,
        ds_config=result.ds_config,
        throughput=Throughput(
            samples_per_second=outcome.samples_per_second, tokens_per_second=outcome.tokens_per_second
        ),
        memory=outcome.memory,
        largest_micro_batch=growth.curve.fits,
        certificate=None if certified is None else certified.certificate,
        importances=result.tuned.importances,
        reasons={
            **reasons,
            **not_tried,
            **result.raced.reasons,
            "batch": f"{text.format_batch(knobs, context.world_size, holders)}, {chosen}",
            "grow": growth.stop.reason if growth.stop is not None else "",
            "tune": result.tuned.reason,
            **({} if certified is None else {"certify": certified.reason}),
        },
    )


def _make_question(context: FitContext, fingerprint: str) -> FitQuestion:
    """What was asked: the model, the machine and the options."""
    settings, facts = context.settings, context.facts
    return FitQuestion(
        workload=settings.source.name,
        parameters=facts.parameters,
        gpus=settings.gpus,
        nodes=settings.nodes,
        pipeline_stages=facts.pipeline_stages,
        experts=facts.experts,
        device=settings.device,
        device_bytes=settings.device_bytes,
        threads=settings.threads or threads_per_rank(settings.ranks_per_node, settings.hardware.cores),
        global_batch=settings.global_batch,
        profile=settings.profile.name,
        objective=settings.objective,
        stop=settings.profile.race.stop,
        ladder=tuple(rung.name for rung in settings.ladder),
        lacks_nvme=tuple(rung.name for rung in settings.ladder if rung.uses_nvme and settings.nvme_path is None),
        script=describe_launch(settings.source) if settings.source.form.runs_as_main else None,
        stood_in=facts.stood_in,
        writes_confined=facts.writes_confined,
        ops_folder=str(ops_folder()),
        fingerprint=fingerprint,
        budget=settings.budget,
        forecast=settings.forecast,
        rehearsed_on=settings.machine.name if settings.rehearsed else None,
    )


def _start_ray_runner(settings: Settings, listen: Listener) -> AbstractContextManager[Runner]:
    from ..runner.runner import RayRunner

    device = find_device(settings.device)
    if device.has_cards and settings.address is None:
        cards = settings.hardware.cards[: settings.gpus]
        for note in device.describe_cards(cards):
            listen(Note(text=note))
        if precision_name(settings.base) == "bf16" and (older := [card.name for card in cards if not card.bf16]):
            listen(Note(text=f"{older[0]} only emulates bf16: try --precision fp16, in which it computes by itself"))
    return RayRunner(settings, listen)


def _check_that_memory_decided(walked: WalkResult, settings: Settings) -> None:
    """Raise when no rung ran for a reason other than memory: InputError for the workload, else EnvironmentBroken."""
    if walked.stopped is not None:
        _check_machine(walked.stopped, settings)
        assert isinstance(walked.stopped.outcome, Failed)
        raise make_input_error(walked.stopped.outcome, settings.source.path, _log_path(walked.stopped, settings))
    failures = [record.outcome for record in walked.records if isinstance(record.outcome, Failed)]
    if failures and len(failures) == len(walked.records):
        rung = walked.records[-1].trial.rung
        raise EnvironmentBroken(f"no rung could be tried: {rung}: {failures[-1].evidence}\n  {failures[-1].advice}")


def _save_best(record: Record, runner: Runner, settings: Settings) -> None:
    """Write the best config so far, in case the fit is killed. A rehearsal has none that was measured."""
    if not settings.rehearsed:
        serialize.write_so_far(runner.final_config(record.trial), settings.out)


def _check_machine(record: Record, settings: Settings) -> Record:
    """Return the record. Raise where the machine failed (a full disk, a lost GPU): further trials would fail alike.

    The journal does not keep such a trial; the next run repeats it.
    """
    outcome = record.outcome
    if isinstance(outcome, Fit) or not is_machines_fault(outcome):
        return record
    place = f"{record.trial.rung}, rank {outcome.rank}, {outcome.phase}; log: {_log_path(record, settings)}"
    raise EnvironmentBroken(f"{outcome.evidence}\n  {outcome.advice} ({place})")


def _log_path(record: Record, settings: Settings) -> Path:
    assert not isinstance(record.outcome, Fit)
    return settings.out / "logs" / f"{record.id:03d}-{record.trial.rung}" / f"rank{max(0, record.outcome.rank)}.log"
