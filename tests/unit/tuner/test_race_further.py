"""The winner's micro batch once more, after the race: when a long trial is worth it, and what it changes."""

from __future__ import annotations

from collections.abc import Callable

from autods.config.profiles import GrowLimits
from autods.runner.testing import ScriptedRunner, surface
from autods.tuner.batch_size import Climb, Rules
from autods.tuner.race import Further
from autods.types import Knobs, Outcome, Record, Steps, Trial

MIB = 2**20
LIMIT = int(1000 * MIB / 0.95)  # 90 samples beside the states
FIRST = Trial(rung="zero2", knobs=Knobs(), purpose="walk")
RACE = Steps(warmup=1, timed=2, most_timed=2, budget_s=5.0)
FINALS = Steps(warmup=1, timed=2, most_timed=4, budget_s=20.0)


def machine(*, overhead_s: float = 4.0, sample_s: float = 0.1, limit: int = LIMIT) -> Callable[[Trial], Outcome]:
    return surface(
        limit_bytes=limit, state_bytes=100 * MIB, sample_bytes=10 * MIB, step_overhead_s=overhead_s, sample_s=sample_s
    )


def raced(answer: Callable[[Trial], Outcome], *sizes: int) -> tuple[Record, Climb, ScriptedRunner]:
    """A climb that measured these micro batches, the last of which won."""
    runner = ScriptedRunner(answer)
    rules = Rules(
        run=runner.run,
        limits=GrowLimits(most_trials=8, most_micro_batch=4096, gain=1.03),
        steps=RACE,
        usable_bytes=1000 * MIB,
        world_size=2,
        global_batch=None,
    )
    climb = Climb(rules=rules, first=FIRST, walked=runner.run(FIRST))
    best = [climb.measure(size) for size in sizes][-1]
    runner.trials.clear()
    return best, climb, runner


def after(spent_s: float, *, trials: int = 10) -> Further:
    return Further(steps=FINALS, sample_s=0.0, spent_s=spent_s, may_run=lambda more: more <= trials)


def test_a_winner_that_only_its_long_steps_held_back_grows_to_what_memory_holds() -> None:
    best, climb, runner = raced(machine(), 20, 40)
    found = after(spent_s=1000.0).grown(best, climb)
    assert found.trial.knobs.micro_batch == 90
    assert [trial.knobs.micro_batch for trial in runner.trials] == [90]
    assert climb.stop is not None
    assert "micro batch 90 is 1.38 times as fast as 40" in climb.stop.reason


def test_a_trial_takes_a_quarter_of_the_time_that_the_search_took_at_most() -> None:
    best, climb, runner = raced(machine(), 20, 40)
    found = after(spent_s=120.0).grown(best, climb)  # 30 s for three steps
    assert 55 <= found.trial.knobs.micro_batch <= 60
    assert after(spent_s=60.0).grown(found, climb) is found
    assert len(runner.trials) == 1


def test_what_promises_too_little_is_not_tried() -> None:
    best, climb, runner = raced(machine(overhead_s=0.05), 20, 40)
    assert after(spent_s=1000.0).grown(best, climb) is best
    assert not runner.trials


def test_a_larger_batch_that_turns_out_slower_is_not_taken() -> None:
    plain, behind = machine(), machine(overhead_s=9.5)
    best, climb, _ = raced(lambda trial: (behind if trial.knobs.micro_batch > 50 else plain)(trial), 20, 40)
    assert after(spent_s=1000.0).grown(best, climb) is best
    assert climb.stop is not None
    assert "micro batch 90 is 0.97 times as fast as 40" in climb.stop.reason


def test_one_that_runs_out_of_memory_is_followed_by_a_smaller_one() -> None:
    large, small = machine(), machine(limit=MIB)
    best, climb, runner = raced(lambda trial: (large if trial.knobs.micro_batch < 70 else small)(trial), 20, 40)
    found = after(spent_s=1000.0).grown(best, climb)
    assert [trial.knobs.micro_batch for trial in runner.trials] == [90, 60]
    assert found.trial.knobs.micro_batch == 60


def test_nothing_is_run_beyond_the_budget() -> None:
    best, climb, runner = raced(machine(), 20, 40)
    assert after(spent_s=1000.0, trials=0).grown(best, climb) is best
    assert not runner.trials
