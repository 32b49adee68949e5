"""Find the largest micro batch of each cell with trials around its forecast."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..config.deepspeed import accumulation_for, count_replicas
from ..events import Listener
from ..journal import TrialStore, trial_key
from ..report import text
from ..report.results.probe import Capacity, CellResult
from ..tuner.batch_curve import BatchCurve
from ..tuner.trials import fits_well, run_with_retry
from ..types import Failed, OutOfMemory, Record, Run, Trial
from ..units import format_bytes
from .cell_forecasts import CapacityForecast, FactsUnder, Simulators, forecast_cells, list_micro_batches
from .grid import Cell, settings_under_conditions
from .measure import Bench, search_in_parallel, summarize_cell
from .probe_settings import ProbeSettings

MOST_TRIALS = 12  # of one cell
_NEARLY = 0.95  # of a size that does not fit: one trial there before the search halves


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The search for the largest micro batch of one cell.

    `sizes` are the micro batches there are, smallest first. `records` has one for each that was tried.
    """

    sizes: Sequence[int]
    usable_bytes: int
    records: dict[int, Record] = field(default_factory=dict)

    @property
    def fits(self) -> int | None:
        """The largest micro batch that fits."""
        return max((size for size, record in self.records.items() if fits_well(record)), default=None)

    @property
    def refused(self) -> int | None:
        """The smallest micro batch above `fits` that does not fit."""
        return min((size for size in self.records if size > (self.fits or 0)), default=None)

    @property
    def between(self) -> Sequence[int]:
        """The sizes between one that fits and one that does not."""
        return self.sizes[bisect_right(self.sizes, self.fits or 0) : bisect_left(self.sizes, self.refused or math.inf)]

    @property
    def exact(self) -> bool:
        """Whether no size is left between one that fits and one that does not."""
        return self.refused is not None and not self.between

    def next_size(self) -> int | None:
        """Return the micro batch to try next; None when the search is over.

        Downwards the neighbour comes first, because a forecast is nearly right, then ever smaller ones. Upwards the
        line through the peaks decides. With one peak, it is the size that fits even if all of it grows with the batch.
        """
        left, fits, refused, trials = self.between, self.fits, self.refused, len(self.records)
        if not left or trials >= MOST_TRIALS:
            return None
        if fits is None:
            assert refused is not None
            target = refused - 1 if trials == 1 else refused * (_NEARLY if trials == 2 else 0.5)
            return left[max(0, bisect_right(left, target) - 1)]
        curve = BatchCurve.from_records(self.records.values(), self.usable_bytes)
        full = curve.line_limit()
        if full is None or math.isinf(full):
            full = fits * self.usable_bytes / max(1, curve.peak_bytes[fits])
            full = full if full >= left[0] else math.inf
        if full < (refused or math.inf):
            return left[max(0, bisect_right(left, full) - 1)]
        return left[min(len(left), 1 << (trials - 1)) - 1] if refused is None else left[(len(left) - 1) // 2]

    def explain(self, forecast: CapacityForecast) -> str:
        """Return a sentence about the boundary and about how right the forecast was."""
        fits, refused = self.fits, self.refused
        for record in self.records.values():
            if isinstance(record.outcome, Failed):
                return text.format_outcome(record.outcome)
        if refused is None:
            return f"{fits} fits, and nothing larger is tried" if fits is not None else ""
        why = "the device's allocator runs full"
        if isinstance(outcome := self.records[refused].outcome, OutOfMemory):
            missing = outcome.missing_bytes
            why = f"{outcome.tier} lacks {format_bytes(missing)} or more" if missing else f"{outcome.tier} runs out"
        if fits is None:
            return f"not even micro batch {refused} fits: {why}"
        boundary = f"{fits} fits, {refused} does not: {why}"
        if not self.exact:
            boundary += "; between them nothing was tried"
        if forecast.largest is None:
            return boundary
        if forecast.largest == fits:
            return f"as forecast: {boundary}"
        return f"{boundary}; the forecast of {forecast.largest} was too {'low' if fits > forecast.largest else 'high'}"


def search_capacities(
    question: ProbeSettings,
    cells: Sequence[Cell],
    bench: Bench | None,
    *,
    facts: FactsUnder,
    simulators: Simulators,
    store: TrialStore,
    listen: Listener,
    run: Callable[[Trial, Bench], Record],
) -> dict[int, CellResult]:
    """Return results by the number of the cell. Without a bench they are forecasts; `run` runs a trial on a bench.

    Cells that are refused or the same as another have none.
    """
    trials = {cell.number: cell.trial for cell in cells if cell.trial is not None and cell.same_as is None}
    to_search = [cell for cell in cells if cell.number in trials]
    forecasts = forecast_cells(question, trials, facts=facts, simulators=simulators, store=store, listen=listen)
    if bench is None:
        return {cell.number: _forecast_result(cell, forecasts[cell.number]) for cell in to_search}

    def search_cell(cell: Cell, run: Run) -> CellResult:
        """Search from the forecast outwards until a size that fits is next to one that does not."""
        trial, forecast = trials[cell.number], forecasts[cell.number]
        model = facts(trial.conditions)
        settings = settings_under_conditions(question, trial.conditions, model)
        sizes = list_micro_batches(settings, model)
        boundary = Boundary(sizes=sizes, usable_bytes=settings.device_bytes)
        size: int | None = sizes[max(0, bisect_right(sizes, forecast.largest or 1) - 1)]
        while size is not None:
            knobs = replace(trial.knobs, micro_batch=size)
            if settings.global_batch is not None:
                accumulation = accumulation_for(
                    settings.global_batch, size, count_replicas(settings.base, settings.gpus, model)
                )
                knobs = replace(knobs, accumulation=accumulation)
            record = run_with_retry(replace(trial, knobs=knobs), run)[-1]
            boundary.records[size] = record
            # A failure that has nothing to do with memory shows no boundary.
            size = None if isinstance(record.outcome, Failed) else boundary.next_size()
        return _search_result(cell, boundary, forecast)

    results: dict[int, CellResult] = {}
    for cell in to_search:
        with suppress(KeyError):  # a search of which the journal has every trial needs no bench
            search_cell(cell, lambda trial: store.past.records[trial_key(trial)])
            results[cell.number] = search_cell(cell, store.run)
    left = [cell for cell in to_search if cell.number not in results]
    return results | search_in_parallel(
        left,
        lambda cell, bench: search_cell(cell, lambda trial: run(trial, bench)),
        bench,
        most=question.parallel,
        listen=listen,
    )


def _search_result(cell: Cell, boundary: Boundary, forecast: CapacityForecast) -> CellResult:
    """Return the result of trials with the forecast; speed and memory are those of the largest that fits."""
    fits, records = boundary.fits, list(boundary.records.values())
    shown = records[-1] if fits is None else boundary.records[fits]
    result = replace(
        summarize_cell(cell, [shown]),
        capacity=Capacity(
            forecast=forecast.largest,
            verified=fits,
            refused=boundary.refused,
            exact=boundary.exact,
            explanation=boundary.explain(forecast),
        ),
        trials=tuple(record.id for record in records),
        repeats=1,
        micro_batch=fits,
        accumulation=None if fits is None else shown.trial.knobs.accumulation,
    )
    if fits is None or not shown.neighbours:
        return result
    reason = "another trial ran on the same machine, so its speed is not reported"
    return replace(result, reason=reason, samples_per_second=None, tokens_per_second=None, spread=None, step_s=None)


def _forecast_result(cell: Cell, forecast: CapacityForecast) -> CellResult:
    """Return the result of a forecast without trials."""
    return CellResult(
        number=cell.number,
        values=cell.values,
        status="fit" if forecast.largest else "out_of_memory" if forecast.simulated else "failed",
        reason=forecast.reason,
        unheeded=cell.unheeded,
        micro_batch=forecast.largest,
        capacity=Capacity(forecast=forecast.largest),
    )
