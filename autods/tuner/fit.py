"""`autods fit`: walk the ladder, grow the micro batch, race the rungs, tune, certify, report.

Read this module first. `fit` opens the journal, the runner and the forecaster; `Search.run` has the steps in order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config.base_config import find_misspelt_keys
from ..config.settings import Settings, apply_script_config
from ..diagnosis.trial_outcome import make_input_error
from ..errors import EnvironmentBroken, Interrupted
from ..events import Listener, Note
from ..journal import JOURNAL, STUDY, Journal, TrialStore, check_disk_space, workspace
from ..report import serialize
from ..report.results import Report
from ..system.gpus import describe_card_names, describe_shared_cards
from ..system.host import installed_versions, read_hardware
from ..types import Failed, Fit, Record, WorkloadSource, is_machines_fault
from ..workload.script_source import KIND_DESCRIPTIONS
from .candidates import check_ranks, idle_stages_warning, list_candidates, why_not_forecast
from .certify import certify_winner
from .context import FitContext, Runner, usable_bytes_of
from .fit_result import FitResult, NothingFits, fit_report, nothing_fits_report
from .forecasts import NO_FORECASTER, Forecaster, open_forecaster
from .ladder_walk import find_closest_rung, untried_rungs, walk_ladder
from .optuna_search import tune_winner
from .race import run_race

StartRunner = Callable[[Settings, Listener], AbstractContextManager[Runner]]
OpenForecaster = Callable[[Settings, Runner, TrialStore, Listener], AbstractContextManager[Forecaster]]


def fit(
    settings: Settings,
    *,
    listen: Listener,
    fresh: bool = False,
    start: StartRunner | None = None,
    forecaster: OpenForecaster | None = None,
) -> Report:
    """Find the fastest config that fits, prove it with real trials, and write the report to `settings.out`.

    A fit that was killed goes on where it stopped; a finished one returns its report again, unless `fresh`. `start` and
    `forecaster` replace Ray and the simulator. Raises InputError when the workload or the folder is at fault,
    EnvironmentBroken when the machine is, and Interrupted on Ctrl-C.
    """
    with workspace(settings.out, fresh=fresh) as out:
        journal = Journal(out / JOURNAL)
        past = journal.open(fingerprint=settings.fingerprint())
        if (out / "report.json").exists():
            listen(Note(text=f"this fit is finished; this is its report (--fresh measures again): {out}"))
            return serialize.read(out)
        if past.records:
            listen(Note(text=f"resuming: {len(past.records)} finished trials are not run again"))
        for text in (*workload_notes(settings.source), *find_misspelt_keys(settings.base)):
            listen(Note(text=text))
        began = time.monotonic()
        try:
            with (start or _start_ray_runner)(settings, listen) as runner:
                memory = TrialStore(journal, past, lambda trial, id: runner.run(trial, id=id), listen)
                with (forecaster or _open_forecaster)(settings, runner, memory, listen) as opened:
                    search = Search(
                        settings=settings, runner=runner, memory=memory, forecaster=opened, study=out / STUDY,
                        check=lambda record: _check_machine(record, settings),
                        save_best=lambda record: serialize.write_so_far(runner.final_config(record.trial), out),
                    )  # fmt: skip
                    result = search.run()
                    if isinstance(result, NothingFits):
                        _check_that_memory_decided(result, settings)
        except KeyboardInterrupt:
            raise Interrupted("stopped; every rank is gone and the journal is kept") from None
        except OSError:
            check_disk_space(out)
            raise
        earlier_s = sum(record.seconds for record in past.records.values())
        seconds = time.monotonic() - began + earlier_s
        report = _report(apply_script_config(settings, result.facts), memory, opened, result, seconds)
        serialize.write(report, out)
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The part of a fit that runs trials.

    `check` returns a trial's record, or raises EnvironmentBroken when the machine needs repair first. `save_best`
    gets the best config after each step, so that it is on disk should the fit be killed.
    """

    settings: Settings
    runner: Runner
    memory: TrialStore
    forecaster: Forecaster
    study: Path
    check: Callable[[Record], Record]
    save_best: Callable[[Record], None] = lambda record: None

    @property
    def usable_bytes(self) -> float:
        """Device memory less the headroom."""
        return usable_bytes_of(self.settings)

    def run(self) -> FitResult | NothingFits:
        """Every step of a fit, from the ladder's walk to the certificate."""
        facts, op_problems = self.runner.survey()
        check_ranks(facts, self.settings.gpus)
        if (warning := idle_stages_warning(facts, self.settings.global_batch)) is not None:
            self.memory.listen(Note(text=warning))
        forecaster = self.forecaster
        if (reason := why_not_forecast(facts)) is not None:
            forecaster = NO_FORECASTER
            if self.settings.forecast:
                self.memory.listen(Note(text=f"{reason}; rungs are tried instead"))
        context = FitContext(
            settings=apply_script_config(self.settings, facts),
            facts=facts,
            memory=self.memory,
            forecaster=forecaster,
            study=self.study,
            check=self.check,
            final_config=self.runner.final_config,
        )
        rungs = list_candidates(context.settings, facts, op_problems)

        walked = walk_ladder(rungs, context)
        if walked.winner is None:
            return NothingFits(facts=facts, walked=walked, closest=find_closest_rung(walked, context))
        self.save_best(walked.winner)
        raced = run_race(walked.winner, walked, rungs, context)  # grows the micro batch of each rung that it tries
        self.save_best(raced.best)
        tuned = tune_winner(raced, context)
        self.save_best(tuned.best)
        certified = certify_winner(tuned, raced, walked.winner, untried_rungs(rungs, walked), context)
        best = tuned.best if certified is None else certified.best
        return FitResult(
            facts=facts, walked=walked, raced=raced, tuned=tuned, certified=certified,
            ds_config=context.final_config(best.trial),
        )  # fmt: skip


