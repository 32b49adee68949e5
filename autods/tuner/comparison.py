"""Compare configs by interleaved turns: A B C A B C …

Drift (clocks, heat, other processes) affects all configs of a turn alike. `TurnModel` takes the logarithm of a
measurement as a part of its turn, a part of its config, and noise. Its intervals decide between the finalists of a
race (`finals`), a tuned config and its start (`confirm_gain`), and the cells of a probe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, inf, log, sqrt
from statistics import mean, median, median_low, stdev

from ..report.results.measured import find_measured
from ..report.results.probe import Ratio
from ..types import Fit, Purpose, Record, Trial
from ..units import format_factor, format_factor_below
from .trials import FitContext, Score, run_with_retry, samples_per_second

# Prior of a trial's relative noise: 3 %, worth two degrees of freedom. The spread of steps within trials replaces it
# where that is larger.
PRIOR_NOISE = 0.03
_PRIOR_FREEDOM = 2
TURNS_WITHOUT_BUDGET = 2  # that confirm a gain where the budget has no trials for more
# Student's t by degrees of freedom from 1 on; the last value stands for more (Student 1908).
_TWO_SIDED_95 = (
    *(12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131),
    2.0,
)
_ONE_SIDED_99 = (31.82, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnModel:
    """Rates measured in turns: the logarithm of each is a part of its turn, a part of its config, and noise.

    `logs` maps each config to the logarithm of its rate by turn.
    `noise` is the relative error of one trial, known with so many degrees of `freedom`.
    """

    logs: Mapping[int, Mapping[int, float]]
    noise: float
    freedom: int

    @classmethod
    def from_rates(cls, rates: Mapping[int, Mapping[int, float]], prior: float) -> TurnModel:
        """The model of each config's rate by turn. `prior` is the noise of a trial before anything is repeated.

        Only configs that were measured in every turn show noise. The prior is worth two degrees of freedom.
        """
        logs = {config: {turn: log(rate) for turn, rate in by_turn.items()} for config, by_turn in rates.items()}
        turns = {turn for by_turn in logs.values() for turn in by_turn}
        whole = {config: by_turn for config, by_turn in logs.items() if by_turn.keys() == turns}
        squares, freedom = _PRIOR_FREEDOM * prior**2, _PRIOR_FREEDOM
        if len(turns) > 1 and len(whole) > 1:
            of_config = {config: mean(by_turn.values()) for config, by_turn in whole.items()}
            of_turn = {turn: mean(logs[config][turn] for config in whole) for turn in turns}
            middle = mean(of_config.values())
            squares += sum(
                (value - of_config[config] - of_turn[turn] + middle) ** 2
                for config, by_turn in whole.items()
                for turn, value in by_turn.items()
            )
            freedom += (len(whole) - 1) * (len(turns) - 1)
        return cls(logs=logs, noise=sqrt(squares / freedom), freedom=freedom)

    def ratio(self, config: int, reference: int, quantiles: Sequence[float] = _TWO_SIDED_95) -> Ratio | None:
        """The config's rate over the reference's, by the turns that have both; None where no turn has."""
        rates, others = self.logs.get(config, {}), self.logs.get(reference, {})
        differences = [value - others[turn] for turn, value in rates.items() if turn in others]
        if not differences:
            return None
        middle, quantile = mean(differences), quantiles[min(self.freedom, len(quantiles)) - 1]
        margin = quantile * self.noise * sqrt(2 / len(differences))
        return Ratio(times=exp(middle), low=exp(middle - margin), high=exp(middle + margin))

    def may_be_fastest(self) -> list[int]:
        """The configs that do not lie further behind the best than an equal one does in 99 of 100 cases."""
        best = max(self.logs, key=lambda config: mean(self.logs[config].values()))
        ratios = {config: self.ratio(config, best, _ONE_SIDED_99) for config in self.logs}
        return [config for config, ratio in ratios.items() if ratio is None or ratio.high >= 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalsResult:
    """The result of repeated measurements; a place is a contestant's position among the contestants.

    `winner` is a place, and `best` the winner's new record with its (lower) median score.
    `scores` maps a place to the median of its new measurements, 0 when it did not fit again.
    `measured` maps a place to its new records that count, by turn; `model` has the same by place.
    """

    winner: int
    best: Record
    reason: str
    scores: Mapping[int, float]
    measured: Mapping[int, Sequence[Record]]
    model: TurnModel


def finals(
    contestants: Sequence[Record],
    context: FitContext,
    *,
    turns: int,
    purpose: Purpose = "verify",
    lead: float = inf,
) -> FinalsResult:
    """Measure all again in turn, drop those that are clearly slower, until one is left or the turns are spent.

    The contestants' first measurements do not count, because these were chosen for being high. They only help to drop
    one that lies behind the best by more than `lead` in the mean of all its measurements, and in the last turn, too.
    On a tie the earlier contestant wins. One that no longer leaves the headroom is dropped; one that never did only has
    to run.

    `purpose` and a new repeat number keep the journal from answering with earlier trials.
    """
    if not contestants:
        raise ValueError("finals need a contestant")
    under_way = _Finals(contestants=contestants, context=context, purpose=purpose, turns=turns)
    if len(contestants) == 1 or turns < 1:
        return under_way.first_result()
    for turn in range(1, turns + 1):
        under_way.run_turn(turn)
        if len(under_way.drop_slower(lead)) <= 1:
            break
    return under_way.result()


@dataclass(slots=True, kw_only=True)
class _Finals:
    """Finals under way. `measured` has the records that count by place, `left` the places that may still win."""

    contestants: Sequence[Record]
    context: FitContext
    purpose: Purpose
    turns: int
    measured: dict[int, list[Record]] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = list(range(len(self.contestants)))
        self.measured = {place: [] for place in self.left}

    def run_turn(self, turn: int) -> None:
        """Measure each that is left. One that does not fit again is dropped, and its earlier turns do not count."""
        context = self.context
        before = [each.trial.repeat for each in self.contestants if each.trial.purpose == self.purpose]
        number = self.turns * ceil(max(before, default=0) / self.turns) + turn

        def run(trial: Trial) -> Record:  # a repeated failure must not take the next turn's number
            return context.run(trial if trial.repeat == number else replace(trial, repeat=number + self.turns))

        for place in tuple(self.left):
            first = self.contestants[place]
            record = run_with_retry(replace(first.trial, purpose=self.purpose, repeat=number), run)[-1]
            if context.fits(record) or (isinstance(record.outcome, Fit) and not context.fits(first)):
                self.measured[place].append(record)
            else:
                self.measured[place].clear()
                self.left.remove(place)

    def model(self, places: Iterable[int]) -> TurnModel:
        """The model of what these were measured to reach. Peaks of memory repeat: they have no prior noise."""
        score = self.context.score
        records = {place: self.measured[place] for place in places if self.measured[place]}
        spread = largest_spread(record for each in records.values() for record in each)
        prior = max(PRIOR_NOISE, spread) if score is samples_per_second else 0.0
        rates = {place: dict(enumerate(map(score, each))) for place, each in records.items()}
        return TurnModel.from_rates(rates, prior)

    def drop_slower(self, lead: float) -> list[int]:
        """Drop those that are clearly slower than the best, or behind it by `lead`, and return those that are left."""
        if len(self.left) > 1:
            self.left = self.model(self.left).may_be_fastest()
        score = self.context.score
        means = {
            place: mean(log(score(record)) for record in (self.contestants[place], *self.measured[place]))
            for place in self.left
        }
        best = max(self.left, key=lambda place: means[place], default=0)

        def is_behind(place: int) -> bool:
            last, others = self.measured[place][-1], self.measured[best][-1]
            return means[best] - means[place] > lead and score(last) < score(others)

        self.left = [place for place in self.left if not is_behind(place)]
        return self.left

    def first_result(self) -> FinalsResult:
        """The result by the first measurements: nothing is measured again."""
        scores = dict(enumerate(map(self.context.score, self.contestants)))
        winner = max(scores, key=lambda place: scores[place])  # the first of equals
        best_word, _ = comparison_words(self.context.score)
        many = f"was the {best_word}, and none was measured again"
        reason = f"{_name(self.contestants[winner])} {many if len(scores) > 1 else 'had no other that came close'}"
        best, model = self.contestants[winner], self.model(())
        return FinalsResult(winner=winner, best=best, reason=reason, scores=scores, measured={}, model=model)

    def result(self) -> FinalsResult:
        """The result by the turns. Where all that were left failed, one of those that were dropped as slower wins."""
        score = self.context.score
        scores = {place: median(map(score, each)) if each else 0.0 for place, each in self.measured.items()}
        counted = {place: tuple(each) for place, each in self.measured.items() if each}
        model = self.model(counted)
        if not counted:
            reason = "none of them fitted when it was run again"
            first = self.contestants[0]
            return FinalsResult(winner=0, best=first, reason=reason, scores=scores, measured={}, model=model)
        winner = max(self.left or counted, key=lambda place: scores[place])  # the first of equals
        middle = median_low(map(score, counted[winner]))
        return FinalsResult(
            winner=winner,
            best=next(record for record in counted[winner] if score(record) == middle),
            reason=self._explain(winner, scores, model),
            scores=scores,
            measured=counted,
            model=model,
        )

    def _explain(self, winner: int, scores: Mapping[int, float], model: TurnModel) -> str:
        """Why the winner won: beside the best of those that were measured in as many turns."""
        best_word, times = comparison_words(self.context.score)
        turns = len(self.measured[winner])
        name = _name(self.contestants[winner])
        reason = f"the {best_word} of {len(scores)} measured again in {turns} turn{'s' if turns > 1 else ''}"
        others = [place for place in model.logs if place != winner]
        if not others:
            return f"{name} is {reason}: no other fitted again"
        following = max(others, key=lambda place: (len(self.measured[place]), scores[place]))
        ratio = model.ratio(winner, following)
        assert ratio is not None  # every contestant has the first turn
        comparison = describe_ratio(ratio, f"{times} as {_name(self.contestants[following])}")
        return (
            f"{name} is {reason}: {comparison}" if ratio.low > 1 else f"{name} was {reason}, within noise: {comparison}"
        )


def describe_ratio(ratio: Ratio, words: str, below: float = inf) -> str:
    """'1.20 times as fast as ddp (1.15 to 1.25)', where the words are 'times as fast as ddp'.

    Where it is `below` a limit, it shows that.
    """
    times = format_factor_below(ratio.times, below) if ratio.times < below < inf else format_factor(ratio.times)
    return f"{times} {words} ({format_factor(ratio.low)} to {format_factor(ratio.high)})"


def largest_spread(records: Iterable[Record]) -> float:
    """The largest relative error of a trial's median step."""
    return max((record.outcome.spread for record in records if isinstance(record.outcome, Fit)), default=0.0)


