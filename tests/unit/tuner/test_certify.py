"""The certificate: the exams, backing off, and the sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

import pytest

from autods.errors import EnvironmentBroken
from autods.forecast.values import RungForecast
from autods.runner.testing import failed, out_of_memory, surface
from autods.runner.testing import fit as scripted_fit
from autods.tuner.certify import TOLERANCE, find_tolerance
from autods.tuner.forecaster import Forecaster
from autods.types import CardUse, Examined, Fit, Knobs, Outcome, Phase, Record, Steps, Tier, TierUse, Trial
from tests.support.certificates import DID, EXAM, LIMIT, MIB, TIMED, certifying, passes, timed, trial
from tests.support.forecasters import scripted_forecast
from tests.support.walks import SETTINGS


def longest(
    sample: int = 100 * MIB, state: int = 200 * MIB, needs: Mapping[str, int] | None = None
) -> Callable[[Trial], Outcome]:
    """On the longest batch the peak is a line in the micro batch; `needs`: other states by rung."""

    def answer(asked: Trial) -> Outcome:
        if asked.exam != "worst_case":
            return passes(asked)
        peak = (needs or {}).get(asked.rung, state) + sample * asked.knobs.micro_batch
        return passes(asked, peak) if peak <= LIMIT else out_of_memory(missing_bytes=sample // 2)

    return answer


def test_a_winner_that_holds_is_certified_in_one_trial() -> None:
    winner = timed(trial("zero2", 4))
    run = certifying(longest(), winner)
    assert run.certified.best is winner
    certificate = run.certified.certificate
    assert certificate.passed
    assert [(one.exam, one.steps, one.purpose, one.repeat) for one in run.trials] == [
        ("worst_case", EXAM, "certify", 0)
    ]
    assert (certificate.batch_shape, certificate.draws) == ((8, 2048), 256)
    assert (certificate.optimizer_steps, certificate.evaluated, certificate.alloc_retries) == (2, True, 0)
    assert certificate.checkpoint is not None
    assert (certificate.checkpoint.bytes, certificate.checkpoint.restored) == (640 * MIB, True)
    assert run.said == ""
    assert "zero2 (micro batch 4) holds" in run.certified.reason


def test_the_headroom_of_each_limited_tier_is_in_bytes() -> None:
    def answer(asked: Trial) -> Outcome:
        memory: dict[Tier, TierUse] = {
            "device": TierUse(peak_bytes=960 * MIB, limit_bytes=LIMIT),
            "host": TierUse(peak_bytes=3 * MIB, limit_bytes=5 * MIB),
            "pinned": TierUse(peak_bytes=3 * MIB),
        }
        return replace(passes(asked), memory=memory, card=card)

    card: CardUse | None = None
    certificate = certifying(answer, timed(trial("zero2", 4))).certified.certificate
    assert certificate.passed  # the exam has to fit; the share that the search leaves free is only told
    assert certificate.headroom_bytes == {"device": 40 * MIB, "host": 2 * MIB}
    assert certificate.headroom_kept is False
    card = CardUse(allocated_bytes=800 * MIB, reserved_bytes=900 * MIB, in_use_bytes=860 * MIB)  # 100 MiB are cached
    certificate = certifying(answer, timed(trial("zero2", 4))).certified.certificate
    assert certificate.headroom_bytes["device"] == 140 * MIB
    assert certificate.headroom_kept


def test_a_winner_backs_off_where_the_longest_batch_lacks_memory() -> None:
    run = certifying(longest(), timed(trial("zero2", 32)))  # 8 fit
    best = run.certified.best
    assert run.certified.certificate.passed
    assert 4 <= best.trial.knobs.micro_batch <= 8
    assert best.trial.exam is None
    assert best.trial.steps == TIMED
    assert isinstance(best.outcome, Fit)
    assert run.exams[-1] == ("zero2", best.trial.knobs.micro_batch)
    assert "zero2 from micro batch 32 to" in run.said
    assert "ran out of device memory in forward" in run.said


def test_backing_off_takes_ever_longer_steps() -> None:
    def answer(asked: Trial) -> Outcome:
        short = asked.exam == "worst_case" and asked.knobs.micro_batch > 5
        return out_of_memory() if short else passes(asked, 900 * MIB)

    run = certifying(answer, timed(trial("zero2", 40)))
    assert [size for _, size in run.exams] == [40, 20, 5]


def test_backing_off_ends_at_the_smallest_trainable_batch() -> None:
    too_small = replace(failed(action="fix_code"), wants_larger_batch=True)
    seen = [Record(id=9, trial=trial("ddp", 1), outcome=too_small, seconds=1.0)]
    run = certifying(longest(needs={"zero2": LIMIT}), timed(trial("zero2", 4)), seen=seen)
    assert [size for _, size in run.exams] == [4, 2]
    assert not run.certified.certificate.passed


def test_a_failed_size_above_one_that_fits_is_no_lower_limit() -> None:
    odd = replace(failed(action="fix_config"), wants_larger_batch=True)
    seen = [Record(id=9, trial=trial("zero2", 9), outcome=odd, seconds=1.0), timed(trial("zero2", 4))]
    run = certifying(longest(), timed(trial("zero2", 12)), seen=seen)
    assert run.certified.certificate.passed
    assert run.certified.best.trial.knobs.micro_batch < 9


@pytest.mark.parametrize(("lacks", "exams"), [(True, [8, 8, 4]), (False, [8, 8])])
def test_a_full_allocator_is_examined_without_the_headroom(lacks: bool, exams: list[int]) -> None:
    def answer(asked: Trial) -> Outcome:
        is_full = asked.exam is not None and asked.knobs.micro_batch > 4
        if is_full and asked.knobs.keeps_headroom and lacks:
            return out_of_memory()
        return passes(asked, 900 * MIB, retries=3 if is_full else 0)

    run = certifying(answer, timed(trial("zero2", 8)))
    assert run.exams == [("zero2", size) for size in exams]
    assert run.certified.certificate.passed
    assert run.certified.best.trial.knobs.keeps_headroom is not lacks
    assert "without the headroom: on the longest batch, micro batch 8 fits, but its allocator ran full" in run.said


def test_an_allocator_kept_out_of_the_headroom_may_run_full() -> None:
    def answer(asked: Trial) -> Outcome:
        kept = passes(asked, 890 * MIB, retries=3)
        return replace(kept, memory={"device": TierUse(peak_bytes=890 * MIB, limit_bytes=900 * MIB)})

    winner = timed(trial("zero2", 8))
    winner = replace(winner, trial=replace(winner.trial, knobs=replace(winner.trial.knobs, keeps_headroom=True)))
    certificate = certifying(answer, winner).certified.certificate
    assert certificate.passed
    assert (certificate.alloc_retries, certificate.headroom_kept) == (3, True)
    assert certificate.headroom_bytes == {"device": LIMIT - 890 * MIB}


def test_backing_off_keeps_the_global_batch() -> None:
    run = certifying(longest(), timed(trial("zero2", 12, accumulation=1)), global_batch=24)
    assert {one.knobs.train_batch(2) for one in run.trials} == {24}
    assert run.certified.best.trial.knobs == Knobs(micro_batch=6, accumulation=2, checkpointing=False)


def test_when_no_smaller_batch_helps_the_runner_up_is_certified() -> None:
    runner_up = timed(trial("zero3", 4), 51)
    run = certifying(longest(needs={"zero2": LIMIT}), timed(trial("zero2", 4)), alternates=[runner_up])
    assert run.certified.best is runner_up
    assert run.certified.certificate.passed
    assert run.exams == [("zero2", 4), ("zero2", 2), ("zero2", 1), ("zero3", 4)]
    assert (
        "from zero2 (micro batch 4) to zero3 (micro batch 4): on the longest batch, micro batch 1 ran out" in run.said
    )


def test_a_runner_up_that_needs_no_less_is_not_tried() -> None:
    hopeless = [timed(trial("zero2", 2), 51), timed(trial("zero2", 1, settings={"a": 1}), 52)]
    runner_up = timed(trial("zero3", 4), 53)
    run = certifying(longest(needs={"zero2": LIMIT}), timed(trial("zero2", 1)), alternates=[*hopeless, runner_up])
    assert run.exams == [("zero2", 1), ("zero3", 4)]


def test_a_rung_may_hold_only_with_its_smaller_buckets() -> None:
    def answer(asked: Trial) -> Outcome:
        short = asked.exam == "worst_case" and asked.knobs.settings["bucket"] == 2
        return out_of_memory() if short else passes(asked)

    untuned, leaner = timed(trial("zero2", 1, settings={"bucket": 1}), 51), timed(trial("zero3", 1), 52)
    run = certifying(answer, timed(trial("zero2", 1, settings={"bucket": 2})), alternates=[untuned, leaner])
    assert run.certified.best is untuned
    assert run.exams == [("zero2", 1), ("zero2", 1)]


def test_a_rung_may_hold_only_with_checkpointing() -> None:
    def answer(asked: Trial) -> Outcome:
        short = asked.exam == "worst_case" and not asked.knobs.checkpointing
        return out_of_memory() if short else passes(asked)

    leaner = timed(trial("zero2", 1, checkpointing=True), 51)
    assert certifying(answer, timed(trial("zero2", 1)), alternates=[leaner]).certified.best is leaner


def test_an_untimed_runner_up_is_timed_at_the_global_batch() -> None:
    walked = timed(trial("zero3", 1, steps=Steps()), 51)
    run = certifying(
        longest(needs={"zero2": LIMIT}), timed(trial("zero2", 1, accumulation=8)), alternates=[walked], global_batch=16
    )
    best = run.certified.best.trial
    assert (best.rung, best.steps, best.purpose, best.exam) == ("zero3", TIMED, "verify", None)
    assert best.knobs.train_batch(2) == 16


def test_memory_apart_from_the_batch_causes_no_smaller_batch() -> None:
    def answer(asked: Trial) -> Outcome:
        if asked.rung == "zero3" and asked.exam == "worst_case":
            return replace(out_of_memory(tier="host"), phase="save")
        return passes(asked)

    runner_up = timed(trial("zero2", 1), 51)
    same_rung = timed(trial("zero3", 1), 52)
    run = certifying(answer, timed(trial("zero3", 16)), alternates=[same_rung, runner_up])
    assert run.exams == [("zero3", 16), ("zero2", 1)]
    assert "ran out of host memory in save" in run.said


@pytest.mark.parametrize(
    ("phase", "part", "evaluated", "unreached"),
    [
        ("evaluate", "evaluation failed", False, "no checkpoint was saved"),
        ("save", "saving the checkpoint failed", True, "no checkpoint was loaded"),
        ("load", "loading the checkpoint failed", True, ""),
    ],
)
def test_a_failed_save_is_said_and_the_config_kept(phase: Phase, part: str, evaluated: bool, unreached: str) -> None:
    def answer(asked: Trial) -> Outcome:
        broken = failed(failure="infrastructure", action="fix_environment", evidence="OSError: No space left\nmore")
        return replace(broken, phase=phase, advice="free some space") if asked.exam else passes(asked)

    winner = timed(trial("zero3", 16))
    run = certifying(answer, winner, alternates=[timed(trial("zero2", 1), 51)])
    certificate = run.certified.certificate
    assert run.certified.best is winner
    assert not certificate.passed
    assert certificate.failures == (f"{part} (rank 0, {phase}): OSError: No space left; free some space",)
    assert certificate.evaluated is evaluated
    assert certificate.optimizer_steps == 2  # the steps on the longest batch were run
    assert unreached in run.said
    assert part in run.certified.reason
    assert len(run.trials) == 1


def test_a_workload_without_longest_batch_keeps_its_config() -> None:
    def answer(asked: Trial) -> Outcome:
        broken = failed(failure="user_code", action="fix_code", evidence="IndexError: position 4096")
        return replace(broken, phase="forward") if asked.exam else passes(asked)

    winner = timed(trial("zero3", 16))
    run = certifying(answer, winner)
    assert run.certified.best is winner
    assert not run.certified.certificate.passed
    assert "the longest batch failed (rank 0, forward): IndexError: position 4096" in run.said
    assert run.certified.certificate.optimizer_steps == 0


def test_what_was_left_out_is_said_and_does_not_pass() -> None:
    def answer(asked: Trial) -> Outcome:
        did = replace(DID, checkpoint_bytes=None, save_s=None, load_s=None, restored=None, left_out=("disk too small",))
        return replace(passes(asked), examined=did)

    certificate = certifying(answer, timed(trial("zero3", 16))).certified.certificate
    assert not certificate.passed
    assert certificate.not_checked == ("disk too small",)
    assert certificate.checkpoint is None


def test_what_nobody_says_was_left_out_is_found_missing() -> None:
    def answer(asked: Trial) -> Outcome:
        return replace(passes(asked), examined=Examined(batch_shape=(1, 8), draws=2))

    certificate = certifying(answer, timed(trial("zero3", 16))).certified.certificate
    assert certificate.not_checked == ("evaluation was not run", "no checkpoint was saved")
    assert not certificate.passed


def test_steps_alone_prove_nothing_about_the_longest_batch() -> None:
    run = certifying(lambda asked: scripted_fit(peak_bytes=1), timed(trial("zero3", 16)))
    assert not run.certified.certificate.passed
    assert "were not checked" in run.said


def test_a_checkpoint_that_loads_to_another_loss_does_not_pass() -> None:
    run = certifying(
        lambda asked: replace(passes(asked), examined=replace(DID, restored=False)), timed(trial("zero3", 16))
    )
    assert not run.certified.certificate.passed
    assert "does not evaluate to the loss of the saved one" in run.said


def test_a_leak_does_not_pass_and_its_end_is_foretold() -> None:
    """400 MiB are used of 1,000 after the exam's two steps, and each step takes 32 more."""

    def answer(asked: Trial) -> Outcome:
        ran = passes(asked, 400 * MIB)
        return replace(ran, examined=replace(DID, growth_bytes=32 * MIB)) if asked.exam else ran

    certificate = certifying(answer, timed(trial("zero3", 16))).certified.certificate
    assert not certificate.passed
    assert (certificate.growth_bytes, certificate.runs_out_after_steps) == (32 * MIB, 2 + 600 // 32)
    assert certificate.failures == (
        "a step holds 32.0 MiB more of the device's memory than the one before: it will run out after about 20 steps",
    )


def test_a_fluke_is_asked_once_more() -> None:
    flaky = iter([True])

    def answer(asked: Trial) -> Outcome:
        return failed() if asked.exam and next(flaky, False) else passes(asked)

    run = certifying(answer, timed(trial("zero3", 16)))
    assert run.certified.certificate.passed
    assert [one.repeat for one in run.trials] == [0, 1]


@pytest.mark.parametrize("most_trials", [1, 2, 3])
def test_no_more_trials_are_run_than_may_be_and_that_is_said(most_trials: int) -> None:
    winner = timed(trial("zero2", 64))
    run = certifying(lambda asked: out_of_memory() if asked.exam else passes(asked), winner, most_trials=most_trials)
    assert len(run.trials) == most_trials
    assert run.certified.best is winner
    assert not run.certified.certificate.passed
    assert "no config was proven" in run.certified.reason
    assert "trials" in run.certified.reason


def test_a_config_without_a_timed_trial_is_not_taken() -> None:
    winner = timed(trial("zero2", 2))
    run = certifying(longest(needs={"zero2": 850 * MIB}), winner, most_trials=2)
    assert run.exams == [("zero2", 2), ("zero2", 1)]
    assert run.certified.best is winner
    assert not run.certified.certificate.passed


def test_when_nothing_holds_the_winner_stays_with_a_reason() -> None:
    winner = timed(trial("zero2", 1))
    run = certifying(longest(state=LIMIT), winner, alternates=[timed(trial("zero3", 1), 51)])
    assert run.certified.best is winner
    assert not run.certified.certificate.passed
    assert run.exams == [("zero2", 1), ("zero3", 1)]
    assert (
        "no config was found that holds: zero3, on the longest batch, micro batch 1 ran out of device memory"
        in run.certified.reason
    )


def test_nothing_is_run_twice() -> None:
    smaller = timed(trial("zero2", 2), 51)  # growing timed it already
    run = certifying(longest(sample=400 * MIB), timed(trial("zero2", 4)), alternates=[smaller])
    assert run.certified.best is smaller
    assert all(one.exam == "worst_case" for one in run.trials)
    assert len({repr(one) for one in run.trials}) == len(run.trials)


def test_a_leaner_rung_that_cannot_fit_is_not_tried() -> None:
    class Foresees(Forecaster):
        def forecast(self, trial: Trial) -> RungForecast:
            return scripted_forecast(trial.rung, "cannot_fit" if trial.rung == "zero2-offload" else "fits")

    needs = {"zero2": LIMIT, "zero2-offload": LIMIT}
    leaner = ("zero2-offload", "zero3")
    run = certifying(longest(needs=needs), timed(trial("zero2", 1)), untried=leaner, forecaster=Foresees())
    assert run.certified.best.trial.rung == "zero3"
    assert [one.rung for one in run.trials if one.purpose == "walk"] == ["zero3"]


def test_leaner_rungs_are_tried_only_when_no_known_config_holds() -> None:
    leaner = ("zero2-offload", "zero3", "zero3-offload")
    holds = certifying(longest(), timed(trial("zero2", 4)), untried=leaner)
    assert holds.certified.certificate.passed
    assert {one.rung for one in holds.trials} == {"zero2"}
    needs = {"zero2": LIMIT, "zero2-offload": LIMIT}
    run = certifying(longest(needs=needs), timed(trial("zero2", 1)), untried=leaner)
    assert run.certified.best.trial.rung == "zero3"
    assert run.certified.certificate.passed
    assert [one.rung for one in run.trials if one.purpose == "walk"] == ["zero2-offload", "zero3"]
    assert "taken instead of zero2 (micro batch 1)" in run.certified.reason


def test_room_that_turns_out_to_be_none_is_left() -> None:
    def answer(asked: Trial) -> Outcome:
        short = asked.exam == "worst_case" and asked.knobs.micro_batch > 5
        return out_of_memory() if short else passes(asked, 600 * MIB)

    run = certifying(answer, timed(trial("zero2", 10)))
    assert run.exams == [("zero2", 10), ("zero2", 5), ("zero2", 7)]
    assert run.certified.best.trial.knobs.micro_batch == 5
    assert run.certified.certificate.passed


def test_after_halving_the_room_that_is_left_is_used() -> None:
    def answer(asked: Trial) -> Outcome:
        peak = 20 * MIB * asked.knobs.micro_batch  # 47 leave the headroom
        if asked.exam == "worst_case" and peak > LIMIT:
            return out_of_memory()
        return passes(asked, peak if asked.exam else MIB)

    run = certifying(answer, timed(trial("zero2", 60)))
    assert [size for _, size in run.exams] == [60, 30, 47]
    assert run.certified.best.trial.knobs.micro_batch == 47
    assert "from micro batch 30 up to 47" in run.said
    shared = certifying(answer, timed(trial("zero2", 96)), global_batch=192)  # the divisors of 96: 48 is the next
    assert [size for _, size in shared.exams] == [96, 48]
    assert certifying(answer, timed(trial("zero2", 60)), most_trials=3).certified.best.trial.knobs.micro_batch == 30


@pytest.mark.parametrize("global_batch", [None, 64, 96])
@pytest.mark.parametrize("largest", [1, 2, 3, 5, 8, 13, 31, 32])
def test_backing_off_finds_a_micro_batch_that_holds_in_few_trials(largest: int, global_batch: int | None) -> None:
    shape = surface(limit_bytes=LIMIT, state_bytes=100 * MIB, sample_bytes=int(900 * MIB / (largest + 0.5)))

    def answer(asked: Trial) -> Outcome:
        said = shape(asked) if asked.exam == "worst_case" else passes(asked)
        return replace(said, examined=DID) if isinstance(said, Fit) else said

    start = trial("zero2", 32, accumulation=1 if global_batch is None else global_batch // 64)
    run = certifying(answer, timed(start), global_batch=global_batch and global_batch // 64 * 64)
    assert run.certified.certificate.passed
    assert run.certified.best.trial.knobs.micro_batch <= largest
    assert run.certified.best.trial.knobs.micro_batch >= largest // 3
    assert len(run.trials) <= 8


def test_a_certificate_is_plain_json() -> None:
    plain = asdict(certifying(longest(), timed(trial("zero2", 4))).certified.certificate)
    assert plain["checkpoint"]["bytes"] == 640 * MIB
    assert plain["headroom_bytes"] == {"device": 400 * MIB}
    assert plain["parity"] is None


def test_a_machine_fault_does_not_shrink_the_batch() -> None:
    exams: list[Trial] = []

    def answer(asked: Trial) -> Outcome:
        exams.append(asked)
        return replace(out_of_memory(tier="device", action="fix_environment"), phase="forward")

    with pytest.raises(EnvironmentBroken):
        certifying(answer, timed(trial("zero2", 8)))
    assert len(exams) == 1


def test_a_peak_beyond_the_limit_is_no_fit() -> None:
    def answer(asked: Trial) -> Outcome:
        return passes(asked, 300 * MIB * asked.knobs.micro_batch if asked.exam else MIB)

    run = certifying(answer, timed(trial("zero2", 4)))
    assert run.exams == [("zero2", 4), ("zero2", 2), ("zero2", 3)]
    assert "on the longest batch, micro batch 4 needs 1.2 GiB of 1000.0 MiB" in run.said


def test_a_fluke_of_the_last_trial_is_not_asked_again() -> None:
    run = certifying(lambda asked: failed(), timed(trial("zero2", 4)), most_trials=1)
    assert len(run.trials) == 1
    assert "the longest batch failed (rank 0, step): exit code 3" in run.said


@pytest.mark.parametrize("short", [replace(out_of_memory(), phase="init"), out_of_memory(tier="host")])
def test_only_device_memory_that_the_batch_takes_shrinks_the_batch(short: Outcome) -> None:
    runner_up = timed(trial("zero3", 4), 51)
    run = certifying(
        lambda asked: short if asked.exam and asked.rung == "zero2" else passes(asked),
        timed(trial("zero2", 64)),
        alternates=[runner_up],
    )
    assert run.exams == [("zero2", 64), ("zero3", 4)]


def test_a_little_room_is_not_worth_an_exam() -> None:
    def answer(asked: Trial) -> Outcome:
        peak = 30 * MIB * asked.knobs.micro_batch  # 31 would leave the headroom
        return out_of_memory() if asked.exam and peak > LIMIT else passes(asked, peak if asked.exam else MIB)

    assert certifying(answer, timed(trial("zero2", 60))).exams == [("zero2", 60), ("zero2", 30)]


def test_trials_with_recomputing_say_nothing_of_memory_without() -> None:
    def answer(asked: Trial) -> Outcome:
        peak = 100 * MIB * asked.knobs.micro_batch
        if asked.exam and peak > LIMIT:
            return out_of_memory(missing_bytes=peak - LIMIT)
        return passes(asked, min(peak, LIMIT))

    recomputing = timed(trial("zero2", 1, checkpointing=True), 1, peak=399 * MIB)
    run = certifying(answer, timed(trial("zero2", 12)), alternates=[recomputing])
    assert run.exams == [("zero2", 12), ("zero2", 6), ("zero2", 9)]


def test_a_smaller_batch_must_fit_when_it_is_timed() -> None:
    def answer(asked: Trial) -> Outcome:
        size = asked.knobs.micro_batch
        if asked.exam:
            return passes(asked, 900 * MIB) if size <= 8 else out_of_memory()
        return passes(asked, retries=size // 8)

    run = certifying(answer, timed(trial("zero2", 16)))
    assert run.certified.best.trial.knobs.micro_batch == 4
    assert "on the usual batch, micro batch 8 fits, but its allocator ran full 1 time in the steps" in run.said


def test_a_winner_whose_allocator_ran_full_is_judged_by_its_exam() -> None:
    pressed = timed(trial("zero2", 4))
    assert isinstance(pressed.outcome, Fit)
    pressed = replace(pressed, outcome=replace(pressed.outcome, alloc_retries=2))
    run = certifying(longest(), pressed)
    assert run.certified.best is pressed
    assert len(run.trials) == 1


def test_a_winner_that_was_measured_again_is_not_measured_once_more() -> None:
    winner = timed(replace(trial("zero2", 4), purpose="verify", repeat=2))
    run = certifying(longest(), winner)
    assert run.certified.best is winner
    assert [one.repeat for one in run.trials] == [0]


def test_a_runner_up_that_is_no_usual_fit_is_passed_over() -> None:
    fits = timed(trial("zero3", 1), 51)
    assert isinstance(fits.outcome, Fit)
    alternates = [
        replace(fits, outcome=replace(fits.outcome, alloc_retries=1)),
        replace(fits, trial=replace(fits.trial, limited=False)),
        replace(fits, outcome=out_of_memory()),
    ]
    run = certifying(longest(needs={"zero2": LIMIT}), timed(trial("zero2", 1)), alternates=alternates)
    assert run.exams == [("zero2", 1)]
    assert not run.certified.certificate.passed


def test_a_known_trial_that_ran_full_does_not_stand_for_a_timing() -> None:
    smaller = timed(trial("zero2", 2), 51)
    assert isinstance(smaller.outcome, Fit)
    pressed = replace(smaller, outcome=replace(smaller.outcome, alloc_retries=1))
    run = certifying(longest(sample=400 * MIB), timed(trial("zero2", 4)), alternates=[pressed])
    assert run.certified.best.trial.knobs.micro_batch == 2
    assert run.certified.best is not pressed
    assert run.trials[-1].exam is None


def test_when_the_trials_are_spent_no_leaner_rung_is_looked_for() -> None:
    run = certifying(longest(needs={"zero2": LIMIT}), timed(trial("zero2", 1)), most_trials=1, untried=["zero3"])
    assert {one.rung for one in run.trials} == {"zero2"}
    assert "all 1 trials of the certificate are spent" in run.said


def test_headroom_falls_back_on_the_settings_device_limit() -> None:
    def answer(asked: Trial) -> Outcome:
        return replace(passes(asked), memory={"device": TierUse(peak_bytes=900 * MIB)})

    assert certifying(answer, timed(trial("zero2", 1))).certified.certificate.headroom_bytes == {"device": 100 * MIB}


def test_losses_may_differ_by_the_rounding_of_autocast() -> None:
    assert find_tolerance(replace(SETTINGS, base={})) == TOLERANCE["fp32"]
    assert find_tolerance(replace(SETTINGS, base={"torch_autocast": {"enabled": True}})) == TOLERANCE["bf16"]
    assert find_tolerance(replace(SETTINGS, base={}, precisions=("fp16",))) == TOLERANCE["fp16"]
