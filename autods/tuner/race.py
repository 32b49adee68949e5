"""Race the rungs that could be faster than the first one that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf, log
from statistics import mean, stdev

from ..config.checkpointing import find_state, may_offload, name_state, why_impossible
from ..config.releases import set_precision
from ..config.rungs import unmet_need
from ..forecast.largest_batch import Fills
from ..forecast.partial_checkpointing import ShareEnd, rank_shares
from ..forecast.predict.step_time import CLOSE
from ..report.text import format_rate
from ..types import Fit, Record
from .batch_curve import BatchCurve, least_sample_s
from .batch_size import Growth
from .candidates import Candidate, in_precision, in_state, without_checkpointing
from .comparison import PRIOR_NOISE, comparison_words, finals
from .contestant import Contestant, make_contestant
from .ladder_walk import Lessons, WalkResult, untried_rungs
from .prospects import Prospect, favours, find_prospect, forecast_rate, has_choice, rank
from .trials import FitContext, fit_steps_to_budget, median_step_s, repeat_difference

_LAST_TRIALS = 2  # of the leader's growth, before the last comparison
_FEWEST_FINAL_STEPS = 2
_ERROR_MARGIN = 5  # standard deviations: few errors are known, and those of what the forecast praised most
_OTHER_SIZE = 1.25  # ratio of two micro batches of one config below which only the larger is compared
# Recomputing activations adds a third to forward and backward, so that leaving it out gains no more than this.
_WITHOUT_RECOMPUTING = 4 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """The result of a race.

    `best` is the winner's deciding trial, `growth` the growth of its micro batch.
    `others` has the best trial of each other config that fitted, best first.
    `reasons` tells why each config, by name, won or lost. How fast it is stands in its trials, and not here.
    """

    best: Record
    growth: Growth
    others: tuple[Record, ...]
    reasons: Mapping[str, str]


def run_race(walked: WalkResult, rungs: Sequence[Candidate], context: FitContext) -> RaceResult:
    """Grow the walk's winner, and race the untried rungs against it, unless the profile says "first-fit".

    Rivals enter in the order of forecast time, with one short trial at the micro batch that should be their best, or at
    the leader's where no time is forecast. A rival that could not lead by the best end of its forecast gets no
    trial. One whose step times show that no micro batch would make it the fastest leaves. The failure of another rung
    never decides. Those that stay in grow.

    Checkpointing costs every rung the same arithmetic, so the winner alone shows whether it pays. If it does not,
    rivals enter without it, and with it where memory limits them. Those that may lead are tried in the other allowed
    precisions. At last the leaders are measured again in turn.
    """
    profile = context.settings.profile
    leader = walked.find_entrant()
    leader.context, winner = context, leader.candidate
    rung = next(candidate for candidate in rungs if candidate.rung == winner.rung)
    recomputing = in_state(winner, find_state(rung.knobs))
    is_open = has_choice(recomputing, context)
    if not (winner.knobs.checkpointing and is_open and favours(without_checkpointing(winner), winner, context)):
        leader.run()
    alike = [other for other in walked.entrants if other.candidate.rung == winner.rung and other is not leader]
    race = _Race(context=context, lessons=walked.lessons, contestants=[leader, *alike])
    if profile.race.stop == "first-fit" and not is_open:
        return race.compare()  # it has nobody to race against, so its growth is over
    rivals = untried_rungs(rungs, walked) if profile.race.stop == "fastest" else ()
    if is_open:
        race.add([without_checkpointing(winner), recomputing])
    if is_open and not race.leader().candidate.knobs.checkpointing:
        plain = race.add([without_checkpointing(rival) for rival in rivals])
        lacking = [contestant.candidate.rung for contestant in plain if race.lacks_memory(contestant)]
        race.add([rival for rival in rivals if rival.rung in lacking])
    else:
        race.add(rivals)
    if is_open and race.leader().candidate.knobs.checkpointing:
        race.add(
            [
                without_checkpointing(candidate)
                for candidate in (*race.leading(_WITHOUT_RECOMPUTING), *race.passed_over())
            ]
        )
    race.add([*(race.list_partial() if is_open else ()), *race.list_offloaded()])
    for precision in context.settings.precisions:
        site = set_precision(context.settings.site, precision)
        able = (each for each in race.leading() if unmet_need(each.rung, site, context.facts) is None)
        race.add([in_precision(candidate, precision) for candidate in able])
    return race.decide()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """The winner of the last comparison, and its deciding trial.

    `dropped` is the best that did not fit or leave the headroom when it was measured again, with its first score.
    """

    winner: Contestant
    best: Record
    reason: str
    dropped: tuple[Contestant, float] | None = None


@dataclass(slots=True, kw_only=True)
class _Race:
    """A race under way. `contestants` are in the order of entry."""

    context: FitContext
    lessons: Lessons
    contestants: list[Contestant]

    def add(self, candidates: Sequence[Candidate]) -> list[Contestant]:
        """Let candidates in that are not in yet: all forecasts, then a first trial each, then their growth.

        The best prospects enter first. Without a forecast of time they enter at the leader's micro batch, or at twice
        that if memory ended the leader's growth. The forecasts come first because simulations would disturb timed
        trials.
        """
        context, limits, leader = self.context, self.context.settings.profile.race, self.leader()
        made = (make_contestant(each, context, limits.most_trials, limits.steps) for each in candidates)
        entering = {rival.name: rival for rival in made}  # two leaders may become one config
        names = {contestant.name for contestant in self.contestants}
        rivals = [rival for name, rival in entering.items() if name not in names]
        best, stop = leader.best(), leader.stop
        if not rivals or best is None:
            return []
        most = best.trial.knobs.micro_batch * (2 if stop is not None and stop.is_limit else 1)
        size = max(size for size in context.sizes if size <= most)
        for rival in rivals:
            # The first contestant has timed small micro batches, too.
            rival.like = (*self.contestants[0].all_records, *leader.all_records)
            rival.out = self.lessons.reason_to_skip(rival.candidate.rung, rival.candidate.ops)
        context.forecaster.prepare([rival.trial_at(size) for rival in rivals if rival.out is None])
        entry_sizes = [rival.check_forecast(size) if rival.out is None else size for rival in rivals]
        rates = [None if rival.prospect is None else rival.prospect.rate for rival in rivals]
        for rival, entry_size in rank(list(zip(rivals, entry_sizes, strict=True)), rates):
            rung = rival.candidate.rung
            rival.out = rival.out or self._why_hopeless(rival)
            rival.out = rival.out or self.lessons.reason_to_skip(rung, rival.candidate.ops)
            if rival.out is None and not self._may_go_on():
                rival.out = "not tried: the budget is spent"
            if rival.out is None:
                rival.enter(self._cut_entry(rival, entry_size, size), self.score_to_beat())
                decisive = (rival.entry or rival.records)[-1]  # a large batch can fail where the rung does not
                self.lessons = self.lessons.add(rung, decisive.outcome)
            self.contestants.append(rival)
        for contestant in (self.leader(), *rivals):
            self._grow(contestant)
        return rivals

    def _cut_entry(self, rival: Contestant, entry_size: int, size: int) -> int:
        """The micro batch to enter with: `size` where one step at a larger one exceeds the budget of a short trial.

        A rival that comes close to the leader by its forecast enters at its best all the same. A slower one shows at
        any size whether a larger one could win.
        """
        step, prospect = self.context.forecaster.step_time(rival.trial_at(entry_size)), rival.prospect
        if step is None or prospect is None or prospect.rate >= self.score_to_beat():
            return entry_size
        return min(entry_size, size) if step.seconds > rival.steps.budget_s else entry_size

    def _why_hopeless(self, rival: Contestant) -> str | None:
        """The reason that a contestant should not be tried by its forecast; None where it may lead.

        It may not where the best end of its forecast, which errors of others widen, lacks a gain over the leader that
        counts. Nor where the forecast finds its rung faster with the other checkpointing, which has been tried.
        """
        prospect, leader = rival.prospect, self.leader()
        for other in self.contestants:
            is_alike = other.candidate.rung == rival.candidate.rung and other.best() is not None
            if is_alike and favours(other.candidate, rival.candidate, self.context):
                return f"not tried: the forecast finds {other.name} faster"
        if prospect is None:
            return None
        most_rate = max(prospect.most_rate, self._most_by_errors(rival, prospect))
        most_rate = min(most_rate, self._most_without_copies(rival, prospect))
        if most_rate >= self.context.settings.profile.tune.gain * leader.score:
            return None
        most = f"at most {format_rate(most_rate)} samples/s, with micro batch {prospect.largest}"
        than = "is faster" if most_rate < leader.score else "is about as fast"
        return f"not tried: the forecast allows {most}, and {leader.name} {than}"

    def _most_by_errors(self, rival: Contestant, prospect: Prospect) -> float:
        """The rate that a rival may have if its forecast errs as those of the others did; 0 where none shows.

        Without it 30 % of error between rungs would cost six good answers of 100 (tests/benchmarks/regret.py).
        """
        best = [record for other in self.contestants if (record := other.best()) is not None]
        rates = [(self.context.score(record), forecast_rate(record.trial, self.context)) for record in best]
        errors = [log(measured / rate) for measured, rate in rates if rate is not None and measured > 0]
        expected = forecast_rate(rival.trial_at(prospect.largest), self.context)
        if not errors or expected is None:
            return 0.0
        return expected * exp(mean(errors) + (_ERROR_MARGIN * stdev(errors) if len(errors) > 1 else 0.0))

    def _most_without_copies(self, rival: Contestant, prospect: Prospect) -> float:
        """The most that a rival reaches that only copies beside what a measured one does; infinite for another rival.

        Its larger micro batch alone can make it faster. It gains no more than the forecast says if its copies take no
        time. What the measured one shows of the card and its links holds for both. A trial whose allocator ran full
        does not show it. Where steps are short, a trial costs seconds, and shows all.
        """
        largest, most_rate = rival.trial_at(prospect.largest), inf
        step = self.context.forecaster.step_time(largest)
        if step is None or step.seconds <= rival.steps.budget_s or step.copied_seconds >= step.seconds:
            return inf
        uncopied_rate = largest.knobs.train_batch(self.context.world_size) / (step.seconds - step.copied_seconds)
        for other in self.contestants:
            if other.best() is None or not rival.candidate.copies_beside(other.candidate):
                continue
            errors = [
                self.context.score(record) / expected
                for record in other.all_records
                if isinstance(record.outcome, Fit) and not record.outcome.alloc_retries
                if (expected := forecast_rate(record.trial, self.context)) is not None
            ]
            if errors:
                most_rate = min(most_rate, max(other.score, max(errors) * uncopied_rate))
        return most_rate

    def leader(self) -> Contestant:
        """The best so far; of equals the first."""
        return max(self.contestants, key=lambda contestant: contestant.score)

    def score_to_beat(self) -> float:
        """The leader's score less the noise, by which a bound may be wrong."""
        return (1 - self.context.noise) * self.leader().score

    def leading(self, speedup: float = 1.0) -> list[Candidate]:
        """The best candidates that would lead, give or take the noise, if they were `speedup` times as fast."""
        ranked = sorted(self.contestants, key=lambda contestant: contestant.score, reverse=True)
        ranked, least = ranked[: self.context.settings.profile.race.finalists + 1], self.score_to_beat()
        return [contestant.candidate for contestant in ranked if speedup * contestant.score >= least]

    def passed_over(self) -> list[Candidate]:
        """The candidates without a trial whose forecasts show that they cannot lead, in this state of checkpointing."""
        untried = [each for each in self.contestants if each.prospect is not None and not each.all_records]
        return [each.candidate for each in untried if self._why_hopeless(each)]

    def list_offloaded(self) -> list[Candidate]:
        """The leader with the inputs of its layers on the host, where memory ended its growth and that looks faster."""
        leader, settings = self.leader(), self.context.settings
        if not may_offload(leader.candidate.knobs, settings.source.form, settings.device):
            return []
        offloaded = in_state(leader.candidate, "offload")
        is_full = leader.stop is not None and leader.stop.is_limit
        return [offloaded] if is_full and favours(offloaded, leader.candidate, self.context) else []

    def list_partial(self) -> list[Candidate]:
        """The leader with a share of its layers recomputed, where that looks faster than all of them and none."""
        leader, context = self.leader(), self.context
        settings, best, state = context.settings, leader.best(), find_state(leader.candidate.knobs)
        obstacle = why_impossible("every-2", context.facts, settings.source.form)
        if obstacle is not None or best is None or settings.objective == "memory" or state not in ("on", "off"):
            return []
        all_layers, none = (self._find_or_make(in_state(leader.candidate, end)) for end in ("on", "off"))
        is_forecast = forecast_rate(best.trial, context) is not None

        def find_rate(end: Contestant, micro_batch: int) -> float | None:
            if is_forecast:
                return forecast_rate(end.trial_at(micro_batch), context)
            step_s = all_layers.curve.micro_step_at(micro_batch)
            if end is none:  # memory may have kept it from this micro batch
                step_s = max(none.curve.micro_step_at(micro_batch), step_s / _WITHOUT_RECOMPUTING)
            return micro_batch * context.world_size / step_s if all_layers.curve.micro_step_s else None

        def find_fills(end: Contestant, micro_batch: int) -> Fills | None:
            return context.forecaster.find_fills(end.trial_at(context.sizes[0]), micro_batch, context.usable_bytes)

        most, least = (ShareEnd(partial(find_fills, end), partial(find_rate, end)) for end in (all_layers, none))
        least_rate = (1 + CLOSE) * (find_rate(leader, best.trial.knobs.micro_batch) or inf)
        for share in rank_shares(most, least, context.facts.alike_layers, context.sizes):
            if share.samples_per_second <= least_rate:
                break
            rival = in_state(leader.candidate, name_state(share.every))
            # On cards its allocator may run full, although its peak lies between those of the ends.
            prospect = find_prospect(rival, context) if is_forecast else None
            if not is_forecast or (prospect is not None and prospect.rate > least_rate):
                return [rival]
        return []

    def _find_or_make(self, candidate: Candidate) -> Contestant:
        """The contestant of this config; one without trials where it is not in the race."""
        limits = self.context.settings.profile.race
        made = make_contestant(candidate, self.context, limits.most_trials, limits.steps)
        return next((contestant for contestant in self.contestants if contestant.name == made.name), made)

    def lacks_memory(self, contestant: Contestant) -> bool:
        """Whether it never fitted, or could lead, also while recomputing, if it had memory for any batch."""
        if contestant.best() is None:
            return True
        if contestant.most_by_memory() >= self.context.sizes[-1]:
            return False
        sample_s = self.sample_s(contestant)
        bound = contestant.curve.throughput_bound(contestant.most_by_time(sample_s), sample_s)
        return bound.rate * self.context.world_size / _WITHOUT_RECOMPUTING >= self.score_to_beat()

    def sample_s(self, contestant: Contestant) -> float:
        """Seconds of one more sample, at least: by configs that recompute as this one does, else by the others.

        Where no config has timed two micro batches, the forecast tells.
        """
        recomputes = contestant.candidate.knobs.checkpointing
        alike: list[BatchCurve] = []
        others: list[BatchCurve] = []
        for rival in self.contestants:
            (alike if rival.candidate.knobs.checkpointing == recomputes else others).append(rival.curve)
        ratio = 1 if recomputes is True else _WITHOUT_RECOMPUTING
        measured_s = least_sample_s(alike) or least_sample_s(others) / ratio
        return measured_s or contestant.forecast_sample_s()

    def _may_go_on(self) -> bool:
        """Whether one more trial leaves enough to measure the leaders again."""
        limits = self.context.settings.profile.race
        return self.context.may_run(1 + limits.finalists * min(1, limits.turns))

    def _grow(self, contestant: Contestant) -> None:
        """Measure further micro batches for as long as one may make it the fastest."""
        for _ in range(self.context.settings.profile.race.most_trials):
            if contestant.out is not None or not self._may_go_on():
                break
            size = self._promising_size(contestant)
            if size is None or not contestant.measure_near(size):
                break

    def _promising_size(self, contestant: Contestant) -> int | None:
        """The micro batch to measure next; sets `out` when even the upper bound is below the leader's score."""
        context, leader = self.context, self.leader()
        if context.settings.objective == "memory":
            return None
        curve, sample_s, world_size = contestant.curve, self.sample_s(contestant), context.world_size
        most, least = min(contestant.most_by_time(sample_s), context.sizes[-1]), self.score_to_beat()
        bound = curve.throughput_bound(most, sample_s)
        limit = ""
        if bound.rate * world_size >= least:  # the memory limit costs a simulation
            limit = ", the most that its memory allows," if contestant.most_by_memory() < most else ""
            most = min(most, contestant.most_by_memory())
            bound = curve.throughput_bound(most, sample_s)
        if bound.rate * world_size >= least:
            return bound.size
        if contestant is not leader:
            doubt = f"by its step times, give or take {self.context.noise:.0%}"
            contestant.out = f"no micro batch up to {int(most)}{limit} makes it as fast {doubt}"
        return None

    def decide(self) -> RaceResult:
        """Grow the leader once more with longer trials, and compare the leaders."""
        limits = self.context.settings.profile.race
        is_timed = limits.turns > 0 and self.context.settings.objective != "memory"
        if is_timed and self.context.may_run(_LAST_TRIALS + limits.finalists * limits.turns, limits.finals):
            self.leader().extend(limits.finals, _LAST_TRIALS)
        return self.compare()

    def compare(self) -> RaceResult:
        """Measure the leaders again in turn. Where other work slows down this machine, all that may lead, too.

        There, that reaches 0.965 of the optimum instead of 0.958 (tests/benchmarks/regret.py --busy, 60 seeds).
        """
        context, limits = self.context, self.context.settings.profile.race
        turns = 0 if context.settings.objective == "memory" else limits.turns
        before = len(context.memory.records)
        decision = self._measure_leaders_again(turns)
        for more in range(limits.finalists):
            if decision.dropped is None:
                break
            contestant, score = decision.dropped
            # A size a little smaller may lead still. The next one that was measured may be far smaller.
            if score >= context.score(decision.best) and not (more and self._fitting()):
                contestant.stop = None
                contestant.run()
            if not self._fitting() or (more and context.score(decision.best) >= self.score_to_beat()):
                break
            decision = self._measure_leaders_again(turns)  # those that follow join the rest
        if turns and context.noise > limits.noise:
            self._measure_all_again()
            decision = self._decide_by_timings(decision, context.memory.records[before:])
        return self._explain(decision)

    def _decide_by_timings(self, decision: _Decision, new: Sequence[Record]) -> _Decision:
        """Take the fastest of the `new` timings, where repeats of one config differ by more than the profile's noise.

        Where the new ones differ as much, all timings count.
        """
        context = self.context
        is_calm = repeat_difference(new) <= context.settings.profile.race.noise
        timed = [(record, owner) for owner in self._fitting() for record in owner.eligible()]
        timed = [(record, owner) for record, owner in timed if record in new] if is_calm else timed
        if not timed:
            return decision
        best, winner = max(timed, key=lambda item: context.score(item[0]))
        if (winner, best.trial.knobs) == (decision.winner, decision.best.trial.knobs):
            return decision
        name = f"{best.trial.rung} with micro batch {best.trial.knobs.micro_batch}"
        reason = f"{name} has the fastest timing; those of one config differ by up to {context.noise:.0%}"
        return _Decision(winner=winner, best=best, reason=reason)

    def _explain(self, decision: _Decision) -> RaceResult:
        """The result with a reason for each contestant."""
        winner = decision.winner
        winner.stop = winner.explain_end(self.sample_s(winner))  # the last comparison may have measured more
        best_word, _ = comparison_words(self.context.score)
        fitting = self._fitting()
        reasons = {winner.name: f"{best_word} of {len(fitting)} that fit: {decision.reason}"}
        if self.context.settings.profile.race.stop == "first-fit":
            reasons = {winner.name: "the first rung tried that fits"}
        names = {contestant.name for contestant in self.contestants}
        for contestant in self.contestants:
            stayed = "never fitted" if contestant.best() is None else "raced to the end"
            if contestant.best() is None and any(isinstance(each.outcome, Fit) for each in contestant.all_records):
                stayed = "left no headroom when it was measured again"
            reasons.setdefault(contestant.name, contestant.out or stayed)
            rung = contestant.candidate.rung.name
            if rung not in names:  # it was raced in another state of checkpointing
                why = "checkpointing would only cost it time"
                if find_state(contestant.candidate.knobs) == "offload":
                    why = "its layers' inputs would not fit on the device by the forecast"
                reasons.setdefault(rung, f"{why}: see {contestant.name}")
        behind = (contestant.best() for contestant in fitting if contestant is not winner)
        others = tuple(record for record in behind if record is not None)
        return RaceResult(best=decision.best, growth=winner, others=others, reasons=reasons)

    def _fitting(self) -> list[Contestant]:
        """The contestants that fitted, best first; of equals, in the ladder's order."""
        fitting = [contestant for contestant in self.contestants if contestant.best() is not None]
        return sorted(fitting, key=lambda contestant: contestant.score, reverse=True)

    def _measure_leaders_again(self, turns: int) -> _Decision:
        """Measure as many leaders again as the budget allows, with longer trials, in turn.

        None is measured again where the trials of all were as long: one of a 70B's takes minutes of all its cards.
        """
        context, limits, finalists = self.context, self.context.settings.profile.race, []
        close, earlier = self._close_to_leader(), tuple(context.memory.records)
        if all(self._was_long(record) for record, _ in close):
            turns = 0
        repeat = max((record.trial.repeat for record in earlier if record.trial.purpose == "race"), default=0)
        most = sum(context.may_run(count, limits.finals) for count in range(1, limits.finalists + 1))
        for record, _ in close[: max(1, most)]:
            steps = fit_steps_to_budget(limits.finals, median_step_s(record), least=_FEWEST_FINAL_STEPS)
            trial = replace(record.trial, steps=steps)
            finalists.append(replace(record, trial=replace(trial, purpose="race", repeat=repeat) if repeat else trial))
        affordable = sum(context.may_run(count * len(finalists), limits.finals) for count in range(1, turns + 1))
        final = finals(finalists, context, turns=affordable, purpose="race", lead=PRIOR_NOISE)
        for finalist, (_, owner) in zip(finalists, close, strict=False):
            rung, knobs, new = finalist.trial.rung, finalist.trial.knobs, context.memory.records[len(earlier) :]
            configs = [replace(knobs, keeps_headroom=keeps) for keeps in (False, True)]
            owner.records.extend(each for each in new if each.trial.rung == rung and each.trial.knobs in configs)
        is_measured = len(finalists) > 1 and affordable > 0
        lost = [close[place] for place in final.scores if place not in final.measured] if is_measured else []
        dropped = (lost[0][1], context.score(lost[0][0])) if lost else None
        return _Decision(winner=close[final.winner][1], best=final.best, reason=final.reason, dropped=dropped)

    def _measure_all_again(self) -> None:
        """Measure those again that may lead, give or take the noise that was seen, and grow them where that pays."""
        for contestant in self._fitting():
            best = contestant.best()
            if best is not None and contestant.score >= self.score_to_beat() and self._may_go_on():
                contestant.out, contestant.steps = None, self.context.settings.profile.race.finals
                contestant.measure(best.trial.knobs.micro_batch, purpose="race")
                self._grow(contestant)

    def _close_to_leader(self) -> list[tuple[Record, Contestant]]:
        """The trials that led, give or take the noise, best first; half the noise where the forecast, too, is slower.

        Long timings are less noisy.
        The runner-up is among them, unless the forecast agrees that it is slower, or the leader was timed for long.
        Where micro batches of one config are similar, the largest is kept unless a smaller one was clearly faster.
        """
        score, leader, fitting = self.context.score, self.leader(), self._fitting()
        best_record = leader.best()

        def is_close(record: Record, contestant: Contestant) -> bool:
            are_long = best_record is not None and self._was_long(record) and self._was_long(best_record)
            noise = PRIOR_NOISE if are_long else self.context.noise
            doubt = noise / (2 if leader.is_forecast_faster(contestant) else 1)
            return score(record) >= (1 - doubt) * leader.score

        timed = [(record, contestant) for contestant in fitting for record in contestant.eligible()]
        close = [(record, contestant) for record, contestant in timed if is_close(record, contestant)]
        close.sort(key=lambda item: score(item[0]), reverse=True)
        kept = self._drop_similar(close)
        best, first = kept[0]
        runner_up = next((contestant for contestant in fitting if contestant is not first), None)
        is_alone = all(owner is first for _, owner in kept)
        if runner_up is None or not is_alone or first.is_forecast_faster(runner_up) or self._was_long(best):
            return kept
        second = runner_up.best()
        return kept if second is None else [(best, first), (second, runner_up), *kept[1:]]

    def _was_long(self, record: Record) -> bool:
        """Whether a trial was timed for as long as the last comparison would time it, on a machine that is calm."""
        limits, outcome = self.context.settings.profile.race, record.outcome
        is_calm = self.context.noise <= limits.noise
        return is_calm and isinstance(outcome, Fit) and sum(outcome.step_s) >= limits.finals.budget_s

    def _drop_similar(self, timed: Sequence[tuple[Record, Contestant]]) -> list[tuple[Record, Contestant]]:
        """One trial of each config's similar micro batches; `timed` has the best first."""
        score = self.context.score
        kept: list[tuple[Record, Contestant]] = []
        for record, contestant in timed:
            size = record.trial.knobs.micro_batch
            for place, (other, owner) in enumerate(kept):
                other_size = other.trial.knobs.micro_batch
                if owner is contestant and max(size, other_size) < _OTHER_SIZE * min(size, other_size):
                    if size > other_size and score(record) >= (1 - 2 * PRIOR_NOISE) * score(other):
                        kept[place] = (record, contestant)
                    break
            else:
                kept.append((record, contestant))
        return kept
