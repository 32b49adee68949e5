"""The largest micro batch of every cell: by the forecast, then by trials around what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ..events import Listener
from ..journal import Journal, Past, key_of
from ..report.probe_result import CellResult
from ..typed import read_as
from ..values import Record, Run, Trial
from .capacity import Boundary, capacity_result, forecast_result
from .cells import Cell, settings_of
from .forecasts import Facts, Forecasts, Foreseen, Simulators, sizes_of
from .lanes import Bench, side_by_side
from .question import Question

_NOTHING = Foreseen(largest=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """What is given and stays. run: a trial on one of the benches."""

    question: Question
    facts: Facts
    journal: Journal
    past: Past
    listen: Listener
    simulators: Simulators
    run: Callable[[Trial, Bench], Record]

    def of(self, cells: Sequence[Cell], bench: Bench | None) -> dict[int, CellResult]:
        """Cell → its result, of all that are neither refused nor the same as another. No bench: by forecast alone."""
        own = [cell for cell in cells if cell.trial is not None and cell.same_as is None]
        foreseen = self._foreseen(own)
        if bench is None:
            return {cell.number: forecast_result(cell, foreseen[cell.number]) for cell in own}

        def search(cell: Cell, bench: Bench) -> CellResult:
            return self._searched(cell, foreseen[cell.number], lambda trial: self.run(trial, bench))

        settled = {cell.number: search(cell, bench) for cell in own if self._is_settled(cell, foreseen[cell.number])}
        left = [cell for cell in own if cell.number not in settled]
        return settled | side_by_side(left, search, bench, most=self.question.parallel, listen=self.listen)

    def _foreseen(self, own: Sequence[Cell]) -> dict[int, Foreseen]:
        """What an earlier run of the probe has forecast is not simulated again."""
        keys = {cell.number: key_of(cell.trial) for cell in own if cell.trial is not None}
        before = self.past.forecasts
        known = {number: read_as(Foreseen, before[key]) for number, key in keys.items() if key in before}
        if self.question.settings.forecast:
            forecasts = Forecasts(
                question=self.question, facts=self.facts, listen=self.listen, simulators=self.simulators
            )
            known = forecasts.of(own, known, self._keep)
        return {number: known.get(number, _NOTHING) for number in keys}

    def _keep(self, cell: Cell, foreseen: Foreseen) -> None:
        assert cell.trial is not None
        self.journal.foreseen(cell.trial, asdict(foreseen))

    def _is_settled(self, cell: Cell, foreseen: Foreseen) -> bool:
        """Whether the journal answers all that the search asks: no machine is needed."""

        def answer(trial: Trial) -> Record:
            return self.past.records[key_of(trial)]

        try:
            self._searched(cell, foreseen, answer)
        except KeyError:
            return False
        return True

    def _searched(self, cell: Cell, foreseen: Foreseen, run: Run) -> CellResult:
        """Trials around the forecast."""
        assert cell.trial is not None
        facts = self.facts(cell.trial.conditions)
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
