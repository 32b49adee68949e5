"""Compare configs by interleaved turns, with the noise of both configs and turns taken out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, log, sqrt
from statistics import mean, median, median_low, stdev

from ..report.results import Ratio
from ..types import Fit, Purpose, Record, Run, Trial
from .trials import fits_within, run_with_retry, samples_per_second

Score = Callable[[Record], float]
# What is believed of the noise of one trial before any was repeated: 3 %, worth two degrees of freedom. In-trial
# spread, where it is larger, is the better guess.
PRIOR_NOISE = 0.03
_PRIOR_FREEDOM = 2
# Student's t, one-sided 99 %, by degrees of freedom from 1 on; the last one stands for more (Student 1908).
_QUANTILES_99 = (31.82, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalsResult:
    """Who won, the trials that decided it, and why in a sentence.

    best: of the new records the one with the winner's (lower) median score. scores: place among the contestants →
    median of its new measurements, 0 when it did not fit again. measured: place → its new records that count, by turn.
    """

    best: Record
    records: tuple[Record, ...]
    scores: Mapping[int, float]
    reason: str
    measured: Mapping[int, tuple[Record, ...]]


def finals(
    contestants: Sequence[Record],
    run: Run,
    *,
    turns: int,
    usable_bytes: float,
    score: Score,
    purpose: Purpose = "verify",
    may_run: Callable[[int], bool] = lambda trials: True,
) -> FinalsResult:
    """Measure all again in turn (A B C A B C …), drop who is clearly slower, until one is left or the turns are spent.

    score: larger is better, above 0 for a fit. What drifts (clocks, heat, neighbours) falls on all of a turn alike. The
    measurements that the contestants come with do not count: they were chosen for being high. On a tie the earlier one
    wins. Who does not fit within usable_bytes again is out; one that never left that room has only to run. purpose, and
    the repeats counted on from the contestants' own, make each new trial one that no journal has answered before.
    may_run: whether the budget allows so many more trials; a turn that it does not allow for all is for the best ones.
    """
    if not contestants:
        raise ValueError("finals need a contestant")
    if len(contestants) == 1 or turns < 1:
        return _unmeasured(contestants, score)
    final = _Final(tuple(contestants), run, turns, usable_bytes, score, purpose)
    records: list[Record] = []
    measured: dict[int, list[Record]] = {place: [] for place in range(len(contestants))}
    left = list(measured)
    for turn in range(1, turns + 1):
        for place in tuple(left):
            answers = final.measure(place, turn)
            records += answers
            if final.holds(place, answers[-1]):
                measured[place].append(answers[-1])
            else:
                measured[place].clear()
                left.remove(place)
        scores = {place: [score(record) for record in measured[place]] for place in left}
        left = _still_in(scores, _spread([record for place in left for record in measured[place]]))
        following = _affordable(sorted(left, key=lambda place: mean(scores[place]), reverse=True), may_run)
        if len(following) <= 1:
            break
        left = sorted(following) if turn < turns else left
    return final.ended(records, measured, left)


@dataclass(frozen=True, slots=True)
class _Final:
    """What is given and stays."""

    contestants: tuple[Record, ...]
    run: Run
    turns: int
    usable_bytes: float
    score: Score
    purpose: Purpose

    def measure(self, place: int, turn: int) -> tuple[Record, ...]:
        """One new measurement, the last record; a failure that may be a fluke is asked once more."""
        before = [one.trial.repeat for one in self.contestants if one.trial.purpose == self.purpose]
        repeat = self.turns * ceil(max(before, default=0) / self.turns) + turn

        def run(trial: Trial) -> Record:  # asked once more, it must not take the place of the next turn
            return self.run(trial if trial.repeat == repeat else replace(trial, repeat=repeat + self.turns))

        return run_with_retry(replace(self.contestants[place].trial, purpose=self.purpose, repeat=repeat), run)

    def holds(self, place: int, record: Record) -> bool:
        had_room = fits_within(self.contestants[place], self.usable_bytes)
        return fits_within(record, self.usable_bytes) if had_room else isinstance(record.outcome, Fit)

    def ended(
        self, records: Sequence[Record], measured: Mapping[int, Sequence[Record]], left: Sequence[int]
    ) -> FinalsResult:
        """The best median of those that are left; when all of these fell over, of those that were only slower."""
        scores = {place: median(map(self.score, again)) if again else 0.0 for place, again in measured.items()}
        able = left or [place for place, again in measured.items() if again]
        if not able:
            return FinalsResult(
                best=self.contestants[0],
                records=tuple(records),
                scores=scores,
                reason="none of them fitted when it was run again",
                measured={},
            )
        winner = max(able, key=lambda place: scores[place])  # the first of equals
        middle = median_low(map(self.score, measured[winner]))
        return FinalsResult(
            best=next(record for record in measured[winner] if self.score(record) == middle),
            records=tuple(records),
            scores=scores,
            reason=self._reason(winner, scores, {place: len(again) for place, again in measured.items()}),
            measured={place: tuple(again) for place, again in measured.items() if again},
        )

    def _reason(self, winner: int, scores: Mapping[int, float], turns_of: Mapping[int, int]) -> str:
        best, times = comparison_words(self.score)
        turns = turns_of[winner]
        how_often = f"measured again in {turns} turn{'s' if turns > 1 else ''}"
        said = f"{_named(self.contestants[winner])} is the {best} of {len(scores)} {how_often}"
        others = {place: score for place, score in scores.items() if place != winner and score > 0}
        if not others:
            return f"{said}: no other fitted again"
        following = max(others, key=lambda place: (turns_of[place], others[place]))
        ratio = scores[winner] / others[following]
        return f"{said}: {ratio:.2f} {times} as {_named(self.contestants[following])}"


def _still_in(scores: Mapping[int, Sequence[float]], spread: float) -> list[int]:
    """The places that are not clearly slower than the fastest; scores have the same turns each.

    In logarithms a turn and a place each add their part, and what neither explains is noise. Clearly: by more than the
    difference of two means of equal contestants is in 99 of 100 cases.
    """
    if len(scores) < 2 or min(min(one) for one in scores.values()) <= 0:
        return list(scores)
    logs = {place: [log(score) for score in one] for place, one in scores.items()}
    means = {place: mean(one) for place, one in logs.items()}
    turns = list(map(mean, zip(*logs.values(), strict=True)))
    middle = mean(turns)
    rest = [
        value - means[place] - turn + middle
        for place, one in logs.items()
        for value, turn in zip(one, turns, strict=True)
    ]
    freedom = _PRIOR_FREEDOM + (len(scores) - 1) * (len(turns) - 1)
    noise = sqrt((_PRIOR_FREEDOM * max(spread, PRIOR_NOISE) ** 2 + sum(one**2 for one in rest)) / freedom)
    quantile = _QUANTILES_99[min(freedom, len(_QUANTILES_99)) - 1]
    least = max(means.values()) - quantile * noise * sqrt(2 / len(turns))
    return [place for place, one in means.items() if one >= least]


def _affordable(best_first: Sequence[int], may_run: Callable[[int], bool]) -> Sequence[int]:
    """As many of them as may be measured once more."""
    return best_first[: max((count for count in range(len(best_first) + 1) if may_run(count)), default=0)]


def _spread(records: Sequence[Record]) -> float:
    """Of the steps within a trial, the widest."""
    return max((record.outcome.spread for record in records if isinstance(record.outcome, Fit)), default=0.0)


def _unmeasured(contestants: Sequence[Record], score: Score) -> FinalsResult:
    best = max(contestants, key=score)  # the first of equals
    scores = {place: score(one) for place, one in enumerate(contestants)}
    why = (
        "had no other to be compared with"
        if len(contestants) == 1
        else f"was the {comparison_words(score)[0]}, and none was measured again"
    )
    return FinalsResult(best=best, records=(), scores=scores, reason=f"{_named(best)} {why}", measured={})


def comparison_words(score: Score) -> tuple[str, str]:
    """What the best is called by this score, and how it compares: "fastest", "times as fast"."""
    return ("fastest", "times as fast") if score is samples_per_second else ("best", "times as good")


def _named(record: Record) -> str:
    return f"{record.trial.rung} with micro batch {record.trial.knobs.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmResult:
    """Which of them is to be taken, the trials that decided it, and why in a sentence."""

    best: Record
    records: tuple[Record, ...]
    reason: str


def confirm_gain(
    start: Record,
    leaders: Sequence[Record],
    run: Run,
    *,
    gain: float,
    turns: int,
    usable_bytes: float,
    score: Score = samples_per_second,
) -> ConfirmResult:
    """Take the best of the leaders only when it beats the start by `gain`, side by side in up to `turns` turns.

    leaders: best first; one that did not even claim the gain is not measured again. See `finals` for how they are.
    """
    best, times = comparison_words(score)
    claims = {id(one): score(one) / max(score(start), 1e-12) for one in leaders}
    promising = [one for one in leaders if claims[id(one)] >= gain]
    if not promising:
        said = f"the {best} of them was {max(claims.values()):.2f} {times} as the start"
        return ConfirmResult(best=start, records=(), reason=f"{said}, less than the {gain:g} that counts")
    final = finals((start, *promising), run, turns=turns, usable_bytes=usable_bytes, score=score)
    again = {place: one for place, one in final.measured.items() if place > 0}
    if not again:
        said = f"the {best} of them did not fit when it was run again"
        return ConfirmResult(best=start, records=final.records, reason=said)
    if 0 not in final.measured:
        return ConfirmResult(
            best=final.best, records=final.records, reason="the start did not fit when it was run again"
        )
    winner = next(place for place, one in final.measured.items() if final.best in one)
    shown = winner or max(again, key=lambda place: final.scores[place])
    # Drift falls on both of a turn alike, so their ratio is taken turn by turn.
    held = median(score(one) / score(ours) for one, ours in zip(again[shown], final.measured[0], strict=False))
    said = f"{held:.2f} {times} as the start"
    if winner == 0 or held < gain:
        said = f"the {best} of them was {said} when measured again in turn"
        return ConfirmResult(best=start, records=final.records, reason=f"{said}, less than the {gain:g} that counts")
    return ConfirmResult(best=final.best, records=final.records, reason=f"measured again in turn, {said}")


# What is believed of the noise of one trial before any was repeated: 3 %, worth two degrees of freedom.
_PRIOR_NOISE, _PRIOR_FREEDOM_NOISE = 0.03, 2
# Student's t, two-sided 95 %, by degrees of freedom from 1 on; the last one stands for more (Student 1908).
_QUANTILES_95 = (
    12.71,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
_MANY = 2.0


def relative_spread(rates: Sequence[float]) -> float | None:
    """The relative standard deviation of a cell's repeats; None where it was measured once."""
    return stdev(rates) / mean(rates) if len(rates) > 1 else None


