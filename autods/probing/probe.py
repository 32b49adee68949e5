"""The use case: the folder, the journal and the machines around an experiment or a capacity question, and its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict

from ..checks import precision_of
from ..errors import AutodsError, EnvironmentBroken, InputError, Interrupted
from ..events import Listener, Note
from ..failures import input_error
from ..forecast.protocol import Start as StartSimulator
from ..forecast.simulator import SimulationFailed
from ..hardware import look, versions
from ..journal import Journal, Past, key_of
from ..outcomes import Failed, Fit, is_machines_fault
from ..report.probe_files import write
from ..report.probe_result import CellResult, ProbeReport
from ..resume import JOURNAL, Memory, check_room, workspace
from ..settings import Settings
from ..typed import read_as
from ..values import ModelFacts, Record, Run, Scalar, Trial
from ..workload.conditions import source_under
from .capacity import Boundary, capacity_result, forecast_result
from .cells import Cell, cells_of, environments_of, settings_of
from .forecasts import Forecasts, Foreseen, Simulators, sizes_of, to_look_at
from .lanes import Bench, side_by_side
from .measure import compared, in_turns, result_of, shared
from .notes import notes_of
from .question import Question

Surveyed = tuple[ModelFacts, Mapping[str, str]]

Start = Callable[[Settings, Listener, int], AbstractContextManager[Bench]]


def probe(
    question: Question,
    *,
    listen: Listener,
    fresh: bool = False,
    start: Start | None = None,
    simulate: StartSimulator | None = None,
) -> ProbeReport:
    """Measure every cell of the question; written into `settings.out` as well.

    A probe that was killed goes on where it stopped. Raises InputError when the workload or the folder is at fault,
    EnvironmentBroken when the machine is, Interrupted on Ctrl-C.
    """
    out, began = question.settings.out, time.monotonic()
    with workspace(out, fresh=fresh):
        journal = Journal(out / JOURNAL)
        past = journal.open(fingerprint=question.fingerprint())
        if past.records:
            listen(Note(text=f"resuming: {len(past.records)} finished trials are not run again"))
        environments = environments_of(question)
        machines: AbstractContextManager[Bench | None] = nullcontext(None)
        if not question.forecast_only:
            machines = (start or _on_ray)(question.settings, listen, environments)
        try:
            with machines as bench:
                work = _Work(question, journal, past, listen, bench, simulate)
                with closing(work.simulators):
                    cells, reference = work.done()
        except KeyboardInterrupt:
            raise Interrupted("stopped; every rank is gone and the journal is kept") from None
        except SimulationFailed as failed:
            raise _told(failed, question) from None
        except OSError:
            check_room(out)
            raise
        earlier_s = sum(record.seconds for record in past.records.values())
        report = _report(question, cells, reference, work.memory.records, time.monotonic() - began + earlier_s)
        write(report, out)
        return report


class _Work:
    """One probe under way."""

    def __init__(
        self,
        question: Question,
        journal: Journal,
        past: Past,
        listen: Listener,
        bench: Bench | None,
        simulate: StartSimulator | None,
    ) -> None:
        self.question, self.journal, self.past, self.listen, self.bench = question, journal, past, listen, bench
        self.surveys: dict[str, Surveyed] = {}
        self.simulators = Simulators(question.settings.device, simulate)
        self.memory = Memory(journal, past, self._execute, listen)

    def done(self) -> tuple[tuple[CellResult, ...], int | None]:
        """Every cell, and the number of the one that the others are compared with."""
        cells = cells_of(self.question, self.survey)
        own, reference = self._capacities(cells) if self.question.capacity else self._measured(cells)
        refused = {cell.number: result_of(cell, ()) for cell in cells if cell.trial is None}
        _check_workload(self.memory.records, self.question)
        return shared(cells, {**own, **refused}), reference

    def survey(self, conditions: Mapping[str, Scalar]) -> Surveyed:
        """What the workload is with these arguments; asked once of each, over all runs of the probe."""
        digest = source_under(self.question.settings.source, conditions).digest
        if digest not in self.surveys:
            known = self.past.surveys.get(digest)
            if known is not None:
                self.surveys[digest] = read_as(ModelFacts, known["facts"]), known["op_problems"]
            else:
                facts, problems = self.surveys[digest] = self._survey(conditions)
                self.journal.surveyed(digest, {"facts": asdict(facts), "op_problems": dict(problems)})
        return self.surveys[digest]

    def _survey(self, conditions: Mapping[str, Scalar]) -> Surveyed:
        if self.bench is not None:
            return self.bench.survey(conditions)
        return self.simulators.facts(to_look_at(self.question, conditions)), {}

    def _execute(self, trial: Trial, id: int) -> Record:
        assert self.bench is not None
        return self.bench.run(trial, id=id)

    def _run(self, trial: Trial, bench: Bench | None = None) -> Record:
        """A full disk or a lost GPU ends the probe; what is measured by then is kept."""
        record = self.memory.run(trial, None if bench is None else lambda trial, id: bench.run(trial, id=id))
        outcome = record.outcome
        if not isinstance(outcome, Fit) and is_machines_fault(outcome):
            raise EnvironmentBroken(
                f"{outcome.evidence}\n  {outcome.advice} ({record.trial.rung}, rank {outcome.rank})"
            )
        return record

    def _measured(self, cells: Sequence[Cell]) -> tuple[dict[int, CellResult], int | None]:
        assert self.bench is not None
        found = in_turns(cells, self._run, repeats=self.question.repeats, order=self.bench.order)
        own = {cell.number: result_of(cell, found[cell.number]) for cell in cells if cell.number in found}
        return compared(own, found, by_tokens=by_tokens(self.question))

    def _capacities(self, cells: Sequence[Cell]) -> tuple[dict[int, CellResult], None]:
        """By the forecast, then by trials around what it says."""
        own = [cell for cell in cells if cell.trial is not None and cell.same_as is None]
        keys = {cell.number: key_of(cell.trial) for cell in own if cell.trial is not None}
        known = {
            number: read_as(Foreseen, self.past.forecasts[key])
            for number, key in keys.items()
            if key in self.past.forecasts
        }
        if self.question.settings.forecast:
            forecasts = Forecasts(
                question=self.question,
                facts=lambda said: self.survey(said)[0],
                listen=self.listen,
                simulators=self.simulators,
            )
            known = forecasts.of(own, known, self._keep)
        nothing = Foreseen(largest=None)
        foreseen = {cell.number: known.get(cell.number, nothing) for cell in own}
        if self.bench is None:
            return {cell.number: forecast_result(cell, foreseen[cell.number]) for cell in own}, None

        def search(cell: Cell, bench: Bench) -> CellResult:
            return self._capacity(cell, foreseen[cell.number], lambda trial: self._run(trial, bench))

        settled = {cell.number: search(cell, self.bench) for cell in own if self._is_settled(cell, foreseen)}
        left = [cell for cell in own if cell.number not in settled]
        found = side_by_side(left, search, self.bench, most=self.question.parallel, listen=self.listen)
        return settled | found, None

    def _is_settled(self, cell: Cell, known: Mapping[int, Foreseen]) -> bool:
        """Whether the journal answers all that the search asks: no machine is needed."""

        def answer(trial: Trial) -> Record:
            return self.past.records[key_of(trial)]

        try:
            self._capacity(cell, known[cell.number], answer)
        except KeyError:
            return False
        return True

    def _keep(self, cell: Cell, foreseen: Foreseen) -> None:
        assert cell.trial is not None
        self.journal.foreseen(cell.trial, asdict(foreseen))

    def _capacity(self, cell: Cell, foreseen: Foreseen, run: Run) -> CellResult:
        """Trials around the forecast."""
        assert cell.trial is not None
        facts = self.survey(cell.trial.conditions)[0]
        settings = settings_of(self.question, cell.trial.conditions, facts)
        boundary = Boundary(
            trial=cell.trial,
            sizes=sizes_of(self.question, cell.trial, facts),
            run=run,
            ranks=facts.replicas(settings.gpus),
            global_batch=settings.global_batch,
            usable_bytes=settings.device_bytes,
        )
        boundary.search(foreseen.largest)
        return capacity_result(cell, boundary, foreseen)


def _check_workload(records: Sequence[Record], question: Question) -> None:
    """What fails of the user's own code in every cell is not a matter of cells."""
    outcomes = [record.outcome for record in records]
    wrong = [one for one in outcomes if isinstance(one, Failed) and one.action in ("fix_code", "fix_config")]
    if wrong and len(wrong) == len(outcomes):
        raise input_error(wrong[0], question.settings.source.path, question.settings.out / "logs")


