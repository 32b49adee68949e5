"""Walk the ladder from fastest to leanest until a rung fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..config.strategies import Rung
from ..types import Failed, Fit, Outcome, OutOfMemory, Record, Run, Skipped, Steps, Trial, is_machines_fault
from .candidates import Candidate
from .context import Means
from .forecasts import BLIND, Foresight, lacking_bytes, why_impossible
from .trials import asked, fits_well


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What the walk has learned so far.

    host_full: rungs under which the host ran out of memory. broken_ops: DeepSpeed op → why it cannot be had.
    """

    host_full: tuple[Rung, ...] = ()
    broken_ops: Mapping[str, str] = field(default_factory=dict)

    def after(self, rung: Rung, outcome: Outcome) -> Lessons:
        """With what this rung's outcome adds. A full device adds nothing: a lower rung can need more of it, or less."""
        match outcome:
            case OutOfMemory(tier="host" | "pinned"):
                return replace(self, host_full=(*self.host_full, rung))
            case Failed(op=str(op), evidence=evidence):
                return replace(self, broken_ops={**self.broken_ops, op: evidence})
            case _:
                return self

    def against(self, rung: Rung, ops: tuple[str, ...]) -> str | None:
        """Why this rung, which needs these ops, is not tried; None when nothing speaks against it."""
        for full in self.host_full:
            if (held := _on_host(full)) and held <= _on_host(rung):
                return f"it needs as much host memory as {full.name}, which ran out of it"
        return next((f"it needs {op}: {why}" for op, why in self.broken_ops.items() if op in ops), None)


