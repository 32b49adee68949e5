"""Nothing fitted: which rung came closest, and how many bytes were missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..outcomes import Fit, OutOfMemory
from ..values import Record, Run, Steps


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
    # A rung's last word: a stand-in that fitted can be followed by the rung's own optimizer that did not.
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
