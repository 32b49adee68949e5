"""Finals: repeated measurements, dropping out, and the winner."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.journal import Journal, TrialStore, trial_key
from autods.report.results.probe import Ratio
from autods.runner.testing import ScriptedRunner, failed, fit, out_of_memory
from autods.tuner.comparison import PRIOR_NOISE, FinalsResult, TurnModel, finals
from autods.tuner.trials import FitContext, samples_per_second
from autods.types import Knobs, Outcome, Record, Run, Trial
from tests.support.contexts import make_context


def comparing(run: Run, **settings: Any) -> FitContext:
    """1000 bytes are usable."""
    return make_context(run, headroom=0.0, device_bytes=1000, **settings)


def contestant(rung: str, speed: float = 100.0, *, peak: int = 500, repeat: int = 0) -> Record:
    trial = Trial(rung=rung, knobs=Knobs(micro_batch=4), purpose="race", repeat=repeat)
    return Record(id=1, trial=trial, outcome=fit(peak_bytes=peak, samples_per_second=speed), seconds=1.0)


def by_rung(speeds: Mapping[str, float]) -> Callable[[Trial], Outcome]:
    return lambda trial: fit(peak_bytes=500, samples_per_second=speeds[trial.rung])


def script(**speeds: list[float]) -> Callable[[Trial], Outcome]:
    """Each rung's speeds, measurement by measurement."""
    left: dict[str, Iterator[float]] = {rung: iter(each) for rung, each in speeds.items()}
    return lambda trial: fit(peak_bytes=500, samples_per_second=next(left[trial.rung]))


def held(
    answer: Callable[[Trial], Outcome], *contestants: Record, turns: int = 3, lead: float = math.inf
) -> tuple[FinalsResult, ScriptedRunner]:
    runner = ScriptedRunner(answer)
    final = finals(contestants, comparing(runner.run), turns=turns, lead=lead)
    return final, runner


def rungs(runner: ScriptedRunner) -> list[str]:
    return [trial.rung for trial in runner.trials]


def test_contestants_are_measured_in_turn() -> None:
    final, runner = held(by_rung({"a": 100, "b": 101, "c": 102}), contestant("a"), contestant("b"), contestant("c"))
    assert rungs(runner) == ["a", "b", "c"] * 3
    assert [trial.repeat for trial in runner.trials] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {trial.purpose for trial in runner.trials} == {"verify"}
    assert final.best.trial.rung == "c"
    assert len(runner.trials) == 9
    assert final.reason == (
        "c with micro batch 4 was the fastest of 3 measured again in 3 turns, within noise: "
        "1.01 times as fast as b with micro batch 4 (0.98 to 1.05)"
    )


def test_the_measurement_that_made_it_lead_does_not_count() -> None:
    final, _ = held(by_rung({"flattered": 100, "steady": 104}), contestant("flattered", 140), contestant("steady", 105))
    assert final.best.trial.rung == "steady"
    assert samples_per_second(final.best) == 104
    assert final.scores == {0: 100, 1: 104}


def test_the_median_decides_and_one_bad_turn_does_not() -> None:
    final, _ = held(script(a=[100, 102, 99], b=[110, 70, 111]), contestant("a"), contestant("b"))
    assert final.best.trial.rung == "b"
    assert samples_per_second(final.best) == 110


def test_of_two_measurements_the_slower_is_reported() -> None:
    final, _ = held(script(a=[100, 102], b=[110, 108]), contestant("a"), contestant("b"), turns=2)
    assert samples_per_second(final.best) == 108
    assert final.scores[1] == 109


def test_who_is_clearly_slower_is_measured_no_further() -> None:
    speeds = by_rung({"a": 100, "slow": 50, "b": 101})
    _, runner = held(speeds, contestant("a"), contestant("slow"), contestant("b"))
    assert rungs(runner) == ["a", "slow", "b", "a", "b", "a", "b"]


def test_it_ends_when_one_is_left() -> None:
    final, runner = held(by_rung({"a": 100, "slow": 80}), contestant("a"), contestant("slow"), turns=9)
    assert rungs(runner) == ["a", "slow"] * 2
    assert final.best.trial.rung == "a"