def comparison_words(score: Score) -> tuple[str, str]:
    """The words for a higher score: "fastest" and "times as fast", or "best" and "times as good"."""
    return ("fastest", "times as fast") if score is samples_per_second else ("best", "times as good")


def _name(record: Record) -> str:
    return f"{record.trial.rung} with micro batch {record.trial.knobs.micro_batch}"


def confirm_gain(start: Record, leaders: Sequence[Record], context: FitContext) -> tuple[Record, str]:
    """The best of the leaders (best first) if it beats the start when measured again in turn, and the reason.

    It has to gain what the profile asks for, and more than noise explains. A leader whose first measurement lacks that
    gain over all of the start's is not measured again.
    """
    score, limits = context.score, context.settings.profile.tune
    best, times = comparison_words(score)
    usual = usual_score(start, context)
    promising = [leader for leader in leaders if score(leader) >= limits.gain * usual]
    too_little = f"less than the {limits.gain:g} that counts"
    if not promising:
        claim = format_factor_below(max(map(score, leaders)) / max(usual, 1e-12), limits.gain)
        return start, f"the {best} of them was {claim} {times} as the start, {too_little}"
    trials = (1 + len(promising)) * limits.turns
    turns = limits.turns if context.may_run(trials) else min(TURNS_WITHOUT_BUDGET, limits.turns)
    if not context.may_run((1 + len(promising)) * turns):
        promising = promising[:1]  # the budget was asked for the trials of one leader
    steps = promising[0].trial.steps  # what decided the race took longer; more steps of one of two tell little more
    final = finals((replace(start, trial=replace(start.trial, steps=steps)), *promising), context, turns=turns)
    remeasured = [place for place in final.measured if place > 0]
    if not remeasured:
        return start, f"the {best} of them did not fit, or left no headroom, when it was run again"
    if 0 not in final.measured:
        return final.best, "the start did not fit, or left no headroom, when it was run again"
    compared = final.winner or max(remeasured, key=lambda place: final.scores[place])
    ratio = final.model.ratio(compared, 0)
    assert ratio is not None  # both have the first turn
    words = describe_ratio(ratio, f"{times} as the start", below=limits.gain)
    if final.winner == 0 or ratio.times < limits.gain:
        return start, f"the {best} of them was {words} when measured again in turn, {too_little}"
    if ratio.low <= 1:
        return start, f"the {best} of them was {words} when measured again in turn, which noise explains"
    return final.best, f"measured again in turn, {words}"


def usual_score(record: Record, context: FitContext) -> float:
    """The score of the record's config over all its measurements, one of which may have been disturbed."""
    trial = record.trial
    measured = find_measured(context.memory.records, trial.rung, trial.knobs)
    is_rate = context.score is samples_per_second  # peaks of memory repeat
    return measured.samples_per_second if is_rate and measured is not None else context.score(record)


def relative_deviation(rates: Sequence[float]) -> float | None:
    """The relative standard deviation of repeated measurements; None with a single one."""
    return stdev(rates) / mean(rates) if len(rates) > 1 else None
