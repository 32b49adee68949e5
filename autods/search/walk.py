"""Walk the ladder: real trials from the fastest rung down, until one fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..ds_config import compose, get, ops_of, start_settings
from ..ladder import Rung
from ..settings import Settings
from ..values import Failed, Fit, Knobs, ModelFacts, OutOfMemory, Record, Run, Skipped, Steps, Trial, is_machines_fault
from .ask import accumulation_for, asked, fits_well
from .lessons import Lessons
from .shortfall import Closest, shortfall

__all__ = ["Candidate", "Closest", "Walked", "candidates", "shortfall", "walk"]

_ADAM_OPS = ("cpu_adam", "fused_adam")  # torch's AdamW can stand in for these
_PINS = tuple(f"zero_optimization.offload_{part}.pin_memory" for part in ("param", "optimizer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rung as the walk tries it.

    stand_in: its own optimizer is an op that may have to be built, so torch's AdamW takes the first look.
    skip: why it is not tried, or None. ops: what its own optimizer and NVMe need built. pinned: its keys that pin host
    memory.
    """

    rung: Rung
    knobs: Knobs
    stand_in: bool
    skip: str | None
    ops: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What the walk found: `winner` fits; `stopped` is a failure that every rung would share.

    The winner is the first rung that fits well; where none does, the first that fits although its allocator had to
    flush and try again in the steps.
    """

    winner: Record | None
    records: tuple[Record, ...]
    skipped: tuple[Skipped, ...]
    stopped: Record | None


def candidates(settings: Settings, facts: ModelFacts, op_problems: Mapping[str, str]) -> tuple[Candidate, ...]:
    """One per rung of the ladder, fastest first. op_problems: op → why it cannot be built here."""
    return tuple(_candidate(rung, settings, facts, op_problems) for rung in settings.ladder)


def walk(
    candidates: Iterable[Candidate], run: Run, steps: Steps, on_skip: Callable[[Skipped], None] = lambda skipped: None
) -> Walked:
    """Try each rung until one fits. A rung is never passed over because another ran out: the ladder is a ranking by
    speed, and a lower rung can need more device memory than a higher one (2 + CPU offload against ZeRO-1, say).
    What is full on the host, or broken, is another matter: see `lessons`."""
    records: list[Record] = []
    skipped: list[Skipped] = []
    pressed: Record | None = None
    lessons = Lessons()
    for candidate in candidates:
        reason = candidate.skip or lessons.against(candidate.rung, candidate.ops)
        if reason is not None:
            skipped.append(Skipped(rung=candidate.rung.name, reason=reason))
            on_skip(skipped[-1])
            continue
        answers = _tried(candidate, run, steps)
        records.extend(answers)
        last = answers[-1]
        if fits_well(last):
            return Walked(winner=last, records=tuple(records), skipped=tuple(skipped), stopped=None)
        if _stops_all(last):
            return Walked(winner=None, records=tuple(records), skipped=tuple(skipped), stopped=last)
        if pressed is None and isinstance(last.outcome, Fit):
            pressed = last
        lessons = lessons.after(candidate.rung, last.outcome)
    return Walked(winner=pressed, records=tuple(records), skipped=tuple(skipped), stopped=None)


def _stops_all(record: Record) -> bool:
    """Whether every rung would fail of the same: the code, the config or the machine has to be mended first."""
    match record.outcome:
        case Failed(op=str()):
            return False  # only the rungs that need this op
        case Failed(action="fix_code" | "fix_config"):
            return True
        case outcome:
            return is_machines_fault(outcome)


def _tried(candidate: Candidate, run: Run, steps: Steps) -> tuple[Record, ...]:
    """The records of one rung, the last one decides. Where pinned memory runs out, it is tried unpinned."""
    answers = _as_it_is(candidate, run, steps)
    match answers[-1].outcome:
        case OutOfMemory(tier="pinned") if candidate.pinned:
            unpinned = {**candidate.knobs.settings, **dict.fromkeys(candidate.pinned, False)}
            again = replace(candidate, knobs=replace(candidate.knobs, settings=unpinned), pinned=())
            return answers + _as_it_is(again, run, steps)
        case _:
            return answers


def _as_it_is(candidate: Candidate, run: Run, steps: Steps) -> tuple[Record, ...]:
    trial = Trial(
        rung=candidate.rung.name,
        knobs=candidate.knobs,
        purpose="walk",
        steps=steps,
        native_optimizer=not candidate.stand_in,
    )
    looked = asked(trial, run)
    if not candidate.stand_in or not isinstance(looked[-1].outcome, Fit):
        return looked
    # Only a rung that fits is worth building an op for, and only with its own optimizer is it this rung.
    return looked + asked(replace(trial, native_optimizer=True, purpose="verify"), run)


def _candidate(rung: Rung, settings: Settings, facts: ModelFacts, op_problems: Mapping[str, str]) -> Candidate:
    # More accumulation than 2 needs no more memory: the second micro batch is the first that runs beside kept
    # gradients, the others repeat it. Growing solves for the true number.
    accumulation = min(2, accumulation_for(settings.global_batch, 1, settings.gpus))
    knobs = Knobs(
        micro_batch=1,
        accumulation=accumulation,
        checkpointing=facts.checkpointing,
        settings=start_settings(rung, base=settings.base, device_bytes=settings.device_bytes, facts=facts),
    )
    native = compose(
        rung,
        knobs,
        base=settings.base,
        world_size=settings.gpus,
        own_optimizer=facts.has_optimizer,
        nvme_path=settings.nvme_path,
    )
    ops = ops_of(native)
    return Candidate(
        rung=rung,
        knobs=knobs,
        stand_in=any(op in _ADAM_OPS for op in ops),
        skip=_why_not(rung, settings, ops, op_problems),
        ops=ops,
        pinned=tuple(key for key in _PINS if get(native, key) is True),
    )


def _why_not(rung: Rung, settings: Settings, ops: tuple[str, ...], op_problems: Mapping[str, str]) -> str | None:
    if rung.least_world_size > settings.gpus:
        if settings.gpus == 1:
            return "one rank: no sharding to gain"
        return f"{settings.gpus} ranks: it needs {rung.least_world_size} or more"
    if rung.needs_nvme_path and settings.nvme_path is None:
        return "no --nvme-path was given"
    for op in ops:
        if op in op_problems:
            return f"its op {op} cannot be built: {op_problems[op]}"
    return None