def _told(failed: SimulationFailed, question: Question) -> AutodsError:
    """Whose it is to mend: the machine's, else the workload's."""
    if failed.kind in ("no_compiler", "build_failed", "crashed"):
        return EnvironmentBroken(str(failed))
    return InputError(failed.what, where=failed.where or question.settings.source.path, mend=failed.mend)


def by_tokens(question: Question) -> bool:
    """Where samples differ in length, tokens a second is what can be compared."""
    return any(axis.name in ("seq_len", "build_batch.seq_len", "target_len") for axis in question.axes)


def _report(
    question: Question, cells: tuple[CellResult, ...], reference: int | None, records: Sequence[Record], seconds: float
) -> ProbeReport:
    settings = question.settings
    return ProbeReport(
        status="done" if any(cell.status == "fit" for cell in cells) else "nothing_fits",
        axes={axis.name: axis.values for axis in question.axes},
        cells=cells,
        compared=None if reference is None else (reference, "tokens" if by_tokens(question) else "samples"),
        notes=notes_of(question),
        trials=tuple(records),
        question={
            "workload": settings.source.name,
            "gpus": settings.gpus,
            "nodes": settings.nodes,
            "device": settings.device,
            "device_bytes": settings.device_bytes,
            "global_batch": settings.global_batch,
            "precision": "its own precision" if settings.source.kind == "script" else precision_of(settings.base),
            "repeats": question.repeats,
            "steps": asdict(question.steps),
            "capacity": question.capacity,
            "parallel_trials": question.parallel,
            "forecast_only": question.forecast_only,
            "machine": None if question.machine is None else question.machine.name,
        },
        versions=versions(),
        hardware=asdict(look()),
        seconds=seconds,
        out=str(settings.out),
    )


def _on_ray(settings: Settings, listen: Listener, environments: int) -> AbstractContextManager[Bench]:
    from ..cluster.pool import RunnerPool

    return RunnerPool(settings, listen, host_bytes=look().host_bytes, environments=environments)
