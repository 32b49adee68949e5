"""Is the leader of a search really faster? The best of many is flattered: measure it again, in turn with the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..values import Record, Run
from .ask import samples_per_second
from .finals import Score, comparison, finals


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """Which of them is to be taken, the trials that decided it, and why in a sentence."""

    best: Record
    records: tuple[Record, ...]
    reason: str


def confirm(
    start: Record,
    leaders: Sequence[Record],
    run: Run,
    *,
    gain: float,
    turns: int,
    usable_bytes: float,
    score: Score = samples_per_second,
) -> Confirmed:
    """Take the best of the leaders only when it beats the start by `gain`, side by side in up to `turns` turns.

    leaders: best first; one that did not even claim the gain is not measured again. See `finals` for how they are.
    """
    best, times = comparison(score)
    claims = {id(one): score(one) / max(score(start), 1e-12) for one in leaders}
    promising = [one for one in leaders if claims[id(one)] >= gain]
    if not promising:
        said = f"the {best} of them was {max(claims.values()):.2f} {times} as the start"
        return Confirmed(best=start, records=(), reason=f"{said}, less than the {gain:g} that counts")
    final = finals((start, *promising), run, turns=turns, usable_bytes=usable_bytes, score=score)
    again = {place: one for place, one in final.measured.items() if place > 0}
    if not again:
        said = f"the {best} of them did not fit when it was run again"
        return Confirmed(best=start, records=final.records, reason=said)
    if 0 not in final.measured:
        return Confirmed(best=final.best, records=final.records, reason="the start did not fit when it was run again")
    winner = next(place for place, one in final.measured.items() if final.best in one)
    shown = winner or max(again, key=lambda place: final.scores[place])
    # Drift falls on both of a turn alike, so their ratio is taken turn by turn.
    held = median(score(one) / score(ours) for one, ours in zip(again[shown], final.measured[0], strict=False))
    said = f"{held:.2f} {times} as the start"
    if winner == 0 or held < gain:
        said = f"the {best} of them was {said} when measured again in turn"
        return Confirmed(best=start, records=final.records, reason=f"{said}, less than the {gain:g} that counts")
    return Confirmed(best=final.best, records=final.records, reason=f"measured again in turn, {said}")