def _on_host(rung: Rung) -> set[str]:
    return {state for state, tier in rung.places.items() if tier == "host"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What the walk found: `winner` fits; `stopped` is a failure that every rung would share; `lessons` hold on.

    The winner is the first rung that fits well; where none does, the first that fits although its allocator had to
    flush and try again in the steps.
    """

    winner: Record | None
    records: tuple[Record, ...]
    skipped: tuple[Skipped, ...]
    stopped: Record | None
    lessons: Lessons = field(default_factory=Lessons)


def walk(
    candidates: Iterable[Candidate],
    run: Run,
    steps: Steps,
    on_skip: Callable[[Skipped], None] = lambda skipped: None,
    foresight: Foresight = BLIND,
) -> Walked:
    """Try each rung until one fits. A rung is never passed over because another ran out: the ladder is a ranking by
    speed, and a lower rung can need more device memory than a higher one (2 + CPU offload against ZeRO-1, say).
    What is full on the host, or broken, is another matter: see `lessons`. Nor is a rung tried that cannot fit by its
    own forecast; but where nothing fits, the one that lacks least is tried all the same: that is then seen, not said.
    """
    rungs = tuple(candidates)
    _prepare(rungs, steps, foresight)
    walked = _walked(rungs, _Walking(run=run, steps=steps, on_skip=on_skip), foresight)
    foresight.settle()
    return walked


def _prepare(candidates: Sequence[Candidate], steps: Steps, foresight: Foresight) -> None:
    foresight.prepare(first_trial(candidate, steps) for candidate in candidates if candidate.skip is None)


def _walked(candidates: Sequence[Candidate], walking: _Walking, foresight: Foresight) -> Walked:
    impossible: list[tuple[int, Candidate]] = []
    for place, candidate in enumerate(candidates, 1):
        reason = candidate.skip or walking.lessons.against(candidate.rung, candidate.ops)
        first = first_trial(_from(candidate, walking.least), walking.steps)
        forecast = foresight.forecast(first) if reason is None else None
        if forecast is not None and (why := why_impossible(forecast)) is not None:
            impossible.append((lacking_bytes(forecast), candidate))
            reason = why
        if reason is not None:
            walking.skip(candidate, reason)
            continue
        foresight.settle()  # how fast its steps are decides how growing begins
        if walking.ends_with(candidate):
            return walking.walked()
        _prepare([_from(one, walking.least) for one in candidates[place:]], walking.steps, foresight)
    if walking.pressed is None and impossible:
        _, closest = min(impossible, key=lambda item: item[0])
        walking.unskip(closest)
        walking.ends_with(closest)
    return walking.walked()


@dataclass(slots=True)
class _Walking:
    """A walk under way."""

    run: Run
    steps: Steps
    on_skip: Callable[[Skipped], None]
    records: list[Record] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    lessons: Lessons = field(default_factory=Lessons)
    winner: Record | None = None
    pressed: Record | None = None
    stopped: Record | None = None
    least: int = 1  # micro batch: smaller ones cannot be trained

    def ends_with(self, candidate: Candidate) -> bool:
        """Try the rung; whether that ends the walk."""
        candidate = _from(candidate, self.least)
        self.records.extend(tried(candidate, self.run, self.steps))
        last = self.records[-1]
        self.least = max(self.least, last.trial.knobs.micro_batch)
        if fits_well(last):
            self.winner = last
        elif _stops_all(last):
            self.stopped = last
        elif self.pressed is None and isinstance(last.outcome, Fit):
            self.pressed = last
        self.lessons = self.lessons.after(candidate.rung, last.outcome)
        return self.winner is not None or self.stopped is not None

    def skip(self, candidate: Candidate, reason: str) -> None:
        self.skipped.append(Skipped(rung=candidate.rung.name, reason=reason))
        self.on_skip(self.skipped[-1])

    def unskip(self, candidate: Candidate) -> None:
        self.skipped = [skipped for skipped in self.skipped if skipped.rung != candidate.rung.name]

    def walked(self) -> Walked:
        winner = self.winner if self.stopped or self.winner else self.pressed
        return Walked(
            winner=winner,
            records=tuple(self.records),
            skipped=tuple(self.skipped),
            stopped=self.stopped,
            lessons=self.lessons,
        )


def _stops_all(record: Record) -> bool:
    """Whether every rung would fail of the same: the code, the config or the machine has to be mended first."""
    match record.outcome:
        case Failed(op=str()):
            return False  # only the rungs that need this op
        case Failed(action="fix_code" | "fix_config"):
            return True
        case outcome:
            return is_machines_fault(outcome)


_LARGEST_BEGINNING = 8  # micro batch: what cannot be trained with so many samples lacks something else


def _from(candidate: Candidate, micro_batch: int) -> Candidate:
    return replace(candidate, knobs=replace(candidate.knobs, micro_batch=micro_batch))


def tried(candidate: Candidate, run: Run, steps: Steps) -> tuple[Record, ...]:
    """The records of one rung, the last one decides. Where pinned memory runs out, it is tried unpinned; where the
    model cannot be trained with so small a micro batch, with twice as large a one."""
    answers = asked(first_trial(candidate, steps), run)
    match answers[-1].outcome:
        case OutOfMemory(tier="pinned") if candidate.pinned:
            unpinned = {**candidate.knobs.settings, **dict.fromkeys(candidate.pinned, False)}
            again = replace(candidate, knobs=replace(candidate.knobs, settings=unpinned), pinned=())
            return answers + asked(first_trial(again, steps), run)
        case Failed(wants_larger_batch=True) if candidate.knobs.micro_batch < _LARGEST_BEGINNING:
            return answers + tried(_from(candidate, 2 * candidate.knobs.micro_batch), run, steps)
        case _:
            return answers


def first_trial(candidate: Candidate, steps: Steps) -> Trial:
    """The first look at a rung."""
    return Trial(rung=candidate.rung.name, knobs=candidate.knobs, purpose="walk", steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """The rung that lacked least. exact: measured without the limit; otherwise a lower bound."""

    rung: str
    missing_bytes: int
    exact: bool


def shortfall(records: Iterable[Record], run: Run, steps: Steps, limit_bytes: int, can_unlimit: bool) -> Closest | None:
    """The closest rung of a walk that found none, or None when no rung ran out of device memory by a known amount.

    can_unlimit: the limit is ours (a budget, an emulated smaller card), so that a trial can run without it.
    """
    last = {record.trial.rung: record for record in records}
    found: list[tuple[bool, Closest]] = []
    for record in last.values():
        match record.outcome:
            case OutOfMemory(tier="device") as outcome:
                known, closest = _missing(record, outcome, run, steps, limit_bytes, can_unlimit)
                if closest is not None:
                    found.append((known, closest))
            case _:
                pass
    # What a lower bound leaves out is unknown: the last allocation may lack 4 KiB and the next ones gigabytes. So a
    # rung that was seen running without the limit goes before one that was not.
    return min(found, key=lambda item: (not item[0], item[1].missing_bytes))[1] if found else None


def _missing(
    record: Record, outcome: OutOfMemory, run: Run, steps: Steps, limit_bytes: int, can_unlimit: bool
) -> tuple[bool, Closest | None]:
    """Whether the rung was seen running without the limit, and what it lacked."""
    rung, least = record.trial.rung, outcome.missing_bytes
    bound = None if least is None else Closest(rung=rung, missing_bytes=least, exact=False)
    if not can_unlimit:
        return False, bound
    free = run(replace(record.trial, limited=False, purpose="shortfall", steps=steps, repeat=0))
    if not isinstance(free.outcome, Fit):
        return False, bound
    missing = free.outcome.device_peak_bytes - limit_bytes
    if missing > 0:
        return True, Closest(rung=rung, missing_bytes=missing, exact=True)
    return True, bound  # the peak alone would have fitted; what ran out was lost between the blocks


def walked_down(rungs: Sequence[Candidate], means: Means) -> Walked:
    """To the first rung that fits."""
    memory, steps = means.memory, means.settings.profile.walk
    return walk(rungs, memory.run, steps, memory.listen, means.foresight)


def closest_of(walked: Walked, means: Means) -> Closest | None:
    """The rung that lacked least, where the walk came to its end and none fitted."""
    if walked.stopped:
        return None
    settings = means.settings
    return shortfall(
        walked.records,
        means.memory.run,
        settings.profile.walk,
        settings.device_bytes,
        can_unlimit=settings.device_bytes_asked,
    )


def rivals_of(rungs: Sequence[Candidate], walked: Walked) -> tuple[Candidate, ...]:
    """The rungs that the walk neither tried nor passed over. One that keeps states on NVMe moves them there and back in
    each step, and its op takes minutes to build: it only runs where nothing else fits."""
    known = {record.trial.rung for record in walked.records} | {skipped.rung for skipped in walked.skipped}
    return tuple(
        one
        for one in rungs
        if one.skip is None and one.rung.name not in known and "nvme" not in one.rung.places.values()
    )
