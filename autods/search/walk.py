"""Walk the ladder: real trials from the fastest rung down, until one fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..outcomes import Failed, Fit, OutOfMemory, is_machines_fault
from ..values import Record, Run, Skipped, Steps, Trial
from .ask import asked, fits_well
from .candidates import Candidate
from .foresight import BLIND, Foresight, lacking_bytes, why_impossible
from .lessons import Lessons


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
    before: Callable[[Candidate], Candidate | None] = lambda candidate: None,
) -> Walked:
    """Try each rung until one fits. A rung is never passed over because another ran out: the ladder is a ranking by
    speed, and a lower rung can need more device memory than a higher one (2 + CPU offload against ZeRO-1, say).
    What is full on the host, or broken, is another matter: see `lessons`. Nor is a rung tried that cannot fit by its
    own forecast; but where nothing fits, the one that lacks least is tried all the same: that is then seen, not said.
    before: a faster variant of a rung, which is looked at first and wins if it fits.
    """
    rungs = tuple(candidates)
    _prepare(rungs, steps, foresight)
    walked = _walked(rungs, _Walking(run=run, steps=steps, on_skip=on_skip, before=before), foresight)
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
    before: Callable[[Candidate], Candidate | None]
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
        variant = self.before(candidate)
        if variant is not None:
            self.records.extend(tried(variant, self.run, self.steps))
        if variant is None or not (fits_well(self.records[-1]) or _stops_all(self.records[-1])):
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
    answers = _as_it_is(candidate, run, steps)
    match answers[-1].outcome:
        case OutOfMemory(tier="pinned") if candidate.pinned:
            unpinned = {**candidate.knobs.settings, **dict.fromkeys(candidate.pinned, False)}
            again = replace(candidate, knobs=replace(candidate.knobs, settings=unpinned), pinned=())
            return answers + _as_it_is(again, run, steps)
        case Failed(wants_larger_batch=True) if candidate.knobs.micro_batch < _LARGEST_BEGINNING:
            return answers + tried(_from(candidate, 2 * candidate.knobs.micro_batch), run, steps)
        case _:
            return answers


def first_trial(candidate: Candidate, steps: Steps) -> Trial:
    """The first look at a rung."""
    return Trial(
        rung=candidate.rung.name,
        knobs=candidate.knobs,
        purpose="walk",
        steps=steps,
        native_optimizer=not candidate.stand_in,
    )


def _as_it_is(candidate: Candidate, run: Run, steps: Steps) -> tuple[Record, ...]:
    trial = first_trial(candidate, steps)
    looked = asked(trial, run)
    if not candidate.stand_in or not isinstance(looked[-1].outcome, Fit):
        return looked
    # Only a rung that fits is worth building an op for, and only with its own optimizer is it this rung.
    return looked + asked(replace(trial, native_optimizer=True, purpose="verify"), run)
