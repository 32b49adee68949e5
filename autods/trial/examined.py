"""The exam at the end of an act, and what its steps are worth as timed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..outcomes import Phase
from . import exam as exams
from .longest import Longest
from .rendezvous import Ranks
from .repeat import Acted, seconds_of

Observe = Callable[[Phase, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What an act can do with its engine.

    step: one optimizer step of that index → the losses of its batches. evaluate: the loss without a gradient. short:
    index of a step → micro batches that it has at most.
    """

    engine: Any
    step: Callable[[int], list[Any]]
    evaluate: Callable[[], float | None]
    observe: Observe
    synchronize: Callable[[], None]
    short: dict[int, int]


def examined(
    acted: Acted,
    moves: Moves,
    ranks: Ranks,
    *,
    longest: Longest,
    folder: Path,
    times: bool,
    shortens: bool,
    ease: Callable[[], None] | None,
) -> tuple[Acted, int]:
    """The act with its exam, and the index of the step that would follow.

    times: its whole steps count as timed ones. shortens: the first step, which only has to move the weights away from
    the checkpoint, has one micro batch. ease: called once an evaluation has been seen, where memory is still counted.
    """
    first = following = len(acted.losses)
    if shortens:
        moves.short[first] = 1
    seconds: dict[int, float] = {}

    def step(index: int) -> None:
        seconds[index] = seconds_of(moves.step, index, moves.synchronize)

    def observe(phase: Phase, index: int) -> None:
        moves.observe(phase, index)
        if phase == "save" and ease is not None:
            ease()

    hands = exams.Hands(step=step, evaluate=moves.evaluate, observe=observe, synchronize=moves.synchronize)
    found = exams.examine(moves.engine, hands, ranks, longest=longest, folder=folder, index=first)
    following += len(seconds)
    if shortens and len(seconds) == 1:  # nothing was loaded, so that no whole step followed
        step(following)
        following += 1
    whole = tuple(took_s for index, took_s in seconds.items() if times and index not in moves.short)
    done = replace(acted, examined=found, step_s=(*acted.step_s, *whole), steps_s=acted.steps_s + sum(whole))
    return done, following
