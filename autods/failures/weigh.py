"""All that a run's logs say → one diagnosis: the cause, not the loudest line.

A row that names a cause beats an unnamed exception, that beats what only noticed another rank, that beats a bare exit
code; among equals the first in time. What the run survived is no cause: it went on, or it ended well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .answer import by_exit, diagnosis_of, nothing_of, pressure_advice
from .diagnosis import Diagnosis
from .doubt import credible
from .story import Finding, Story

_RESUMED = 3  # so much progress after it says that it was survived: other ranks show a step or two more at most
_ORDER = {"decisive": 0, "cause": 1, "likely": 2}
_SILENT = (-9, -11, -7, -4, -8)  # signals that leave no word; a watchdog ends its own process by −6


def weigh(story: Story, exit_code: int | None = None) -> Diagnosis:
    """The diagnosis. exit_code: of the whole run, as subprocess or a shell says it, where it is known."""
    ended_well = exit_code == 0 or (exit_code is None and _done(story))
    alive = [one for one in story.findings if not ended_well and not _survived(one, story)]
    causes = [one for one in alive if one.row.weight in _ORDER]
    causes = credible(causes, story, exit_code)
    if causes:
        return _caused(_first(causes, story), story, causes)
    if second := [one for one in alive if one.row.weight == "secondary"]:
        if (end := story.first_exit) is not None and end.code in _SILENT:
            return by_exit(end.code, story)
        return _secondary(second[0], story)
    weak = [one for one in alive if one.row.weight == "weak"]
    if weak and (story.first_exit is None or story.first_exit.code not in _SILENT):
        return _caused(_first(weak, story), story, weak)
    if (code := _exit_to_go_by(exit_code, story, ended_well)) is not None:
        return by_exit(code, story)
    if pressed := [one for one in story.findings if _presses(one)]:
        return diagnosis_of(pressed[0], 0.8, pressed, advice=pressure_advice(pressed[0]), as_pressure=True)
    return nothing_of(story, exit_code, _done(story))


def _exit_to_go_by(exit_code: int | None, story: Story, ended_well: bool) -> int | None:
    """A launcher's own 1 says less than the signal that it reports of a rank."""
    told = story.first_exit.code if story.first_exit is not None and not ended_well else None
    if told is not None and (told < 0 or exit_code is None):
        return told
    return exit_code or None


def _first(causes: Sequence[Finding], story: Story) -> Finding:
    """The strongest evidence; of that the first in time: by the clock where files are compared, else by place."""
    best = min(_ORDER.get(one.row.weight, 3) for one in causes)
    equal = [one for one in causes if _ORDER.get(one.row.weight, 3) == best]
    kinds = {one.when[0] if one.when else None for one in equal}
    timed = story.files > 1 and len(kinds) == 1 and None not in kinds

    def order(one: Finding) -> tuple[bool, bool, float, int]:
        rank = story.rank(one)
        not_root = story.root_rank is not None and rank is not None and rank != story.root_rank
        in_passing = one.message.manner == "mentioned" and best > 0
        return in_passing, not_root and story.files == 1, one.when[1] if timed and one.when else 0.0, one.message.order

    return min(equal, key=order)


def _survived(one: Finding, story: Story) -> bool:
    """The run trained on after it."""
    if one.row.weight == "done" or one.row.weight == "benign":
        return True
    if one.message.ignored:
        return True
    return story.progress.get(one.message.file, 0) - one.message.progress >= _RESUMED


def _done(story: Story) -> bool:
    """Something says that the run ended well, and nothing that it failed stands after it."""
    done = [one.message for one in story.findings if one.row.weight == "done"]
    if not done or (story.first_exit is not None and story.first_exit.code != 0):
        return False
    last = done[-1]
    return not any(
        one.row.weight in _ORDER and one.message.file == last.file and one.message.order > last.order
        for one in story.findings
    )


def _presses(one: Finding) -> bool:
    """Memory was short on the way: a row says so, or a full device was survived."""
    return one.row.weight == "pressure" or (
        one.row.kind == "out_of_memory" and one.row.tier == "device" and one.row.weight in _ORDER
    )


def _caused(cause: Finding, story: Story, causes: Sequence[Finding]) -> Diagnosis:
    sure = {"decisive": 0.95, "cause": 0.95, "likely": 0.6, "weak": 0.4}[cause.row.weight]
    if cause.message.manner == "stated":
        sure -= 0.05
    if cause.message.manner == "mentioned":
        sure -= 0.15
    same = [one for one in causes if one.row is cause.row]
    return diagnosis_of(cause, sure, same, rank=_rank(cause, story, same))


def _rank(cause: Finding, story: Story, same: Sequence[Finding]) -> int | None:
    """Whose failure it is. A line of the node (the kernel's, a scheduler's) is whoever's process it names."""
    if cause.row.kind == "none":
        return cause.rank
    told = (story.root_rank, _rank_of_exit(story))
    if cause.row.weight == "decisive":
        named = story.ranks.of(cause.message)
        found: tuple[int | None, ...] = (
            (named, *told, cause.rank, story.named_rank)
            if cause.rank is None or not story.files > 1
            else (named, cause.rank, *told)
        )
    else:
        others = {one.rank for one in same if one.rank is not None}
        alone = others.pop() if len(others) == 1 else None
        found = (
            cause.rank,
            story.ranks.of(cause.message),
            alone,
            story.root_rank,
            story.named_rank,
            story.ranks.of_device(cause.local),
            cause.nccl,
            _rank_of_exit(story),
        )
    return next((rank for rank in found if rank is not None), None)


def _rank_of_exit(story: Story) -> int | None:
    return story.first_exit.rank if story.first_exit is not None else None


def _secondary(one: Finding, story: Story) -> Diagnosis:
    """The rank that noticed is not the one that failed."""
    return replace(diagnosis_of(one, 0.7, [one]), rank=story.root_rank)
