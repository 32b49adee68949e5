"""Measure the cells of a probe in turns, and side by side where the machine has room."""

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
from ..report.results import CellResult, CellStatus
from ..tuner.comparison import estimate_ratios, relative_spread
from ..tuner.trials import PERMANENT_ACTIONS
from ..types import Failed, Fit, ModelFacts, OutOfMemory, Record, Run, Scalar, Tier, TierUse, Trial
from .grid import Cell

# How trials of a turn are ordered, to need few new zygotes.
Order = Callable[[Sequence[Trial]], Sequence[Trial]]


def measure_in_turns(
    cells: Iterable[Cell], run: Run, *, repeats: int, order: Order = list
) -> dict[int, tuple[Record, ...]]:
    """Each cell's trial in each turn, every other turn backwards: what drifts falls on all alike. Cell → its records.

    What ran out of memory, or failed of something that lasts, is not asked again.
    """
    own = {trial_key(cell.trial): cell for cell in cells if cell.trial is not None and cell.same_as is None}
    trials = [cell.trial for cell in own.values() if cell.trial is not None]
    found: dict[int, tuple[Record, ...]] = {cell.number: () for cell in own.values()}
    for turn in range(repeats):
        for trial in order(trials[::-1] if turn % 2 else trials):
            number = own[trial_key(trial)].number
            if not found[number] or _may_change(found[number][-1]):
                found[number] += (run(replace(trial, repeat=turn)),)
    return found


def compare_cells(
    results: Mapping[int, CellResult], records: Mapping[int, Sequence[Record]], *, by_tokens: bool
) -> tuple[dict[int, CellResult], int | None]:
    """The results with their ratios to the first that fits, and its number; None: none does."""
    fitting = [number for number, result in results.items() if result.status == "fit"]
    if not fitting:
        return dict(results), None
    rates = {number: _rates(records[number], by_tokens=by_tokens) for number in fitting}
    within = {number: _within(records[number]) for number in fitting}
    found = estimate_ratios(rates, fitting[0], within=within)
    return {number: replace(result, ratio=found.get(number)) for number, result in results.items()}, fitting[0]


def share_results(cells: Iterable[Cell], own: Mapping[int, CellResult]) -> tuple[CellResult, ...]:
    """Every cell's result, in order: its own, or that of the cell which is the same in effect."""
    return tuple(
        own[cell.number]
        if cell.same_as is None
        else replace(
            own[cell.same_as], number=cell.number, values=cell.values, unheeded=cell.unheeded, same_as=cell.same_as
        )
        for cell in cells
    )


def _may_change(record: Record) -> bool:
    match record.outcome:
        case Fit():
            return True
        case OutOfMemory():
            return False
        case Failed(failure=failure, action=action):
            return failure != "toolchain" and action not in PERMANENT_ACTIONS


def summarize_cell(cell: Cell, records: Sequence[Record]) -> CellResult:
    """Of one cell, as if it were alone."""
    if not records or cell.trial is None:
        return CellResult(
            number=cell.number, values=cell.values, status="refused", reason=cell.refused or "", unheeded=cell.unheeded
        )
    knobs = cell.trial.knobs
    fits = [record.outcome for record in records if isinstance(record.outcome, Fit)]
    last = next((one.outcome for one in reversed(records) if not isinstance(one.outcome, Fit)), None)
    # A failure among trials that ran may have been a fluke: it is said beside what was measured.
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
        spread=relative_spread(rates),
        repeats=len(fits),
        step_s=median([median(fit.step_s) for fit in fits]) if fits else None,
        sent_bytes=max((fit.communication.sent_bytes for fit in fits if fit.communication is not None), default=None),
        memory=_memory(fits),
        tier=last.tier if isinstance(last, OutOfMemory) else None,
        missing_bytes=last.missing_bytes if isinstance(last, OutOfMemory) else None,
        micro_batch=knobs.micro_batch,
        accumulation=knobs.accumulation,
        checkpointing=knobs.checkpointing,
        trials=tuple(record.id for record in records),
    )


def _rates(records: Sequence[Record], *, by_tokens: bool) -> dict[int, float]:
    """Turn → rate."""
    found = {}
    for record in records:
        if isinstance(fit := record.outcome, Fit):
            rate = fit.tokens_per_second if by_tokens else fit.samples_per_second
            if rate:
                found[record.trial.repeat] = rate
    return found


def _within(records: Sequence[Record]) -> float:
    """The widest spread of steps inside a trial."""
    return max((one.outcome.spread for one in records if isinstance(one.outcome, Fit)), default=0.0)


def _memory(fits: Sequence[Fit]) -> dict[Tier, TierUse]:
    """The highest peak of the repeats, on each tier."""
    most: dict[Tier, TierUse] = {}
    for fit in fits:
        for tier, use in fit.memory.items():
            if tier not in most or use.peak_bytes > most[tier].peak_bytes:
                most[tier] = use
    return most


class Bench(Protocol):
    """What a probe needs of the machine; `runner.pool.RunnerPool` is the real one."""

    def survey(self, conditions: Mapping[str, Scalar]) -> tuple[ModelFacts, Mapping[str, str]]: ...

    def run(self, trial: Trial, *, id: int) -> Record: ...

    def order(self, trials: Sequence[Trial]) -> Sequence[Trial]: ...

    def another(self, conditions: Mapping[str, Scalar]) -> AbstractContextManager[Bench]: ...

    def stop(self) -> None: ...


Search = Callable[[Cell, Bench], CellResult]


def search_in_parallel(
    cells: Sequence[Cell], search: Search, bench: Bench, *, most: int, listen: Listener
) -> dict[int, CellResult]:
    """Each cell's result, by its number; up to `most` are searched at a time.

    Fewer where a machine has no room for more. What goes wrong with one ends them all, and so does Ctrl-C.
    """
    left, found, wrong = deque(cells), dict[int, CellResult](), list[BaseException]()

    def work_off(bench: Bench) -> None:
        while not wrong and (cell := _next(left)) is not None:
            found[cell.number] = search(cell, bench)

    def beside(another: AbstractContextManager[Bench], number: int) -> None:
        opened = False
        try:
            with another as own:
                opened = True
                work_off(own)
        except BaseException as error:
            if isinstance(error, EnvironmentBroken) and not opened:
                listen(Note(text=f"no {number} trials at a time: {str(error).splitlines()[0]}"))
                return
            wrong.append(error)
            bench.stop()

    others = [(bench.another(_conditions(cell)), number) for number, cell in enumerate(cells[1:most], 2)]
    threads = [Thread(target=beside, args=other, name=f"trials {other[1]}") for other in others]
    try:
        for thread in threads:
            thread.start()
        work_off(bench)
        _join(threads)
    except BaseException as error:
        cause = wrong[0] if wrong else error  # another's end may have ended us
        if threads:
            bench.stop()
        _join(threads)
        raise cause from None
    if wrong:
        raise wrong[0]
    return found


def _next(left: deque[Cell]) -> Cell | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def _conditions(cell: Cell) -> Mapping[str, Scalar]:
    assert cell.trial is not None
    return cell.trial.conditions


def _join(threads: Sequence[Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join()
