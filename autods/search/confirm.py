"""Is the leader of a search really faster? The best of many is flattered: measure it again, in turn with the start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from ..values import Record, Run
from .ask import fits_within, samples_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """Which of the two is to be taken, the trials that decided it, and why in a sentence."""

    best: Record
    records: tuple[Record, ...]
    reason: str


def confirm(start: Record, leader: Record, run: Run, *, gain: float, turns: int, usable_bytes: float) -> Confirmed:
    """Take the leader only when it beats the start by `gain`, side by side `turns` times (start, leader, start, …).

    What drifts (clocks, heat, neighbours) falls on both of a turn alike, and the measurement that made the leader lead
    does not count: it was chosen for being high.
    """
    claimed = samples_per_second(leader) / max(samples_per_second(start), 1e-12)
    if claimed < gain:
        said = f"the fastest of them was {claimed:.2f} times as fast as the start, less than the {gain:g} that counts"
        return Confirmed(best=start, records=(), reason=said)
    measured = [
        tuple(run(replace(one.trial, purpose="verify", repeat=turn)) for one in (start, leader))
        for turn in range(1, turns + 1)
    ]
    records = tuple(record for turn in measured for record in turn)
    again = [theirs for _, theirs in measured]
    if not all(fits_within(record, usable_bytes) for record in again):
        return Confirmed(best=start, records=records, reason="the fastest of them did not fit when it was run again")
    gains = [
        samples_per_second(theirs) / samples_per_second(ours) for ours, theirs in measured if samples_per_second(ours)
    ]
    held = median(gains) if gains else 0.0
    if held < gain:
        said = f"the fastest of them was {held:.2f} times as fast as the start when measured again in turn"
        return Confirmed(best=start, records=records, reason=f"{said}, less than the {gain:g} that counts")
    # The slower of the new measurements: what the report promises should hold.
    best = min(again, key=samples_per_second)
    return Confirmed(
        best=best, records=records, reason=f"measured again in turn, {held:.2f} times as fast as the start"
    )
