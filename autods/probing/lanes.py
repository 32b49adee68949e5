"""Cells that are searched side by side: the caller's thread works on the first bench, others on what is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Thread
from typing import Protocol

from ..errors import EnvironmentBroken
from ..events import Listener, Note
from ..report.probe_result import CellResult
from ..values import ModelFacts, Record, Scalar, Trial
from .cells import Cell


class Bench(Protocol):
    """What a probe needs of the machine; `cluster.pool.RunnerPool` is the real one."""

    def survey(self, conditions: Mapping[str, Scalar]) -> tuple[ModelFacts, Mapping[str, str]]: ...

    def run(self, trial: Trial, *, id: int) -> Record: ...

    def order(self, trials: Sequence[Trial]) -> Sequence[Trial]: ...

    def another(self, conditions: Mapping[str, Scalar]) -> AbstractContextManager[Bench]: ...

    def stop(self) -> None: ...


Search = Callable[[Cell, Bench], CellResult]


def side_by_side(
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
