"""`autods probe`: run the cells and report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, replace

from ..config.deepspeed import precision_name
from ..config.settings import Settings
from ..diagnosis.trial_outcome import make_input_error
from ..errors import EnvironmentBroken
from ..events import Listener
from ..forecast.simulate.protocol import SimulationFailed
from ..forecast.values import StartSimulator
from ..journal import TrialStore, keep_warnings, workspace
from ..planner.plan import make_user_error
from ..report.answers.probe import make_probe_document
from ..report.render_html import PAGE, write_page
from ..report.results.probe import CellResult, ProbeQuestion, ProbeReport
from ..report.serialize import write_probe
from ..runner.cleanup import open_session
from ..schema import read_as
from ..system.host import installed_versions
from ..tuner.trial_forecasts import start_processes
from ..tuner.trials import open_journal
from ..types import Failed, Fit, ModelFacts, Record, Scalar, Trial, is_machines_fault
from ..workload.conditions import apply_to_source
from .capacity import search_capacities
from .cell_forecasts import Simulators, source_under_conditions
from .grid import Surveyed, list_cells
from .measure import Bench, compare_cells, measure_in_turns, share_results, summarize_cell
from .probe_settings import ProbeSettings, list_notes


def compares_tokens(question: ProbeSettings) -> bool:
    """Return whether cells are compared by tokens a second, because their samples differ in length."""
    return any(axis.name in ("seq_len", "build_batch.seq_len", "target_len") for axis in question.axes)


def build_report(
    question: ProbeSettings,
    cells: tuple[CellResult, ...],
    reference: int | None,
    records: Sequence[Record],
    seconds: float,
) -> ProbeReport:
    """Build the report. `reference` is the number of the cell that the others are compared with."""
    settings = question.settings
    return ProbeReport(
        status="done" if any(cell.status == "fit" for cell in cells) else "nothing_fits",
        axes={axis.name: axis.values for axis in question.axes},
        cells=cells,
        compared=None if reference is None else (reference, "tokens" if compares_tokens(question) else "samples"),
        notes=list_notes(question),
        trials=tuple(records),
        question=ProbeQuestion(
            workload=settings.source.name,
            gpus=settings.gpus,
            nodes=settings.nodes,
            device=settings.device,
            device_bytes=settings.device_bytes,
            global_batch=settings.global_batch,
            precision="its own precision" if settings.source.form.chooses_precision else precision_name(settings.base),
            repeats=question.repeats,
            steps=question.steps,
            capacity=question.capacity,
            parallel_trials=question.parallel,
            forecast_only=question.machine is not None,
            machine=None if question.machine is None else question.machine.name,
        ),
        versions=installed_versions(),
        hardware=settings.hardware,
        seconds=seconds,
        out=str(settings.out),
    )


Start = Callable[[Settings, Listener], AbstractContextManager[Bench]]


def probe(
    question: ProbeSettings,
    *,
    listen: Listener,
    fresh: bool = False,
    start: Start | None = None,
    simulate: StartSimulator | None = None,
) -> ProbeReport:
    """Measure every cell and write the report to `settings.out`, too.

    A probe that was killed goes on where it stopped. Raises InputError when the workload or the folder is at fault,
    EnvironmentBroken when the machine is, Interrupted on Ctrl-C.
    """
    began = time.monotonic()
    with workspace(question.settings.out, fresh=fresh) as out:
        journal, past, settings = open_journal(question.settings, question.fingerprint(), listen)
        question = replace(question, settings=settings)
        listen, warnings = keep_warnings(listen, journal, past)
        benches: AbstractContextManager[Bench | None] = nullcontext(None)
        if question.machine is None:
            benches = (start or _on_ray)(settings, listen)
        try:
            session = open_session() if simulate is None else nullcontext()
            simulators = Simulators(simulate or start_processes(settings, listen))
            with session, benches as bench, closing(simulators):
                store = TrialStore(journal, past, _run_nothing if bench is None else bench.run, listen)
                cells, reference = _ProbeRun(question, store, listen, bench, simulators).run_cells()
        except SimulationFailed as failed:
            raise make_user_error(failed, settings.source, more_samples="--vary micro_batch=2") from None
        earlier_s = sum(record.seconds for record in past.records.values())
        report = build_report(question, cells, reference, store.records, time.monotonic() - began + earlier_s)
        report = replace(report, warnings=tuple(warnings))
        write_probe(report, out)
        write_page(make_probe_document(report, out), out / PAGE)
        return report


def _run_nothing(trial: Trial, *, id: int) -> Record:
    raise AssertionError(f"trial {id} of a probe that only forecasts")


class _ProbeRun:
    """A probe that is under way. Without a bench it only forecasts."""

    def __init__(
        self, question: ProbeSettings, store: TrialStore, listen: Listener, bench: Bench | None, simulators: Simulators
    ) -> None:
        self.question, self.store, self.listen = question, store, listen
        self.bench, self.simulators = bench, simulators
        self.surveys: dict[str, Surveyed] = {}  # by the digest of the workload

    def run_cells(self) -> tuple[tuple[CellResult, ...], int | None]:
        """Return every cell's result, and the number of the one that the others are compared with."""
        question, bench = self.question, self.bench
        cells, reference = list_cells(question, self.survey), None
        if question.capacity:
            results = search_capacities(
                question,
                cells,
                bench,
                facts=lambda conditions: self.survey(conditions)[0],
                simulators=self.simulators,
                store=self.store,
                listen=self.listen,
                run=self._run,
            )
        else:
            assert bench is not None
            records = measure_in_turns(cells, self._run, repeats=question.repeats, order=bench.order)
            measured = (cell for cell in cells if cell.number in records)
            results = {cell.number: summarize_cell(cell, records[cell.number]) for cell in measured}
            results, reference = compare_cells(results, records, by_tokens=compares_tokens(question))
        refused = {cell.number: summarize_cell(cell, ()) for cell in cells if cell.trial is None}
        outcomes = [record.outcome for record in self.store.records]
        at_fault = ("fix_code", "fix_config")
        faults = [each for each in outcomes if isinstance(each, Failed) and each.action in at_fault]
        if faults and len(faults) == len(outcomes):  # the user's code or config fails in every trial
            settings = question.settings
            raise make_input_error(faults[0], settings.source.path, settings.out / "logs")
        return share_results(cells, {**results, **refused}), reference

    def survey(self, conditions: Mapping[str, Scalar]) -> Surveyed:
        """Return the survey of the workload under these conditions: from the journal, or made now and kept there."""
        settings, past = self.question.settings, self.store.past.surveys
        digest = apply_to_source(settings.source, conditions).digest
        if digest not in self.surveys and digest in past:
            self.surveys[digest] = read_as(ModelFacts, past[digest]["facts"]), past[digest]["op_problems"]
        elif digest not in self.surveys:
            if self.bench is not None:
                facts, problems = self.bench.survey(conditions)
            else:
                simulator = self.simulators.get(source_under_conditions(self.question, conditions))
                facts, problems = simulator.facts(settings.device, machine=self.question.machine), {}
            self.surveys[digest] = facts, problems
            self.store.journal.write_survey(digest, {"facts": asdict(facts), "op_problems": dict(problems)})
        return self.surveys[digest]

    def _run(self, trial: Trial, bench: Bench | None = None) -> Record:
        """Run a trial. A full disk, a lost GPU or a hang of the user's code ends the probe; its trials are kept."""
        record = self.store.run(trial, None if bench is None else bench.run)
        outcome = record.outcome
        if not isinstance(outcome, Fit) and is_machines_fault(outcome):
            raise EnvironmentBroken(
                f"{outcome.evidence}\n  {outcome.advice} ({record.trial.rung}, rank {outcome.rank})"
            )
        is_hang = isinstance(outcome, Failed) and outcome.hung_at is not None and outcome.action == "fix_code"
        # Each further cell would hang for as long. Where another one ran, only this one's conditions do it.
        if is_hang and not any(isinstance(each.outcome, Fit) for each in self.store.records):
            settings = self.question.settings
            assert isinstance(outcome, Failed)
            raise make_input_error(outcome, settings.source.path, settings.out / "logs")
        return record


def _on_ray(settings: Settings, listen: Listener) -> AbstractContextManager[Bench]:
    from ..runner.pool import RunnerPool

    return RunnerPool(settings, listen)