@pytest.mark.parametrize(
    ("first", "again", "turns"),
    [(96, 96, 1), (98, 98, 3), (104, 96, 3), (90, 101, 2)],  # the last is ahead in turn 1, and behind in all others
)
def test_what_lies_behind_by_the_lead_is_measured_no_further(first: float, again: float, turns: int) -> None:
    speeds = script(a=[100.0] * 3, b=[again, 96.0, 96.0] if again > 100 else [again] * 3)
    final, runner = held(speeds, contestant("a"), contestant("b", first), lead=0.03)
    assert rungs(runner) == ["a", "b"] * turns
    assert final.best.trial.rung == "a"


def test_noisy_turns_keep_alive_what_quiet_ones_drop() -> None:
    quiet = {"a": [100.0] * 6, "b": [88.0] * 6}
    noisy = {"a": [100.0, 88, 110, 100, 95, 104], "b": [88.0, 99, 80, 92, 96, 78]}
    assert len(held(script(**quiet), contestant("a"), contestant("b"), turns=6)[1].trials) < 12
    assert len(held(script(**noisy), contestant("a"), contestant("b"), turns=6)[1].trials) == 12


def test_the_reason_tells_a_winner_from_the_luckiest_of_equals() -> None:
    clear, _ = held(script(a=[100, 101], b=[130, 132]), contestant("a"), contestant("b"), turns=2)
    b, a = "b with micro batch 4", "a with micro batch 4"
    assert clear.reason.startswith(f"{b} is the fastest of 2 measured again in 2 turns: 1.30 times as fast as {a} (1.2")
    lucky, _ = held(script(a=[100, 101], b=[103, 104]), contestant("a"), contestant("b"), turns=2)
    reason = (
        f"{b} was the fastest of 2 measured again in 2 turns, within noise: 1.03 times as fast as {a} (0.95 to 1.11)"
    )
    assert lucky.reason == reason


def test_what_drifts_for_all_alike_is_no_noise() -> None:
    drifting = {"a": [100.0, 50.0, 25.0], "b": [85.0, 42.5, 21.25]}
    final, runner = held(script(**drifting), contestant("a"), contestant("b"))
    assert final.best.trial.rung == "a"
    assert len(runner.trials) == 4


def test_wide_spread_within_the_trials_asks_for_more_turns() -> None:
    def spread(trial: Trial) -> Outcome:
        return replace(fit(peak_bytes=500, samples_per_second={"a": 100, "b": 80}[trial.rung]), spread=0.2)

    assert len(held(spread, contestant("a"), contestant("b"))[1].trials) == 6


@pytest.mark.parametrize("again", [out_of_memory(), fit(peak_bytes=1001, samples_per_second=500)])
def test_who_does_not_fit_again_is_out(again: Outcome) -> None:
    final, runner = held(
        lambda trial: again if trial.rung == "b" else fit(peak_bytes=500, samples_per_second=100),
        contestant("a"), contestant("b", 200),
    )  # fmt: skip
    assert final.best.trial.rung == "a"
    assert final.scores == {0: 100, 1: 0}
    assert rungs(runner) == ["a", "b"]
    assert final.reason == "a with micro batch 4 is the fastest of 2 measured again in 1 turn: no other fitted again"


def test_what_never_left_the_headroom_has_only_to_run() -> None:
    final, _ = held(
        lambda trial: fit(peak_bytes=1100, samples_per_second=100) if trial.rung == "tight" else out_of_memory(),
        contestant("tight", peak=1100), contestant("b"),
    )  # fmt: skip
    assert final.best.trial.rung == "tight"


def test_a_fluke_is_asked_once_more_and_takes_no_turn() -> None:
    outcomes = {1: failed(), 4: fit(peak_bytes=1, samples_per_second=110)}
    final, runner = held(
        lambda trial: outcomes[trial.repeat] if trial.rung == "b" and trial.repeat in outcomes
        else fit(peak_bytes=1, samples_per_second=108 if trial.rung == "b" else 100),
        contestant("a"), contestant("b"),
    )  # fmt: skip
    assert final.best.trial.rung == "b"
    assert [trial.repeat for trial in runner.trials if trial.rung == "b"] == [1, 4, 2, 3]
    assert len(final.measured[1]) == 3


def test_when_nobody_fits_again_the_first_stays() -> None:
    first = contestant("a")
    final, _ = held(lambda trial: out_of_memory(), first, contestant("b"))
    assert final.best is first
    assert final.reason == "none of them fitted when it was run again"


