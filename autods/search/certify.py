"""Certify the winner: the longest batch, evaluation, a checkpoint, the losses; and back off where it does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..values import Record, Run, Steps, Trial
from .ask import fits_well
from .certificate import Certificate, read_off, settled
from .exams import Exams
from .holding import Held, Holding
from .parity import Compared, compare, is_same_maths

_COMPARISON = 2  # trials: the config and the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """What certifying found.

    best: a timed trial of the config to take. records: all trials that were run for it, in order. reason: a sentence.
    """

    best: Record
    certificate: Certificate
    records: tuple[Record, ...]
    reason: str


def certify(
    winner: Record,
    run: Run,
    *,
    alternates: Sequence[Record],
    reference: Record | None,
    steps: Steps,
    parity_steps: Steps,
    tolerance: float,
    limit_bytes: int,
    headroom: float,
    world_size: int,
    global_batch: int | None,
    most_trials: int,
    leaner: Iterable[Record] = (),
    alike: bool = False,
    longest_ratio: float = 1.0,
) -> Certified:
    """Prove the winner, or what has to be taken instead, in at most `most_trials` trials.

    Where memory runs short on the longest batch, the micro batch shrinks; where none holds, the next of `alternates`
    (other configs that fitted, best first) is examined. reference: a plain config known to fit, whose losses the
    winner has to match within `tolerance`, relatively; a knob that changes them is taken back. None: not compared.
    alike: losses are compared at one micro batch, as a script needs it.
    leaner: fits of rungs further down, drawn one by one when none of `alternates` holds: what they cost to find is not
    counted here. longest_ratio: elements of a sample of the longest batch by those of a usual one; 1: unknown.
    """
    holding = Holding(
        known=(winner, *alternates, *(() if reference is None else (reference,))),
        exams=Exams(run=run, most_trials=most_trials),
        steps=steps,
        limit_bytes=limit_bytes,
        headroom=headroom,
        world_size=world_size,
        global_batch=global_batch,
        reserve=0 if reference is None or is_same_maths(winner.trial, reference.trial) else _COMPARISON,
        longest_ratio=longest_ratio,
    )
    parting: tuple[Held, Compared, tuple[str, ...]] | None = None  # holds, but its losses are not the reference's
    for config in _configs(winner, chain(alternates, leaner), holding):
        if (held := holding.hold(config)) is None:
            continue
        said = Compared() if reference is None else _compared(held, reference, holding, parity_steps, tolerance, alike)
        backed_off = tuple(holding.backed_off)
        if said.taken_back is None:
            return _certified(held, said, holding, backed_off)
        holding.backed_off.append(said.changed)
        if (without := holding.hold(holding.timing(said.taken_back))) is not None:
            return _certified(without, Compared(parity=said.without), holding, tuple(holding.backed_off))
        unproven = replace(said, failure=f"{said.failure}; without it, the config was not seen to hold")
        parting = parting or (held, unproven, backed_off)
    if parting is not None:
        held, said, backed_off = parting
        return _certified(held, said, holding, backed_off)
    return _none_holds(winner, holding)


def _configs(winner: Record, others: Iterator[Record], holding: Holding) -> Iterator[Trial]:
    """The winner, then what may hold although all before did not."""
    yield winner.trial
    before = winner.trial
    while holding.exams.left > 0 and (record := next(others, None)) is not None:
        config = holding.timing(record.trial)
        usual = record.trial.limited and record.trial.native_optimizer and record.trial.exam is None
        if usual and fits_well(record) and not holding.rules_out(config):
            holding.backed_off.append(f"from {_name(before)} to {_name(config)}: {holding.last_said()}")
            yield config
            before = config


def _compared(held: Held, reference: Record, holding: Holding, steps: Steps, tolerance: float, alike: bool) -> Compared:
    return compare(
        held.best.trial,
        reference,
        holding.exams,
        steps=steps,
        tolerance=tolerance,
        limit_bytes=holding.limit_bytes,
        alike=alike,
    )


def _certified(held: Held, said: Compared, holding: Holding, backed_off: tuple[str, ...]) -> Certified:
    exam = read_off(held.exam, limit_bytes=holding.limit_bytes, usable_bytes=holding.usable_bytes)
    certificate = settled(
        replace(
            exam,
            parity=said.parity,
            backed_off=backed_off,
            failures=exam.failures + _present(said.failure),
            not_checked=exam.not_checked + _present(said.not_checked),
        )
    )
    return _with_reason(held.best, certificate, holding)


def _none_holds(winner: Record, holding: Holding) -> Certified:
    """The winner as it was found, and why nothing is proven of it."""
    rung = holding.short[-1].trial.rung if holding.short else ""
    failure = f"no config was found that holds: {rung}, {holding.last_said()}" if rung else None
    spent = f"no config was proven: {holding.exams.spent}" if holding.exams.left < 1 else None
    certificate = Certificate(
        passed=False,
        backed_off=tuple(holding.backed_off),
        failures=_present(failure),
        not_checked=_present(spent),
    )
    return _with_reason(winner, certificate, holding)


def _with_reason(best: Record, certificate: Certificate, holding: Holding) -> Certified:
    first = holding.known[0].trial
    proven = f"{_name(best.trial)} holds on the longest batch, in evaluation, and when a checkpoint is saved and loaded"
    instead = ""
    if certificate.backed_off and best is not holding.known[0]:
        same = _name(best.trial) == _name(first)
        instead = f"; {certificate.backed_off[-1]}" if same else f"; taken instead of {_name(first)}"
    wrong = "; ".join((*certificate.failures, *certificate.not_checked))
    reason = (proven if certificate.passed else wrong) + instead
    return Certified(best=best, certificate=certificate, records=tuple(holding.exams.records), reason=reason)


def _name(config: Trial) -> str:
    recomputing = ", recomputing" if config.knobs.checkpointing else ""
    return f"{config.rung} (micro batch {config.knobs.micro_batch}{recomputing})"


def _present(sentence: str | None) -> tuple[str, ...]:
    return () if sentence is None else (sentence,)
