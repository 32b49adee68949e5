"""The largest micro batch of each cell."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from ..events import Listener
from ..journal import History, Journal, trial_key
from ..report import text
from ..report.results import Capacity, CellResult, CellStatus
from ..schema import read_as
from ..tuner.trials import accumulation_for, fits_well, run_with_retry
from ..types import Failed, Fit, OutOfMemory, Record, Run, Trial
from ..units import format_bytes
from .forecasts import NOT_SIMULATED, Facts, Forecasts, Foreseen, Simulators, sizes_of
from .grid import Cell, settings_of
from .measure import Bench, result_of, side_by_side
from .request import Question

MOST_TRIALS = 12  # of one cell
_NEARLY = 0.95  # how far down a forecast that promised too much is followed, before it is called wrong


@dataclass(slots=True)
class Boundary:
    """The search on one cell. seen: micro batch → its record."""

    trial: Trial
    sizes: Sequence[int]
    run: Run
    ranks: int
    global_batch: int | None
    usable_bytes: int
    seen: dict[int, Record] = field(default_factory=dict)

    @property
    def fits(self) -> int | None:
        """The largest that fits."""
        return max((size for size, record in self.seen.items() if fits_well(record)), default=None)

    @property
    def refused(self) -> int | None:
        """The smallest above it that does not."""
        above = self.fits or 0
        return min((size for size, record in self.seen.items() if size > above and not fits_well(record)), default=None)

    def measure(self, size: int) -> Record:
        """A trial of this micro batch; a failure that may be a fluke is asked once more."""
        knobs = replace(self.trial.knobs, micro_batch=size)
        if self.global_batch is not None:
            knobs = replace(knobs, accumulation=accumulation_for(self.global_batch, size, self.ranks))
        record = run_with_retry(replace(self.trial, knobs=knobs), self.run)[-1]
        self.seen[size] = record
        return record

    def search(self, guess: int | None) -> None:
        """From the guess outwards, until a fitting size stands beside one that does not."""
        size: int | None = self._near(guess or 1)
        while size is not None and len(self.seen) < MOST_TRIALS:
            if isinstance(self.measure(size).outcome, Failed):
                return  # not of memory: there is no boundary to be found
            size = self._next()

    @property
    def exact(self) -> bool:
        """Nothing is left between what fits and what does not."""
        return self.refused is not None and not self._between()

    def _near(self, guess: int) -> int:
        return self.sizes[max(0, bisect_right(self.sizes, guess) - 1)]

    def _between(self) -> Sequence[int]:
        fits, refused = self.fits, self.refused
        first = 0 if fits is None else bisect_right(self.sizes, fits)
        return self.sizes[first : len(self.sizes) if refused is None else bisect_left(self.sizes, refused)]

    def _next(self) -> int | None:
        """Downwards the neighbour first, for a forecast is nearly right, then ever farther. Upwards by the line of the
        peaks; with one peak alone, to where it would fit even if all of it grew with the batch."""
        left, fits, refused = self._between(), self.fits, self.refused
        if not left:
            return None
        if fits is None:
            assert refused is not None
            tried = len(self.seen)
            far = refused - 1 if tried == 1 else refused * (_NEARLY if tried == 2 else 0.5)
            return left[max(0, bisect_right(left, far) - 1)]
        line = self._by_the_line(fits)
        if line is None and (surely := fits * self.usable_bytes / max(1, _peak(self.seen[fits]))) >= left[0]:
            line = surely
        if line is not None and (refused is None or line < refused):
            return left[max(0, bisect_right(left, line) - 1)]
        return left[min(len(left), 1 << (len(self.seen) - 1)) - 1] if refused is None else left[(len(left) - 1) // 2]

    def _by_the_line(self, fits: int) -> float | None:
        """Where the line through the two largest peaks fills the device; the peak only bends upwards."""
        before = max((size for size, record in self.seen.items() if size < fits and fits_well(record)), default=None)
        if before is None:
            return None
        low, high = (_peak(self.seen[size]) for size in (before, fits))
        slope = (high - low) / (fits - before)
        return None if slope <= 0 else fits + (self.usable_bytes - high) / slope


def capacity_result(cell: Cell, boundary: Boundary, foreseen: Foreseen) -> CellResult:
    """What the trials showed beside what was forecast; speed and memory are those of the largest that fits."""
    fits = boundary.fits
    shown = [boundary.seen[fits]] if fits is not None else list(boundary.seen.values())[-1:]
    capacity = Capacity(
        forecast=foreseen.largest,
        verified=fits,
        refused=boundary.refused,
        exact=boundary.exact,
        said=_said(boundary, foreseen),
    )
    ids = tuple(record.id for record in boundary.seen.values())
    result = result_of(cell, shown)
    if any(record.beside for record in shown) and fits is not None:
        result = replace(
            result, reason="another trial ran on the same machine, so no speed is told",
            samples_per_second=None, tokens_per_second=None, spread=None, step_s=None,
        )  # fmt: skip
    return replace(
        result, capacity=capacity, trials=ids, repeats=1, micro_batch=fits,
        accumulation=shown[-1].trial.knobs.accumulation if fits is not None else None,
    )  # fmt: skip


def forecast_result(cell: Cell, foreseen: Foreseen) -> CellResult:
    """What the forecast alone says."""
    simulated = not foreseen.reason.startswith(NOT_SIMULATED)
    status: CellStatus = "fit" if foreseen.largest else "out_of_memory" if simulated else "failed"
    return CellResult(
        number=cell.number,
        values=cell.values,
        status=status,
        reason=foreseen.reason,
        unheeded=cell.unheeded,
        micro_batch=foreseen.largest,
        capacity=Capacity(forecast=foreseen.largest),
    )


def _said(boundary: Boundary, foreseen: Foreseen) -> str:
    fits, refused, said = boundary.fits, boundary.refused, foreseen.largest
    failed = [one.outcome for one in boundary.seen.values() if isinstance(one.outcome, Failed)]
    if failed:
        return text.format_outcome(failed[-1])
    if fits is None:
        return f"not even micro batch {refused} fits: {_why(boundary.seen[refused])}" if refused else ""
    if refused is None:
        return f"{fits} fits, and nothing larger is tried"
    beyond = f"{refused} does not: {_why(boundary.seen[refused])}"
    proven = f"{fits} fits, {beyond}" if boundary.exact else f"{fits} fits, {beyond}; between them nothing was tried"
    if said is None:
        return proven
    if said == fits:
        return f"as forecast: {proven}"
    return f"{proven}; the forecast of {said} {'was too careful' if fits > said else 'promised too much'}"


def _why(record: Record) -> str:
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


_NOTHING = Foreseen(largest=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """What is given and stays. run: a trial on one of the benches."""

    question: Question
    facts: Facts
    journal: Journal
    past: History
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
        keys = {cell.number: trial_key(cell.trial) for cell in own if cell.trial is not None}
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
            return self.past.records[trial_key(trial)]

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