def workload_notes(source: WorkloadSource) -> tuple[str, ...]:
    """Sentences that a user should read before the first trial of this workload."""
    if source.kind != "script":
        return ()
    return (
        f"{Path(source.path).name} is {KIND_DESCRIPTIONS[source.script_kind]} (--kind says otherwise); "
        "it runs unmodified, and its output files are kept out of your folders",
    )


def _start_ray_runner(settings: Settings, listen: Listener) -> AbstractContextManager[Runner]:
    from ..runner.runner import RayRunner

    hardware = read_hardware()
    if settings.device == "cuda" and settings.address is None:
        names = describe_card_names(os.environ.get("CUDA_VISIBLE_DEVICES"))
        for text in (*describe_shared_cards(hardware.cards[: settings.gpus]), *names):
            listen(Note(text=text))
    return RayRunner(settings, listen, host_bytes=hardware.host_bytes)


def _open_forecaster(
    settings: Settings, runner: Runner, memory: TrialStore, listen: Listener
) -> AbstractContextManager[Forecaster]:
    return open_forecaster(settings, runner.final_config, memory, listen)


def _check_that_memory_decided(result: NothingFits, settings: Settings) -> None:
    """Raise when no rung ran for a reason other than memory: InputError for the workload, else EnvironmentBroken."""
    walked = result.walked
    if walked.stopped is not None:
        _check_machine(walked.stopped, settings)
        assert isinstance(walked.stopped.outcome, Failed)
        raise make_input_error(walked.stopped.outcome, settings.source.path, _log_path(walked.stopped, settings))
    failures = [record.outcome for record in walked.records if isinstance(record.outcome, Failed)]
    if failures and len(failures) == len(walked.records):
        rung = walked.records[-1].trial.rung
        raise EnvironmentBroken(f"no rung could be tried: {rung}: {failures[-1].evidence}\n  {failures[-1].advice}")


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


def _report(
    settings: Settings, memory: TrialStore, forecaster: Forecaster, result: FitResult | NothingFits, seconds: float
) -> Report:
    machine = (asdict(read_hardware()), installed_versions())
    if isinstance(result, NothingFits):
        return nothing_fits_report(settings, result, memory.records, machine, seconds, forecaster.forecasts.values())
    return fit_report(settings, result, memory.records, machine, seconds, forecaster.forecasts.values())
