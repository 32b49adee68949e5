"""Compare configs by interleaved turns: A B C A B C …

Drift (clocks, heat, other processes) affects all configs of a turn alike. The logarithm of a measurement is modelled
as a part of its turn, a part of its config, and noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, log, sqrt
from statistics import mean, median, median_low, stdev

from ..report.results import Ratio
from ..types import Fit, Purpose, Record, Trial
from .trials import FitContext, Score, run_with_retry, samples_per_second

# Prior of a trial's relative noise: 3 %, worth two degrees of freedom. The spread of steps within trials replaces it
# where that is larger.
PRIOR_NOISE = 0.03
_PRIOR_FREEDOM = 2
# Student's t, one-sided 99 %, by degrees of freedom from 1 on; the last value stands for more (Student 1908).
_QUANTILES_99 = (31.82, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)
# The same, two-sided 95 %.
_QUANTILES_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131)
_QUANTILE_95_OF_MORE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalsResult:
    """The result of repeated measurements; a place is a contestant's position among the contestants.

    `winner` is a place, and `best` the winner's new record with its (lower) median score.
    `scores` maps a place to the median of its new measurements, 0 when it did not fit again.
    `measured` maps a place to its new records that count, by turn.
    """

    winner: int
    best: Record
    reason: str
    scores: Mapping[int, float]
    measured: Mapping[int, Sequence[Record]]


def finals(
    contestants: Sequence[Record],
    context: FitContext,
    *,
    turns: int,
    purpose: Purpose = "verify",
    may_run: Callable[[int], bool] = lambda trials: True,
) -> FinalsResult:
    """Measure all again in turn, drop those that are clearly slower, until one is left or the turns are spent.

    The contestants' first measurements do not count, because these were chosen for being high. On a tie the earlier
    contestant wins. One that no longer leaves the headroom is dropped; one that never did only has to run.

    `purpose` and a new repeat number keep the journal from answering with earlier trials.
    `may_run` tells whether the budget allows so many more trials; the best contestants go first.
    """
    if not contestants:
        raise ValueError("finals need a contestant")
    score = context.score
    best_word, times = comparison_words(score)
    if len(contestants) == 1 or turns < 1:
        scores = dict(enumerate(map(score, contestants)))
        winner = max(scores, key=lambda place: scores[place])  # the first of equals
        why = (
            f"was the {best_word}, and none was measured again"
            if len(scores) > 1
            else "had no other to be compared with"
        )
        reason = f"{_name(contestants[winner])} {why}"
        return FinalsResult(winner=winner, best=contestants[winner], reason=reason, scores=scores, measured={})

    before = [record.trial.repeat for record in contestants if record.trial.purpose == purpose]
    repeat = turns * ceil(max(before, default=0) / turns)

    def measure(place: int, number: int) -> Record:
        def run(trial: Trial) -> Record:  # a repeated failure must not take the next turn's number
            return context.run(trial if trial.repeat == number else replace(trial, repeat=number + turns))

        return run_with_retry(replace(contestants[place].trial, purpose=purpose, repeat=number), run)[-1]

    measured: dict[int, list[Record]] = {place: [] for place in range(len(contestants))}
    left = list(measured)
    for turn in range(1, turns + 1):
        for place in tuple(left):
            record, had_room = measure(place, repeat + turn), context.fits(contestants[place])
            if context.fits(record) or (not had_room and isinstance(record.outcome, Fit)):
                measured[place].append(record)
            else:
                measured[place].clear()
                left.remove(place)
        rates = {place: [score(record) for record in measured[place]] for place in left}
        left = _not_clearly_slower(rates, largest_spread(record for place in left for record in measured[place]))
        best_first = sorted(left, key=lambda place: mean(rates[place]), reverse=True)
        affordable = max((count for count in range(len(left) + 1) if may_run(count)), default=0)
        if min(len(left), affordable) <= 1:
            break
        left = sorted(best_first[:affordable]) if turn < turns else left

    counted = {place: tuple(each) for place, each in measured.items() if each}
    scores = {place: median(map(score, each)) if each else 0.0 for place, each in measured.items()}
    if not counted:
        reason = "none of them fitted when it was run again"
        return FinalsResult(winner=0, best=contestants[0], reason=reason, scores=scores, measured={})
    # Where all that were left failed, one of those that were dropped as slower wins.
    winner = max(left or counted, key=lambda place: scores[place])  # the first of equals
    middle = median_low(map(score, counted[winner]))
    in_turns = f"measured again in {len(counted[winner])} turn{'s' if len(counted[winner]) > 1 else ''}"
    reason = f"{_name(contestants[winner])} is the {best_word} of {len(scores)} {in_turns}"
    others = [place for place in counted if place != winner and scores[place] > 0]
    if others:
        following = max(others, key=lambda place: (len(counted[place]), scores[place]))
        ratio = scores[winner] / scores[following]
        reason += f": {ratio:.2f} {times} as {_name(contestants[following])}"
    else:
        reason += ": no other fitted again"
    return FinalsResult(
        winner=winner,
        best=next(record for record in counted[winner] if score(record) == middle),
        reason=reason,
        scores=scores,
        measured=counted,
    )


def _not_clearly_slower(scores: Mapping[int, Sequence[float]], spread: float) -> list[int]:
    """The places that may be the fastest. Every place has the same number of turns.

    A place is dropped where it lies further behind than two equal contestants do in 99 of 100 cases.
    """
    if len(scores) < 2 or min(min(values) for values in scores.values()) <= 0:
        return list(scores)
    logs = {place: dict(enumerate(map(log, values))) for place, values in scores.items()}
    noise, freedom = _noise(logs, max(spread, PRIOR_NOISE))
    quantile = _QUANTILES_99[min(freedom, len(_QUANTILES_99)) - 1]
    means = {place: mean(values.values()) for place, values in logs.items()}
    turns = len(next(iter(logs.values())))
    least = max(means.values()) - quantile * noise * sqrt(2 / turns)
    return [place for place, value in means.items() if value >= least]


def _noise(logs: Mapping[int, Mapping[int, float]], prior: float) -> tuple[float, int]:
    """The noise of one trial and its degrees of freedom. `logs`: config → turn → logarithm of its rate.

    Only configs that were measured in every turn count. The prior is worth two degrees of freedom.
    """
    turns = max(map(len, logs.values()), default=0)
    whole = {config: by_turn for config, by_turn in logs.items() if len(by_turn) == turns}
    squares, freedom = 0.0, 0
    if turns > 1 and len(whole) > 1:
        configs = {config: mean(by_turn.values()) for config, by_turn in whole.items()}
        middle = mean(configs.values())
        by_turn = {turn: mean(logs[config][turn] for config in whole) for turn in next(iter(whole.values()))}
        squares = sum(
            (value - configs[config] - by_turn[turn] + middle) ** 2
            for config, values in whole.items()
            for turn, value in values.items()
        )
        freedom = (len(whole) - 1) * (turns - 1)
    return sqrt((_PRIOR_FREEDOM * prior**2 + squares) / (_PRIOR_FREEDOM + freedom)), _PRIOR_FREEDOM + freedom


def largest_spread(records: Iterable[Record]) -> float:
    """The largest relative error of a trial's median step."""
    return max((record.outcome.spread for record in records if isinstance(record.outcome, Fit)), default=0.0)


