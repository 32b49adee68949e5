"""Find the largest micro batch of each cell with trials around its forecast."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ..events import Listener
from ..journal import History, Journal, trial_key
from ..report import text
from ..report.results import Capacity, CellResult, CellStatus
from ..schema import read_as
from ..tuner.trials import accumulation_for, fits_well, run_with_retry
from ..types import Failed, Fit, OutOfMemory, Record, Run, Trial
from ..units import format_bytes
from .forecasts import CapacityForecast, CellForecaster, FactsUnder, Simulators, list_micro_batches
from .grid import Cell, settings_under_conditions
from .measure import Bench, search_in_parallel, summarize_cell
from .request import ProbeSettings

MOST_TRIALS = 12  # of one cell
_NEARLY = 0.95  # of a size that does not fit: one trial there before the search halves


@dataclass(slots=True)
class Boundary:
    """The search for the largest micro batch of one cell. `records` holds a record for each micro batch tried."""

    trial: Trial
    sizes: Sequence[int]
    run: Run
    ranks: int
    global_batch: int | None
    usable_bytes: int
    records: dict[int, Record] = field(default_factory=dict)

    @property
    def fits(self) -> int | None:
        """The largest micro batch that fits."""
        return max((size for size, record in self.records.items() if fits_well(record)), default=None)

    @property
    def refused(self) -> int | None:
        """The smallest micro batch above `fits` that does not fit."""
        above = self.fits or 0
        refused = (size for size, record in self.records.items() if not fits_well(record))
        return min((size for size in refused if size > above), default=None)

    def measure(self, size: int) -> Record:
        """Run a trial of this micro batch; a failure that may be a fluke is repeated once."""
        knobs = replace(self.trial.knobs, micro_batch=size)
        if self.global_batch is not None:
            knobs = replace(knobs, accumulation=accumulation_for(self.global_batch, size, self.ranks))
        record = run_with_retry(replace(self.trial, knobs=knobs), self.run)[-1]
        self.records[size] = record
        return record

    def search(self, guess: int | None) -> None:
        """Search from the guess outwards until a size that fits is next to one that does not."""
        size: int | None = self._near(guess or 1)
        while size is not None and len(self.records) < MOST_TRIALS:
            if isinstance(self.measure(size).outcome, Failed):
                return  # not for lack of memory: there is no boundary
            size = self._next()

    @property
    def exact(self) -> bool:
        """Whether no size is left between one that fits and one that does not."""
        return self.refused is not None and not self._between()

    def _near(self, guess: int) -> int:
        return self.sizes[max(0, bisect_right(self.sizes, guess) - 1)]

    def _between(self) -> Sequence[int]:
        fits, refused = self.fits, self.refused
        first = 0 if fits is None else bisect_right(self.sizes, fits)
        return self.sizes[first : len(self.sizes) if refused is None else bisect_left(self.sizes, refused)]

    def _next(self) -> int | None:
        """Return the micro batch to try next; None when the search is over.

        Downwards the neighbour comes first, because a forecast is nearly right, then ever smaller ones. Upwards the
        line through the peaks decides. With one peak, it is the size that fits even if all of it grows with the batch.
        """
        left, fits, refused = self._between(), self.fits, self.refused
        if not left:
            return None
        if fits is None:
            assert refused is not None
            trials = len(self.records)
            target = refused - 1 if trials == 1 else refused * (_NEARLY if trials == 2 else 0.5)
            return left[max(0, bisect_right(left, target) - 1)]
        full = self._extrapolate(fits)
        if full is None and (least := fits * self.usable_bytes / max(1, _peak(self.records[fits]))) >= left[0]:
            full = least
        if full is not None and (refused is None or full < refused):
            return left[max(0, bisect_right(left, full) - 1)]
        return left[min(len(left), 1 << (len(self.records) - 1)) - 1] if refused is None else left[(len(left) - 1) // 2]

    def _extrapolate(self, fits: int) -> float | None:
        """Return where the line through the two largest peaks fills the device; the peak bends upwards only."""
        before = max((size for size, record in self.records.items() if size < fits and fits_well(record)), default=None)
        if before is None:
            return None
        low, high = (_peak(self.records[size]) for size in (before, fits))
        slope = (high - low) / (fits - before)
        return None if slope <= 0 else fits + (self.usable_bytes - high) / slope


def capacity_result(cell: Cell, boundary: Boundary, forecast: CapacityForecast) -> CellResult:
    """Return the result of trials with the forecast; speed and memory are those of the largest that fits."""
    fits = boundary.fits
    shown = [boundary.records[fits]] if fits is not None else list(boundary.records.values())[-1:]
    capacity = Capacity(
        forecast=forecast.largest,
        verified=fits,
        refused=boundary.refused,
        exact=boundary.exact,
        explanation=_explain(boundary, forecast),
    )
    ids = tuple(record.id for record in boundary.records.values())
    result = summarize_cell(cell, shown)
    if any(record.neighbours for record in shown) and fits is not None:
        result = replace(
            result, reason="another trial ran on the same machine, so its speed is not reported",
            samples_per_second=None, tokens_per_second=None, spread=None, step_s=None,
        )  # fmt: skip
    return replace(
        result, capacity=capacity, trials=ids, repeats=1, micro_batch=fits,
        accumulation=shown[-1].trial.knobs.accumulation if fits is not None else None,
    )  # fmt: skip


def forecast_result(cell: Cell, forecast: CapacityForecast) -> CellResult:
    """Return the result of a forecast without trials."""
    status: CellStatus = "fit" if forecast.largest else "out_of_memory" if forecast.simulated else "failed"
    return CellResult(
        number=cell.number,
        values=cell.values,
        status=status,
        reason=forecast.reason,
        unheeded=cell.unheeded,
        micro_batch=forecast.largest,
        capacity=Capacity(forecast=forecast.largest),
    )


def _explain(boundary: Boundary, forecast: CapacityForecast) -> str:
    """Return a sentence about the boundary and about how right the forecast was."""
    fits, refused = boundary.fits, boundary.refused
    failures = [record.outcome for record in boundary.records.values() if isinstance(record.outcome, Failed)]
    if failures:
        return text.format_outcome(failures[-1])
    if fits is None:
        return f"not even micro batch {refused} fits: {_why_refused(boundary.records[refused])}" if refused else ""
    if refused is None:
        return f"{fits} fits, and nothing larger is tried"
    boundary_text = f"{fits} fits, {refused} does not: {_why_refused(boundary.records[refused])}"
    if not boundary.exact:
        boundary_text += "; between them nothing was tried"
    if forecast.largest is None:
        return boundary_text
    if forecast.largest == fits:
        return f"as forecast: {boundary_text}"
    error = "was too low" if fits > forecast.largest else "was too high"
    return f"{boundary_text}; the forecast of {forecast.largest} {error}"


def _why_refused(record: Record) -> str:
    match record.outcome:
        case OutOfMemory() as outcome:
            missing = outcome.missing_bytes
            return f"{outcome.tier} lacks {format_bytes(missing)} or more" if missing else f"{outcome.tier} runs out"
        case Fit():
            return "the device's allocator runs full"
        case Failed() as outcome:
            return text.format_outcome(outcome)


def _peak(record: Record) -> int:
    return record.outcome.device_peak_bytes if isinstance(record.outcome, Fit) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySearch:
    """Finds the largest micro batch of cells. `run` runs a trial on a bench."""

    question: ProbeSettings
    facts: FactsUnder
    journal: Journal
    past: History
    listen: Listener
    simulators: Simulators
    run: Callable[[Trial, Bench], Record]

    def search(self, cells: Sequence[Cell], bench: Bench | None) -> dict[int, CellResult]:
        """Return results by the number of the cell. Without a bench they are forecasts.

        Cells that are refused or the same as another have none.
        """
        to_search = {cell.number: cell for cell in cells if cell.trial is not None and cell.same_as is None}
        forecasts = self._forecast({number: _trial(cell) for number, cell in to_search.items()})
        if bench is None:
            return {number: forecast_result(cell, forecasts[number]) for number, cell in to_search.items()}

        def search_cell(cell: Cell, bench: Bench) -> CellResult:
            return self._search_cell(cell, forecasts[cell.number], lambda trial: self.run(trial, bench))

        known = {
            number: search_cell(cell, bench)
            for number, cell in to_search.items()
            if self._is_in_journal(cell, forecasts[number])
        }
        left = [cell for number, cell in to_search.items() if number not in known]
        return known | search_in_parallel(left, search_cell, bench, most=self.question.parallel, listen=self.listen)

    def _forecast(self, trials: Mapping[int, Trial]) -> dict[int, CapacityForecast]:
        """Return the forecast of each cell, from the journal or from the simulator."""
        before = self.past.forecasts
        known = {
            number: read_as(CapacityForecast, before[key])
            for number, trial in trials.items()
            if (key := trial_key(trial)) in before
        }
        if self.question.settings.forecast:
            forecaster = CellForecaster(
                question=self.question, facts=self.facts, listen=self.listen, simulators=self.simulators
            )

            def keep(number: int, forecast: CapacityForecast) -> None:
                self.journal.write_forecast(trials[number], asdict(forecast))

            missing = {number: trial for number, trial in trials.items() if number not in known}
            known |= forecaster.forecast(missing, keep)
        return {number: known.get(number, CapacityForecast(largest=None)) for number in trials}

    def _is_in_journal(self, cell: Cell, forecast: CapacityForecast) -> bool:
        """Return whether the journal has every trial of the search."""

        def replay(trial: Trial) -> Record:
            return self.past.records[trial_key(trial)]

        try:
            self._search_cell(cell, forecast, replay)
        except KeyError:
            return False
        return True

    def _search_cell(self, cell: Cell, forecast: CapacityForecast, run: Run) -> CellResult:
        trial = _trial(cell)
        facts = self.facts(trial.conditions)
        settings = settings_under_conditions(self.question, trial.conditions, facts)
        boundary = Boundary(
            trial=trial,
            sizes=list_micro_batches(self.question, trial, facts),
            run=run,
            ranks=facts.replicas(settings.gpus),
            global_batch=settings.global_batch,
            usable_bytes=settings.device_bytes,
        )
        boundary.search(forecast.largest)
        return capacity_result(cell, boundary, forecast)


def _trial(cell: Cell) -> Trial:
    assert cell.trial is not None
    return cell.trial
