"""Walk the ladder from the fastest rung to the leanest until one fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..config.strategies import Rung
from ..report.results import ClosestRung
from ..types import Failed, Fit, Outcome, OutOfMemory, Record, Run, Skipped, Steps, Trial, is_machines_fault
from .candidates import Candidate
from .context import FitContext
from .forecasts import NO_FORECASTER, Forecaster, lacking_bytes, why_impossible
from .trials import fits_well, run_with_retry

_MOST_FIRST_MICRO_BATCH = 8  # a model that cannot be trained with so many samples lacks something else


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkResult:
    """The records of a walk, and how it ended.

    `winner` is the first rung that fits well. If none does, it is the first one that fits although its allocator had to
    flush its cache in the steps, or None. `stopped` is a failure that every rung would share.
    """

    winner: Record | None
    records: tuple[Record, ...]
    skipped: tuple[Skipped, ...]
    stopped: Record | None
    lessons: Lessons


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """Reasons against rungs that have not run yet, from the outcomes of others.

    `host_full` lists rungs under which the host ran out of memory. `broken_ops` maps a DeepSpeed op to the error.
    """

    host_full: tuple[Rung, ...] = ()
    broken_ops: Mapping[str, str] = field(default_factory=dict)

    def add(self, rung: Rung, outcome: Outcome) -> Lessons:
        """These lessons and that of one outcome. A full device teaches nothing: a leaner rung can need more of it."""
        match outcome:
            case OutOfMemory(tier="host" | "pinned"):
                return replace(self, host_full=(*self.host_full, rung))
            case Failed(op=str(op), evidence=evidence):
                return replace(self, broken_ops={**self.broken_ops, op: evidence})
            case _:
                return self

    def reason_to_skip(self, rung: Rung, ops: tuple[str, ...]) -> str | None:
        """The reason to skip a rung that needs these ops; None when there is none."""
        for full in self.host_full:
            if (states := _states_on_host(full)) and states <= _states_on_host(rung):
                return f"it needs as much host memory as {full.name}, which ran out of it"
        return next((f"it needs {op}: {why}" for op, why in self.broken_ops.items() if op in ops), None)


def _states_on_host(rung: Rung) -> set[str]:
    return {state for state, tier in rung.places.items() if tier == "host"}


def walk_ladder(rungs: Sequence[Candidate], context: FitContext) -> WalkResult:
    """Walk this fit's ladder."""
    memory = context.memory
    return walk(rungs, memory.run, context.settings.profile.walk, memory.listen, context.forecaster)


def walk(
    candidates: Iterable[Candidate],
    run: Run,
    steps: Steps,
    on_skip: Callable[[Skipped], None] = lambda skipped: None,
    forecaster: Forecaster = NO_FORECASTER,
) -> WalkResult:
    """Try each rung at the smallest micro batch until one fits.

    A rung is skipped when its forecast cannot fit, or by `Lessons`. A full device does not skip the rungs below. They
    are ordered by speed, and a leaner rung can need more device memory (ZeRO-2 with CPU offload more than ZeRO-1).
    When no rung fits, the one whose forecast lacks least still runs, so that its verdict is measured.
    """
    rungs = tuple(candidates)
    walking = _Walk(run=run, steps=steps, on_skip=on_skip, forecaster=forecaster)
    walking.prepare_forecasts(rungs)
    impossible: list[tuple[int, Candidate]] = []
    for place, candidate in enumerate(rungs, 1):
        reason = candidate.skip or walking.lessons.reason_to_skip(candidate.rung, candidate.ops)
        forecast = forecaster.forecast(walking.first_trial(candidate)) if reason is None else None
        if forecast is not None and (reason := why_impossible(forecast)) is not None:
            impossible.append((lacking_bytes(forecast), candidate))
        if reason is not None:
            walking.skip(candidate, reason)
            continue
        forecaster.finish()  # growth starts from the time of this trial's step
        if walking.try_candidate(candidate):
            break
        walking.prepare_forecasts(rungs[place:])
    else:
        if walking.pressed is None and impossible:
            _, closest = min(impossible, key=lambda item: item[0])
            walking.unskip(closest)
            walking.try_candidate(closest)
    forecaster.finish()
    return walking.result()


@dataclass(slots=True)
class _Walk:
    """A walk under way. `pressed` fits, but its allocator had to flush. `least` is the smallest micro batch that the
    model can be trained with, as far as is known."""

    run: Run
    steps: Steps
    on_skip: Callable[[Skipped], None]
    forecaster: Forecaster
    records: list[Record] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    lessons: Lessons = field(default_factory=Lessons)
    winner: Record | None = None
    pressed: Record | None = None
    stopped: Record | None = None
    least: int = 1

    def prepare_forecasts(self, candidates: Sequence[Candidate]) -> None:
        self.forecaster.prepare(self.first_trial(candidate) for candidate in candidates if candidate.skip is None)

    def first_trial(self, candidate: Candidate) -> Trial:
        return first_trial(_with_micro_batch(candidate, self.least), self.steps)

    def try_candidate(self, candidate: Candidate) -> bool:
        """Run the rung's trials; True when that ends the walk."""
        self.records.extend(try_rung(_with_micro_batch(candidate, self.least), self.run, self.steps))
        last = self.records[-1]
        self.least = max(self.least, last.trial.knobs.micro_batch)
        if fits_well(last):
            self.winner = last
        elif _stops_walk(last):
            self.stopped = last
        elif self.pressed is None and isinstance(last.outcome, Fit):
            self.pressed = last
        self.lessons = self.lessons.add(candidate.rung, last.outcome)
        return self.winner is not None or self.stopped is not None

    def skip(self, candidate: Candidate, reason: str) -> None:
        self.skipped.append(Skipped(rung=candidate.rung.name, reason=reason))
        self.on_skip(self.skipped[-1])

    def unskip(self, candidate: Candidate) -> None:
        self.skipped = [skipped for skipped in self.skipped if skipped.rung != candidate.rung.name]

    def result(self) -> WalkResult:
        return WalkResult(
            winner=self.winner if self.stopped or self.winner else self.pressed,
            records=tuple(self.records),
            skipped=tuple(self.skipped),
            stopped=self.stopped,
            lessons=self.lessons,
        )