def comparison_words(score: Score) -> tuple[str, str]:
    """The words for a higher score: "fastest" and "times as fast", or "best" and "times as good"."""
    return ("fastest", "times as fast") if score is samples_per_second else ("best", "times as good")


def _name(record: Record) -> str:
    return f"{record.trial.rung} with micro batch {record.trial.knobs.micro_batch}"


def confirm_gain(start: Record, leaders: Sequence[Record], context: FitContext) -> tuple[Record, str]:
    """The best of the leaders (best first) if it beats the start by enough when measured again in turn, and the reason.

    A leader whose first measurement lacks the gain is not measured again.
    """
    score, limits = context.score, context.settings.profile.tune
    best, times = comparison_words(score)
    promising = [leader for leader in leaders if score(leader) >= limits.gain * score(start)]
    too_little = f"less than the {limits.gain:g} that counts"
    if not promising:
        claim = max(map(score, leaders)) / max(score(start), 1e-12)
        return start, f"the {best} of them was {claim:.2f} {times} as the start, {too_little}"
    final = finals((start, *promising), context, turns=limits.turns)
    remeasured = [place for place in final.measured if place > 0]
    if not remeasured:
        return start, f"the {best} of them did not fit when it was run again"
    if 0 not in final.measured:
        return final.best, "the start did not fit when it was run again"
    compared = final.winner or max(remeasured, key=lambda place: final.scores[place])
    pairs = zip(final.measured[compared], final.measured[0], strict=False)
    ratio = median(score(leader) / score(started) for leader, started in pairs)
    words = f"{ratio:.2f} {times} as the start"
    if final.winner == 0 or ratio < limits.gain:
        return start, f"the {best} of them was {words} when measured again in turn, {too_little}"
    return final.best, f"measured again in turn, {words}"


def relative_spread(rates: Sequence[float]) -> float | None:
    """The relative standard deviation of repeated measurements; None with a single one."""
    return stdev(rates) / mean(rates) if len(rates) > 1 else None


def estimate_ratios(
    rates: Mapping[int, Mapping[int, float]], reference: int, *, within: Mapping[int, float]
) -> dict[int, Ratio]:
    """Return each config's ratio of its rate to the reference's, with a 95 % interval.

    `rates` has the rate of each turn by config.
    `within` has each config's relative error of a single trial, which is used when nothing was repeated.
    Configs are compared turn by turn, so that drift cancels.
    """
    logs = {config: {turn: log(rate) for turn, rate in by_turn.items()} for config, by_turn in rates.items()}
    noise, freedom = _noise(logs, max(PRIOR_NOISE, *within.values()) if within else PRIOR_NOISE)
    quantile = _QUANTILES_95[freedom - 1] if freedom <= len(_QUANTILES_95) else _QUANTILE_95_OF_MORE
    ratios = {}
    for config, by_turn in logs.items():
        shared = [turn for turn in by_turn if turn in logs[reference]]
        if config == reference or not shared:
            continue
        difference = mean(by_turn[turn] - logs[reference][turn] for turn in shared)
        margin = quantile * noise * sqrt(2 / len(shared))
        ratios[config] = Ratio(times=exp(difference), low=exp(difference - margin), high=exp(difference + margin))
    return ratios
