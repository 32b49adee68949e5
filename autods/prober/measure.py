"""Measure the cells of a probe in turns, or search several at a time where the machine has room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median
from threading import Thread
from typing import Protocol

from ..errors import EnvironmentBroken
from ..events import Listener, Note
from ..journal import trial_key
from ..report import text
from ..report.results.measured import join_memory
from ..report.results.probe import CellResult, CellStatus
from ..tuner.comparison import PRIOR_NOISE, TurnModel, largest_spread, relative_deviation
from ..tuner.trials import PERMANENT_ACTIONS
from ..types import Failed, Fit, ModelFacts, Outcome, OutOfMemory, Record, Run, Scalar, Trial
from .grid import Cell

# Orders the trials of a turn so that few new zygotes are needed.
Order = Callable[[Sequence[Trial]], Sequence[Trial]]


def measure_in_turns(
    cells: Iterable[Cell], run: Run, *, repeats: int, order: Order = list
) -> dict[int, tuple[Record, ...]]:
    """Run each cell's trial once a turn, and return the records of each cell by its number.

    Every other turn runs backwards, so that drift falls on all cells alike. A cell that ran out of memory or has a
    lasting failure is not repeated.
    """
    cell_of = {trial_key(cell.trial): cell for cell in cells if cell.trial is not None and cell.same_as is None}
    trials = [cell.trial for cell in cell_of.values() if cell.trial is not None]
    records: dict[int, tuple[Record, ...]] = {cell.number: () for cell in cell_of.values()}
    for turn in range(repeats):
        for trial in order(trials[::-1] if turn % 2 else trials):
            number = cell_of[trial_key(trial)].number
            if not records[number] or _may_change(records[number][-1].outcome):
                records[number] += (run(replace(trial, repeat=turn)),)
    return records


def _may_change(outcome: Outcome) -> bool:
    if isinstance(outcome, Failed):
        return outcome.failure != "toolchain" and outcome.action not in PERMANENT_ACTIONS
    return isinstance(outcome, Fit)


def compare_cells(
    results: Mapping[int, CellResult], records: Mapping[int, Sequence[Record]], *, by_tokens: bool
) -> tuple[dict[int, CellResult], int | None]:
    """Return the results with their ratios to the first cell that fits, and its number; None where none fits."""
    fitting = [number for number, result in results.items() if result.status == "fit"]
    if not fitting:
        return dict(results), None
    rates: dict[int, dict[int, float]] = {number: {} for number in fitting}  # by cell and turn
    for number in fitting:
        for record in records[number]:
            fit = record.outcome
            rate = (fit.tokens_per_second if by_tokens else fit.samples_per_second) if isinstance(fit, Fit) else None
            if rate:
                rates[number][record.trial.repeat] = rate
    spread = largest_spread(record for number in fitting for record in records[number])
    model, reference = TurnModel.from_rates(rates, max(PRIOR_NOISE, spread)), fitting[0]
    ratios = {number: model.ratio(number, reference) for number in fitting if number != reference}
    return {number: replace(result, ratio=ratios.get(number)) for number, result in results.items()}, reference


def share_results(cells: Iterable[Cell], results: Mapping[int, CellResult]) -> tuple[CellResult, ...]:
    """Return a result for every cell in order. A cell gets the result of another one that is the same in effect."""
    return tuple(
        results[cell.number]
        if cell.same_as is None
        else replace(
            results[cell.same_as], number=cell.number, values=cell.values, unheeded=cell.unheeded, same_as=cell.same_as
        )
        for cell in cells
    )


def summarize_cell(cell: Cell, records: Sequence[Record]) -> CellResult:
    """Return the result of one cell, without ratios to others."""
    if not records or cell.trial is None:
        return CellResult(
            number=cell.number, values=cell.values, status="refused", reason=cell.refused or "", unheeded=cell.unheeded
        )
    knobs = cell.trial.knobs
    fits = [record.outcome for record in records if isinstance(record.outcome, Fit)]
    last = next((record.outcome for record in reversed(records) if not isinstance(record.outcome, Fit)), None)
    # A failure among trials that ran may have been a fluke: it is reported with the measurements.
    status: CellStatus = "fit" if last is None or (fits and isinstance(last, Failed)) else last.kind
    tokens = [fit.tokens_per_second for fit in fits if fit.tokens_per_second is not None]
    rates = [fit.samples_per_second for fit in fits]
    return CellResult(
        number=cell.number,
        values=cell.values,
        status=status,
        reason=text.format_outcome(last) if last is not None else "",
        unheeded=cell.unheeded,
        samples_per_second=median(rates) if rates else None,
        tokens_per_second=median(tokens) if tokens else None,
        spread=relative_deviation(rates),
        repeats=len(fits),
        step_s=median([median(fit.step_s) for fit in fits]) if fits else None,
        sent_bytes=max((fit.communication.sent_bytes for fit in fits if fit.communication is not None), default=None),
        memory=join_memory(fits),
        tier=last.tier if isinstance(last, OutOfMemory) else None,
        missing_bytes=last.missing_bytes if isinstance(last, OutOfMemory) else None,
        micro_batch=knobs.micro_batch,
        accumulation=knobs.accumulation,
        checkpointing=knobs.checkpointing,
        trials=tuple(record.id for record in records),
    )


class Bench(Protocol):
    """Runs trials for a probe; `runner.pool.RunnerPool` is the real one."""

    def survey(self, conditions: Mapping[str, Scalar]) -> tuple[ModelFacts, Mapping[str, str]]: ...

    def run(self, trial: Trial, *, id: int) -> Record: ...

    def order(self, trials: Sequence[Trial]) -> Sequence[Trial]: ...

    def another(self, conditions: Mapping[str, Scalar]) -> AbstractContextManager[Bench]: ...

    def stop(self) -> None: ...


Search = Callable[[Cell, Bench], CellResult]


def search_in_parallel(
    cells: Sequence[Cell], search: Search, bench: Bench, *, most: int, listen: Listener
) -> dict[int, CellResult]:
    """Search up to `most` cells at a time and return their results by number.

    A machine without room for so many searches fewer. An error in one search ends them all, and so does Ctrl-C.
    """
    left, results, errors = deque(cells), dict[int, CellResult](), list[BaseException]()

    def search_rest(bench: Bench) -> None:
        while not errors:
            try:
                cell = left.popleft()
            except IndexError:
                return
            results[cell.number] = search(cell, bench)

    def search_on_another(another: AbstractContextManager[Bench], number: int) -> None:
        is_open = False
        try:
            with another as other_bench:
                is_open = True
                search_rest(other_bench)
        except BaseException as error:
            if isinstance(error, EnvironmentBroken) and not is_open:
                listen(Note(text=f"no {number} trials at a time: {str(error).splitlines()[0]}"))
                return
            errors.append(error)
            bench.stop()

    threads = [
        Thread(target=search_on_another, args=(bench.another(cell.conditions), number), name=f"trials {number}")
        for number, cell in enumerate(cells[1:most], 2)
    ]
    try:
        for thread in threads:
            thread.start()
        search_rest(bench)
        for thread in threads:
            thread.join()
    except BaseException as error:
        errors.append(error)  # that of another search may have ended this one, and comes first
        if threads:
            bench.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0] from None
    return results