def estimate_ratios(
    rates: Mapping[int, Mapping[int, float]], reference: int, *, within: Mapping[int, float]
) -> dict[int, Ratio]:
    """Cell → ratio to the reference. rates: cell → turn → rate; within: cell → relative error inside its trials.

    What drifts (clocks, heat, neighbours) falls on all of a turn alike, so that cells are compared turn by turn. In
    logarithms a turn and a cell each add their part, and what neither explains is noise, the same for all cells. Where
    nothing was repeated, the noise is what is usual, or the spread of steps inside the trials where that is wider.
    """
    noise, freedom = _noise(rates, within)
    quantile = _QUANTILES_95[freedom - 1] if freedom <= len(_QUANTILES_95) else _MANY
    ours = rates[reference]
    found = {}
    for cell, theirs in rates.items():
        shared = [turn for turn in theirs if turn in ours]
        if cell == reference or not shared:
            continue
        difference = mean(log(theirs[turn] / ours[turn]) for turn in shared)
        margin = quantile * noise * sqrt(2 / len(shared))
        found[cell] = Ratio(times=exp(difference), low=exp(difference - margin), high=exp(difference + margin))
    return found


def _noise(rates: Mapping[int, Mapping[int, float]], within: Mapping[int, float]) -> tuple[float, int]:
    """Of one trial, relative, and the degrees of freedom of that estimate."""
    prior = max(_PRIOR_NOISE, *within.values()) if within else _PRIOR_NOISE
    turns = max((len(one) for one in rates.values()), default=0)
    whole = {cell: one for cell, one in rates.items() if len(one) == turns}
    squares, freedom = 0.0, 0
    if turns > 1 and len(whole) > 1:
        logs = {cell: {turn: log(rate) for turn, rate in one.items()} for cell, one in whole.items()}
        cells = {cell: mean(one.values()) for cell, one in logs.items()}
        middle = mean(cells.values())
        by_turn = {
            turn: mean(one[turn] for one in logs.values() if turn in one) for one in logs.values() for turn in one
        }
        rest = [
            value - cells[cell] - by_turn[turn] + middle for cell, one in logs.items() for turn, value in one.items()
        ]
        squares, freedom = sum(one**2 for one in rest), (len(whole) - 1) * (turns - 1)
    return sqrt(
        (_PRIOR_FREEDOM_NOISE * prior**2 + squares) / (_PRIOR_FREEDOM_NOISE + freedom)
    ), _PRIOR_FREEDOM_NOISE + freedom