def _stops_walk(record: Record) -> bool:
    """Whether every rung would fail alike: the user has to repair the code, the config or the machine first."""
    match record.outcome:
        case Failed(op=str()):
            return False  # only the rungs that need this op fail
        case Failed(action="fix_code" | "fix_config"):
            return True
        case outcome:
            return is_machines_fault(outcome)


def _with_micro_batch(candidate: Candidate, micro_batch: int) -> Candidate:
    return replace(candidate, knobs=replace(candidate.knobs, micro_batch=micro_batch))


def try_rung(candidate: Candidate, run: Run, steps: Steps) -> tuple[Record, ...]:
    """Run a rung's first trial; the last record returned has the verdict.

    Where pinned memory runs out, a second trial leaves it unpinned. Where the model cannot be trained with so small a
    micro batch, the next trial doubles it.
    """
    records = run_with_retry(first_trial(candidate, steps), run)
    match records[-1].outcome:
        case OutOfMemory(tier="pinned") if candidate.pinned:
            unpinned = {**candidate.knobs.settings, **dict.fromkeys(candidate.pinned, False)}
            pageable = replace(candidate, knobs=replace(candidate.knobs, settings=unpinned), pinned=())
            return records + run_with_retry(first_trial(pageable, steps), run)
        case Failed(wants_larger_batch=True) if candidate.knobs.micro_batch < _MOST_FIRST_MICRO_BATCH:
            return records + try_rung(_with_micro_batch(candidate, 2 * candidate.knobs.micro_batch), run, steps)
        case _:
            return records


def first_trial(candidate: Candidate, steps: Steps) -> Trial:
    """The trial that shows whether a rung fits."""
    return Trial(rung=candidate.rung.name, knobs=candidate.knobs, purpose="walk", steps=steps)


def find_closest_rung(walked: WalkResult, context: FitContext) -> ClosestRung | None:
    """The rung that lacked least device memory; None when the walk was stopped or the amount is unknown.

    Where the limit is a budget below the card's memory, a trial without it measures the amount.
    """
    if walked.stopped:
        return None
    settings = context.settings
    return closest_rung(
        walked.records,
        context.memory.run,
        settings.profile.walk,
        settings.device_bytes,
        can_unlimit=settings.device_bytes_asked,
    )


def closest_rung(
    records: Iterable[Record], run: Run, steps: Steps, limit_bytes: int, can_unlimit: bool
) -> ClosestRung | None:
    """The rung of these records that lacked least device memory; `can_unlimit` allows trials without the limit."""
    last = {record.trial.rung: record for record in records}
    lacking: list[tuple[bool, ClosestRung]] = []
    for record in last.values():
        match record.outcome:
            case OutOfMemory(tier="device") as outcome:
                runs, closest = _missing_memory(record, outcome, run, steps, limit_bytes, can_unlimit)
                if closest is not None:
                    lacking.append((runs, closest))
            case _:
                pass
    # A lower bound counts the allocation that failed, not those after it. So a rung that ran without the limit goes
    # before one that did not.
    return min(lacking, key=lambda item: (not item[0], item[1].missing_bytes))[1] if lacking else None


def _missing_memory(
    record: Record, outcome: OutOfMemory, run: Run, steps: Steps, limit_bytes: int, can_unlimit: bool
) -> tuple[bool, ClosestRung | None]:
    """Whether the rung ran without the limit, and the memory that it lacked."""
    rung, least = record.trial.rung, outcome.missing_bytes
    bound = None if least is None else ClosestRung(rung=rung, missing_bytes=least, exact=False)
    if not can_unlimit:
        return False, bound
    free = run(replace(record.trial, limited=False, purpose="shortfall", steps=steps, repeat=0))
    if not isinstance(free.outcome, Fit):
        return False, bound
    missing = free.outcome.device_peak_bytes - limit_bytes
    if missing > 0:
        return True, ClosestRung(rung=rung, missing_bytes=missing, exact=True)
    return True, bound  # its peak fits the limit: fragmentation took the rest


def untried_rungs(rungs: Sequence[Candidate], walked: WalkResult) -> tuple[Candidate, ...]:
    """The rungs that the walk neither tried nor skipped, without those that keep states on NVMe.

    NVMe rungs move their states in each step, and their op takes minutes to build: they run only where nothing else
    fits.
    """
    known = {record.trial.rung for record in walked.records} | {skipped.rung for skipped in walked.skipped}
    return tuple(
        candidate
        for candidate in rungs
        if candidate.skip is None and candidate.rung.name not in known and "nvme" not in candidate.rung.places.values()
    )