def test_on_a_tie_the_earlier_wins() -> None:
    assert held(by_rung({"a": 100, "b": 100}), contestant("a"), contestant("b"))[0].best.trial.rung == "a"


def test_one_contestant_has_won_and_no_turns_measure_nothing() -> None:
    alone, runner = held(by_rung({}), contestant("a"))
    assert (alone.best.trial.rung, runner.trials) == ("a", [])
    unmeasured, runner = held(by_rung({}), contestant("a", 100), contestant("b", 110), turns=0)
    assert (unmeasured.best.trial.rung, runner.trials) == ("b", [])
    assert unmeasured.reason == "b with micro batch 4 was the fastest, and none was measured again"
    with pytest.raises(ValueError, match="contestant"):
        held(by_rung({}))


def test_any_objective_can_decide() -> None:
    peaks = {"a": 500, "lean": 300}
    runner = ScriptedRunner(lambda trial: fit(peak_bytes=peaks[trial.rung], samples_per_second=1))
    context = comparing(runner.run, objective="memory")
    final = finals([contestant("a"), contestant("lean")], context, turns=2)
    assert final.best.trial.rung == "lean"


def test_later_finals_are_not_answered_by_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    count = itertools.count(1)

    def execute(trial: Trial, id: int) -> Record:
        speed = {"a": 100, "b": 101}[trial.rung]
        return Record(id=next(count), trial=trial, outcome=fit(peak_bytes=1, samples_per_second=speed), seconds=1.0)

    memory = TrialStore(journal, journal.open(fingerprint="x"), execute, lambda event: None)
    context = comparing(memory.run)
    first = finals([contestant("a"), contestant("b")], context, turns=2)
    again = [first.measured[0][0], first.measured[1][1]]
    finals(again, context, turns=2)
    keys = [trial_key(record.trial) for record in memory.records]
    assert len(keys) == len(set(keys)) == 8


def made_up(
    speeds: dict[int, float], *, noise: float, drift: float, turns: int, seed: int
) -> dict[int, dict[int, float]]:
    """Config → turn → rate, on a machine that becomes slower by `drift` from turn to turn."""
    draw = random.Random(seed)
    return {
        config: {turn: speed * (1 - drift) ** turn * (1 + draw.gauss(0, noise)) for turn in range(turns)}
        for config, speed in speeds.items()
    }


def ratio(
    rates: Mapping[int, Mapping[int, float]], config: int, *, reference: int = 1, prior: float = PRIOR_NOISE
) -> Ratio:
    ratio = TurnModel.from_rates(rates, prior).ratio(config, reference)
    assert ratio is not None
    return ratio


def test_drift_from_turn_to_turn_is_no_noise() -> None:
    gain = ratio(made_up({1: 10, 2: 11}, noise=0.002, drift=0.3, turns=4, seed=1), 2)
    assert gain.differs
    assert gain.times == pytest.approx(1.1, rel=0.01)


def test_equal_configs_differ_in_at_most_one_of_ten_comparisons() -> None:
    equal = unequal = 0
    for seed in range(200):
        rates = made_up({1: 10, 2: 10, 3: 12}, noise=0.05, drift=0.1, turns=3, seed=seed)
        equal += ratio(rates, 2).differs
        unequal += ratio(rates, 3).differs
    assert equal <= 20
    assert unequal >= 140


def test_without_repeats_only_what_usual_noise_cannot_explain_differs() -> None:
    rates = {1: {0: 10.0}, 2: {0: 10.5}, 3: {0: 20.0}}
    assert not ratio(rates, 2).differs
    assert ratio(rates, 3).differs
    assert not ratio({1: {0: 10.0}, 3: {0: 13.0}}, 3, prior=0.3).differs


def test_configs_that_lack_different_turns_are_compared() -> None:
    """A trial of each failed once, by a fluke, as in a probe: neither shows noise by itself."""
    model = TurnModel.from_rates({1: {0: 10.0, 1: 20.0}, 2: {0: 11.0, 2: 30.0}}, PRIOR_NOISE)
    assert (model.noise, model.freedom) == (pytest.approx(PRIOR_NOISE), 2)
    compared = model.ratio(2, 1)
    assert compared is not None
    assert compared.times == pytest.approx(1.1)


def test_a_config_without_a_shared_turn_is_not_compared() -> None:
    assert TurnModel.from_rates({1: {0: 10.0}, 2: {1: 10.0}}, PRIOR_NOISE).ratio(2, 1) is None
