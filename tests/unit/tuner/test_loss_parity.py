"""Loss parity: the comparison with a plain config, and the knob that changes the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from autods.runner.testing import failed, out_of_memory
from autods.tuner.loss_parity import compare_fits, differing_knobs, largest_difference, same_samples, with_knob_of
from autods.types import Fit, Knobs, Outcome, Record, Scalar, Trained, Trial
from tests.support.certificates import PARITY, TIMED, Certifying, certifying, passes, timed, trial

OVERLAP, BUCKET, TYPE = (
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
    "communication_data_type",
)
PLAIN = timed(trial("zero2", 1, settings={OVERLAP: True, BUCKET: 1000}), 1)

Bends = Callable[[Trial], bool]


def losing(bends: Bends, by: float = 0.1) -> Callable[[Trial], Outcome]:
    """Everything fits; the losses of a config that `bends` them are `by` higher, relatively."""

    def answer(asked: Trial) -> Outcome:
        ran = passes(asked)
        if asked.exam != "parity" or not bends(asked):
            return ran
        return replace(ran, losses=tuple(loss * (1 + by * step) for step, loss in enumerate(ran.losses)))

    return answer


def winner_with(
    settings: Mapping[str, Scalar], *, rung: str = "zero2", micro_batch: int = 4, checkpointing: bool = False
) -> Record:
    return timed(trial(rung, micro_batch, settings=settings, checkpointing=checkpointing), 60)


def against(winner: Record, answer: Callable[[Trial], Outcome], **more: object) -> Certifying:
    return certifying(answer, winner, **{"reference": PLAIN, **more})  # type: ignore[arg-type]


def parities(run: Certifying) -> list[Trial]:
    return [one for one in run.trials if one.exam == "parity"]


def never(asked: Trial) -> bool:
    return False


def by_overlap(asked: Trial) -> bool:
    return asked.knobs.settings.get(OVERLAP) is False


def test_a_tuned_config_has_to_compute_what_the_plain_one_does() -> None:
    run = against(winner_with({OVERLAP: False, BUCKET: 5000}), losing(lambda asked: by_overlap(asked), by=0.001))
    parity = run.certified.certificate.parity
    assert run.certified.certificate.passed
    assert parity is not None
    assert (parity.reference, parity.steps, parity.within, parity.changed_by) == ("zero2", 6, True, ())
    assert parity.largest_difference == pytest.approx(0.005)
    ours, theirs = parities(run)
    assert ours.steps == theirs.steps == PARITY
    assert ours.purpose == theirs.purpose == "certify"


@pytest.mark.parametrize(
    ("longest_ratio", "exams"),
    [(1.0, ["parity", "parity", "worst_case"]), (1.5, ["worst_case", "parity", "parity"])],
)
def test_losses_come_first_where_the_exam_should_hold(longest_ratio: float, exams: list[str]) -> None:
    """The ranks of both comparisons share the model of the search, which ends with the exam."""
    run = against(winner_with({OVERLAP: False}), losing(never), longest_ratio=longest_ratio)
    assert [asked.exam for asked in run.trials] == exams
    assert run.certified.certificate.passed


def test_a_smaller_batch_is_compared_again_after_its_exam() -> None:
    def answer(asked: Trial) -> Outcome:
        is_full = asked.exam == "worst_case" and asked.knobs.micro_batch > 2
        return out_of_memory() if is_full else losing(never)(asked)

    run = against(winner_with({OVERLAP: False}), answer, most_trials=5, global_batch=8)
    assert run.certified.certificate.passed
    assert [asked.knobs.micro_batch for asked in parities(run)] == [4, 1, 2]  # the reference is at its own


def test_both_run_on_as_many_samples() -> None:
    winner = timed(trial("zero1", 6, accumulation=2, settings={BUCKET: 7}), 60)
    reference = timed(trial("zero2", 4, settings={BUCKET: 7}), 1)
    ours, theirs = parities(certifying(losing(never), winner, reference=reference, global_batch=24))
    assert (ours.knobs.micro_batch, ours.knobs.accumulation) == (6, 2)
    assert (theirs.knobs.micro_batch, theirs.knobs.accumulation) == (4, 3)
    assert ours.knobs.train_batch(2) == theirs.knobs.train_batch(2) == 24


@pytest.mark.parametrize(
    ("step_s", "accumulation", "compared"),
    [(7.0, 1, [(6, 1), (3, 2)]), (8.0, 1, [(3, 1), (3, 1)]), (8.0, 3, [(3, 2), (3, 2)])],
)
def test_long_steps_are_compared_on_few_samples(
    step_s: float, accumulation: int, compared: list[tuple[int, int]]
) -> None:
    """The fewest updates take over 30 s; a 70B's step on 64 cards takes half a minute."""
    winner = timed(trial("zero1", 6, accumulation=accumulation, settings={BUCKET: 7}), 60)
    assert isinstance(winner.outcome, Fit)
    slow = replace(winner, outcome=replace(winner.outcome, step_s=(step_s,)))
    reference = timed(trial("zero2", 4, settings={BUCKET: 7}), 1)
    seen = [timed(trial("zero3", size), 2) for size in (12, 3)]
    run = certifying(losing(never), slow, reference=reference, seen=seen, global_batch=12 * accumulation)
    assert [(one.knobs.micro_batch, one.knobs.accumulation) for one in parities(run)] == compared
    assert run.certified.certificate.passed


@pytest.mark.parametrize(("recomputes", "size"), [(True, 12), (False, 2)])
def test_the_reference_recomputes_at_the_size_that_kept_all(recomputes: bool, size: int) -> None:
    """At micro batch 2 it would take far longer; one that keeps its activations may need more memory than it has."""
    winner = timed(trial("zero1", 12, checkpointing=not recomputes), 60)
    reference = timed(trial("zero1", 2, checkpointing=recomputes), 1)
    run = certifying(losing(never), winner, reference=reference, seen=(reference, winner))
    assert parities(run)[1].knobs.micro_batch == size


@pytest.mark.parametrize(
    ("plain", "winner", "size"), [((1, 1), (12, 1), 1), ((5, 1), (12, 1), 4), ((8, 4), (3, 1), 3), ((2, 1), (7, 3), 1)]
)
def test_the_reference_takes_the_largest_dividing_micro_batch(
    plain: tuple[int, int], winner: tuple[int, int], size: int
) -> None:
    cut = same_samples(
        Knobs(micro_batch=plain[0], accumulation=plain[1]), Knobs(micro_batch=winner[0], accumulation=winner[1])
    )
    assert cut.micro_batch == size
    assert cut.micro_batch * cut.accumulation == winner[0] * winner[1]


def test_a_config_that_differs_in_the_batch_only_is_not_compared() -> None:
    run = against(winner_with(PLAIN.trial.knobs.settings, micro_batch=8), losing(never))
    assert parities(run) == []
    assert run.certified.certificate.parity is None
    assert run.certified.certificate.passed


@pytest.mark.parametrize(
    ("seconds", "exams", "left_out"),
    [
        (4.0, ["worst_case"], "that takes about 10 s, and the budget has about 10 s left"),
        (6.0, ["worst_case", "parity", "parity"], None),
        (8.0, ["parity", "parity", "worst_case"], None),
    ],
)
def test_losses_are_compared_where_the_budget_has_the_time(
    seconds: float, exams: list[str], left_out: str | None
) -> None:
    """The exam's time is kept for it: 2.3 s. A comparison takes 3 s, and a second is gone."""
    winner = winner_with({OVERLAP: False})
    run = against(winner, losing(never), seen=(winner,), budget_s=seconds)
    assert [asked.exam for asked in run.trials] == exams
    assert run.certified.certificate.passed == (left_out is None)
    assert (left_out is not None) == ("losses were not compared with those of zero2" in run.said)
    assert left_out is None or left_out in run.said


def test_a_comparison_that_was_begun_is_ended() -> None:
    winner = winner_with({OVERLAP: False})
    begun = replace(winner, trial=replace(winner.trial, exam="parity"))
    run = against(winner, losing(never), seen=(winner, begun), budget_s=1.0)
    assert run.certified.certificate.passed


def test_without_a_reference_nothing_is_compared() -> None:
    run = against(winner_with({OVERLAP: False}), losing(by_overlap), reference=None)
    assert parities(run) == []
    assert run.certified.certificate.parity is None


def test_a_knob_that_changes_the_maths_is_named_and_taken_back() -> None:
    run = against(winner_with({OVERLAP: False, BUCKET: 5000}, checkpointing=True), losing(by_overlap))
    certificate, best = run.certified.certificate, run.certified.best.trial
    assert certificate.parity is not None
    assert (certificate.parity.changed_by, certificate.parity.taken_back) == ((OVERLAP,), OVERLAP)
    assert certificate.parity.within
    assert certificate.parity.largest_difference == 0
    assert certificate.passed
    assert best.knobs == Knobs(micro_batch=4, checkpointing=True, settings={OVERLAP: True, BUCKET: 5000})
    assert (best.purpose, best.steps, best.exam) == ("verify", TIMED, None)  # its speed is measured anew
    examined = [one.knobs.settings[OVERLAP] for one in run.trials if one.exam == "worst_case"]
    assert examined == [False, True]  # and the worst case is examined again
    assert f"{OVERLAP} taken back to true: with false losses differ by 50 % from zero2's" in run.said
    assert run.said in run.certified.reason


def test_each_knob_is_set_back_alone() -> None:
    run = against(winner_with({OVERLAP: False, TYPE: "bf16"}, checkpointing=True), losing(by_overlap))
    tried = [one.knobs for one in parities(run)[2:]]
    assert [(knobs.settings, knobs.checkpointing) for knobs in tried] == [
        ({OVERLAP: True, TYPE: "bf16"}, True),
        ({OVERLAP: False}, True),
        ({OVERLAP: False, TYPE: "bf16", BUCKET: 1000}, True),
        ({OVERLAP: False, TYPE: "bf16"}, False),
    ]


def test_checkpointing_that_changes_the_maths_is_taken_back() -> None:
    winner = winner_with(PLAIN.trial.knobs.settings, checkpointing=True)
    run = against(winner, losing(lambda asked: asked.knobs.checkpointing))
    assert run.certified.best.trial.knobs.checkpointing is False
    assert run.certified.certificate.parity is not None
    assert run.certified.certificate.parity.changed_by == ("checkpointing",)
    assert "checkpointing taken back to false" in run.said


def test_of_two_guilty_knobs_one_is_reverted_and_both_named() -> None:
    run = against(
        winner_with({OVERLAP: False, BUCKET: 5000}),
        losing(lambda asked: by_overlap(asked) and asked.knobs.settings.get(BUCKET) == 5000),
    )
    assert run.certified.certificate.parity is not None
    assert run.certified.certificate.parity.changed_by == (OVERLAP, BUCKET)
    assert differing_knobs(run.certified.best.trial.knobs, PLAIN.trial.knobs) == (BUCKET,)


def test_without_a_guilty_knob_the_rung_fails() -> None:
    winner = winner_with({OVERLAP: False, BUCKET: 5000}, rung="zero3")
    run = against(winner, losing(lambda asked: asked.rung == "zero3"))
    certificate = run.certified.certificate
    assert run.certified.best is winner
    assert not certificate.passed
    assert certificate.parity is not None
    assert not certificate.parity.within
    assert certificate.parity.changed_by == ()
    assert "zero3 itself or a combination of its knobs changes the maths" in run.said
    assert "50 %" in run.certified.reason


@pytest.mark.parametrize("who", ["zero3", "zero2"])
def test_parity_that_cannot_be_run_is_said(who: str) -> None:
    def answer(asked: Trial) -> Outcome:
        broken = asked.exam == "parity" and asked.rung == who
        return failed(evidence="RuntimeError: cannot cut a list\nmore") if broken else passes(asked)

    winner = winner_with({}, rung="zero3")
    run = against(winner, answer)
    assert run.certified.best is winner
    assert not run.certified.certificate.passed
    assert run.certified.certificate.parity is None
    (said,) = run.certified.certificate.not_checked
    assert said.startswith(f"parity was not checked: {who}")
    assert said.endswith("failed in step: RuntimeError: cannot cut a list")


def test_parity_that_ran_out_of_memory_or_of_trials_is_said() -> None:
    winner = winner_with({}, rung="zero3")
    full = against(winner, lambda asked: out_of_memory() if asked.exam == "parity" else passes(asked))
    assert "parity was not checked: zero3 ran out of device memory in forward" in full.said
    spent = against(winner, losing(never), most_trials=2)
    assert "parity was not checked: zero2, the reference, was not run, all 2 trials" in spent.said
    assert not full.certified.certificate.passed
    assert not spent.certified.certificate.passed


def test_trials_spent_before_the_knob_was_found_are_said() -> None:
    winner = winner_with({BUCKET: 5000, OVERLAP: False})
    run = against(winner, losing(by_overlap), most_trials=4)
    assert run.certified.best is winner
    assert not run.certified.certificate.passed
    assert f"with {OVERLAP} set back it was not run, all 4 trials of the certificate are spent" in run.said


def test_the_runner_up_wins_where_a_reverted_config_lacks_memory() -> None:
    def answer(asked: Trial) -> Outcome:
        if asked.rung == "zero1" and asked.exam == "worst_case" and not asked.knobs.checkpointing:
            return out_of_memory()
        return losing(lambda one: one.knobs.checkpointing and one.rung == "zero1")(asked)

    settings = PLAIN.trial.knobs.settings
    winner = winner_with(settings, rung="zero1", checkpointing=True, micro_batch=1)
    runner_up = timed(trial("zero2", 2, settings=settings), 61)
    taken = against(winner, answer, alternates=[runner_up])
    assert taken.certified.best is runner_up
    assert taken.certified.certificate.passed
    alone = against(winner, answer)
    assert alone.certified.best is winner
    assert not alone.certified.certificate.passed
    assert "changed by checkpointing; without it, no micro batch was proven to hold" in alone.certified.reason
    assert alone.certified.certificate.backed_off == ()
    assert alone.certified.certificate.parity is not None
    assert not alone.certified.certificate.parity.within


@pytest.mark.parametrize(
    ("losses", "plain", "apart"),
    [
        ((2.0, 1.01), (2.0, 1.0), 0.01),
        ((math.nan, 1.0), (1.0, 1.0), math.inf),
        ((1.0, math.inf), (1.0, math.inf), 0.0),
        ((0.5,), (0.0,), 5e11),
        ((-1.1,), (-1.0,), 0.1),
    ],
)
def test_losses_are_compared_step_by_step(losses: Sequence[float], plain: Sequence[float], apart: float) -> None:
    assert largest_difference(losses, plain) == pytest.approx(apart)


def test_a_winner_whose_loss_is_no_number_does_not_pass() -> None:
    def answer(asked: Trial) -> Outcome:
        broken = asked.exam == "parity" and asked.rung == "zero3"
        return replace(passes(asked), losses=(math.nan,) * 6) if broken else passes(asked)

    run = against(winner_with(PLAIN.trial.knobs.settings, rung="zero3"), answer)
    assert not run.certified.certificate.passed
    assert "a loss is not finite" in run.said


def sized(size_of: Callable[[Trial], float | None]) -> Callable[[Trial], Outcome]:
    """Everything fits with the same losses; the updates of a parity trial are of this size."""

    def answer(asked: Trial) -> Outcome:
        ran = passes(asked)
        return replace(ran, update_size=size_of(asked)) if asked.exam == "parity" else ran

    return answer


def test_updates_of_another_size_are_seen_where_losses_agree() -> None:
    """A learning rate that is a tenth too high, under bf16, where rounding hides it from the losses."""
    run = against(winner_with({}, rung="zero3"), sized(lambda asked: 1.1e-4 if asked.rung == "zero3" else 1e-4))
    certificate = run.certified.certificate
    assert not certificate.passed
    assert certificate.parity is not None
    assert (certificate.parity.largest_difference, certificate.parity.within) == (0.0, False)
    assert certificate.parity.update_difference == pytest.approx(0.1)
    assert run.certified.certificate.failures[0].startswith(
        "updates of the weights differ by 10 % from zero2's, tolerance 3 %: zero3 itself"
    )


def test_gradients_of_another_size_fail_where_losses_agree() -> None:
    """As under ZeRO-2 of DeepSpeed 0.17.6 to 0.18.2: 1.63 for 4.74, with the same loss (DeepSpeed #7718)."""

    def answer(asked: Trial) -> Outcome:
        ran = passes(asked)
        norms = (1.63, 1.6, 1.5) if asked.rung == "zero3" else (4.74, 4.7, 4.6)
        return replace(ran, gradient_norms=norms) if asked.exam == "parity" else ran

    run = against(winner_with({}, rung="zero3"), answer)
    certificate = run.certified.certificate
    assert not certificate.passed
    assert certificate.failures[0].startswith("gradient norms differ by 67 % from zero2's, tolerance 5 %: zero3 itself")


def test_only_the_first_gradients_are_compared() -> None:
    """Later ones come from weights that rounding has moved apart."""
    fit = replace(PLAIN.outcome, gradient_norms=(4.74, 4.7, 4.6, 1.0))
    reference = replace(fit, gradient_norms=(4.75, 4.71, 4.59, 2.0))
    parity = compare_fits(fit, reference, tolerance=0.01, rung="ddp")
    assert parity.gradient_difference == pytest.approx(0.01 / 4.59)
    assert parity.within
    assert compare_fits(fit, PLAIN.outcome, tolerance=0.01, rung="ddp").gradient_difference is None


def test_the_knob_that_changes_updates_is_taken_back() -> None:
    run = against(winner_with({OVERLAP: False, BUCKET: 5000}), sized(lambda asked: 9e-5 if by_overlap(asked) else 1e-4))
    parity = run.certified.certificate.parity
    assert parity is not None
    assert (parity.taken_back, parity.update_difference, run.certified.certificate.passed) == (OVERLAP, 0.0, True)
    assert "with false updates of the weights differ by 10 % from zero2's, tolerance 3 %" in run.said


@pytest.mark.parametrize("sizes", [(1.01e-4, 1e-4), (None, 1e-4)])
def test_updates_of_the_same_size_pass(sizes: tuple[float | None, float]) -> None:
    run = against(winner_with({}, rung="zero3"), sized(lambda asked: sizes[asked.rung == "zero2"]))
    assert run.certified.certificate.passed


def test_without_updates_losses_prove_nothing() -> None:
    certificate = against(winner_with({}, rung="zero3"), sized(lambda asked: 0.0)).certified.certificate
    assert not certificate.passed
    assert certificate.not_checked == (
        "parity was not checked: no step changed a weight (is the learning rate 0 at first?)",
    )


def test_losses_that_are_no_numbers_on_either_side_prove_nothing() -> None:
    run = against(
        winner_with({}, rung="zero3"),
        lambda asked: replace(passes(asked), losses=(math.nan,) * 6) if asked.exam == "parity" else passes(asked),
    )
    assert run.certified.certificate.not_checked == (
        "parity was not checked: no loss of zero2, the reference, is finite",
    )


@pytest.mark.parametrize("few", ["zero2", "zero3"])
def test_too_few_updates_prove_nothing(few: str) -> None:
    def answer(asked: Trial) -> Outcome:
        ran = passes(asked)
        return replace(ran, losses=ran.losses[:3]) if asked.exam == "parity" and asked.rung == few else ran

    certificate = against(winner_with({}, rung="zero3"), answer).certified.certificate
    assert not certificate.passed
    assert certificate.parity is None
    assert certificate.not_checked == (
        "parity was not checked: the losses show 2 updates of the weights, and 3 are needed",
    )


def test_a_knob_is_set_back_to_what_the_plain_config_has() -> None:
    knobs, plain = Knobs(settings={OVERLAP: False, TYPE: "bf16"}), Knobs(settings={OVERLAP: True}, checkpointing=False)
    assert with_knob_of(knobs, plain, OVERLAP).settings == {OVERLAP: True, TYPE: "bf16"}
    assert with_knob_of(knobs, plain, TYPE).settings == {OVERLAP: False}
    assert with_knob_of(knobs, plain, "checkpointing").checkpointing is False


def test_a_reverted_winner_equal_to_the_reference_runs_once() -> None:
    reference = timed(trial("zero2", 4, settings={OVERLAP: True}), 1)
    run = certifying(losing(by_overlap), timed(trial("zero2", 4, settings={OVERLAP: False}), 60), reference=reference)
    assert len(parities(run)) == 2
    assert run.certified.best is reference  # it was timed before
    assert run.certified.certificate.passed


def test_the_knob_that_repairs_the_losses_best_is_reverted() -> None:
    def answer(asked: Trial) -> Outcome:
        ran, settings = passes(asked), asked.knobs.settings
        by = 0.009 if by_overlap(asked) else 0.001
        off = by * 5 if by_overlap(asked) and settings[BUCKET] == 5000 else by
        if asked.exam != "parity" or settings == PLAIN.trial.knobs.settings:
            return ran
        return replace(ran, losses=tuple(loss * (1 + off) for loss in ran.losses))

    for settings in ({OVERLAP: False, BUCKET: 5000}, {BUCKET: 5000, OVERLAP: False}):
        run = against(winner_with(settings), answer)
        parity = run.certified.certificate.parity
        assert parity is not None
        assert set(parity.changed_by) == {OVERLAP, BUCKET}
        assert parity.taken_back == OVERLAP
        assert parity.largest_difference == pytest.approx(0.001)


def test_parity_asks_each_config_as_if_it_was_never_measured() -> None:
    winner = replace(winner_with({}, rung="zero3"), trial=replace(trial("zero3", 4), purpose="verify", repeat=2))
    assert [one.repeat for one in parities(against(winner, losing(never)))] == [0, 0]


def test_of_several_configs_that_cannot_be_mended_the_first_is_told() -> None:
    def answer(asked: Trial) -> Outcome:
        if asked.exam == "worst_case" and not asked.knobs.checkpointing:
            return out_of_memory()
        return losing(lambda one: one.knobs.checkpointing)(asked)

    settings = PLAIN.trial.knobs.settings
    winner = winner_with(settings, rung="zero1", checkpointing=True, micro_batch=1)
    runner_up = timed(trial("zero3", 1, settings=settings, checkpointing=True), 61)
    run = against(winner, answer, alternates=[runner_up])
    assert run.certified.best is winner
    assert ("zero3", 1) in run.exams


SAME = Trained(samples="12.000000", weights=4096.0)


def of_a_script(trained: Callable[[Trial], Trained], bends: Bends = never) -> Callable[[Trial], Outcome]:
    """As `losing`; a parity trial says what it trained."""

    def answer(asked: Trial) -> Outcome:
        ran = losing(bends)(asked)
        return replace(ran, trained=trained(asked)) if asked.exam == "parity" else ran  # type: ignore[arg-type]

    return answer


def scripted(answer: Callable[[Trial], Outcome], winner: Record | None = None, **more: Any) -> Certifying:
    reference = timed(trial("ddp", 4, settings={BUCKET: 7}), 1)
    winner = winner or timed(trial("zero2", 16, settings={BUCKET: 7, OVERLAP: False}), 60)
    return certifying(answer, winner, reference=reference, alike=True, **more)


def test_a_script_is_compared_at_a_micro_batch_that_both_fit() -> None:
    run = scripted(of_a_script(lambda asked: SAME))
    assert [(one.rung, one.knobs.micro_batch, one.knobs.accumulation) for one in parities(run)] == [
        ("zero2", 4, 1),
        ("ddp", 4, 1),
    ]
    parity = run.certified.certificate.parity
    assert parity is not None
    assert (parity.reference, parity.within) == ("ddp", True)
    assert run.certified.certificate.passed


def test_a_script_that_fixes_its_accumulation_keeps_it() -> None:
    """Lightning refuses another one than its `accumulate_grad_batches`."""
    winner = timed(trial("zero2", 16, accumulation=4, settings={BUCKET: 7, OVERLAP: False}), 60)
    reference = timed(trial("ddp", 4, accumulation=4, settings={BUCKET: 7}), 1)
    run = certifying(of_a_script(lambda asked: SAME), winner, reference=reference, alike=True)
    assert [(one.knobs.micro_batch, one.knobs.accumulation) for one in parities(run)] == [(4, 4), (4, 4)]


def test_a_scripts_configs_accumulate_alike_at_a_global_batch() -> None:
    winner = timed(trial("zero2", 12, accumulation=2, settings={BUCKET: 7}), 60)
    run = scripted(of_a_script(lambda asked: SAME), winner, global_batch=48)
    assert [(one.knobs.micro_batch, one.knobs.accumulation) for one in parities(run)] == [(4, 6), (4, 6)]


def test_a_knob_that_changes_a_scripts_losses_is_taken_back() -> None:
    run = scripted(of_a_script(lambda asked: SAME, by_overlap))
    parity = run.certified.certificate.parity
    assert parity is not None
    assert (parity.taken_back, parity.within) == (OVERLAP, True)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Trained(samples="13.000000", weights=4096.0), "draws other samples in each run"),
        (Trained(samples=None, weights=4096.0), "samples of the script were not seen"),
        (Trained(samples="12.000000", weights=4096.1), "begins with other weights"),
        (Trained(samples="12.000000", weights=None), "weights with which it begins were not seen"),
    ],
)
def test_other_samples_in_a_script_accuse_no_knob(other: Trained, why: str) -> None:
    run = scripted(of_a_script(lambda asked: SAME if asked.rung == "ddp" else other, by_overlap))
    certificate = run.certified.certificate
    assert certificate.parity is None
    assert not certificate.failures
    assert why in run.said


def test_weights_that_were_summed_in_another_order_are_the_same() -> None:
    nearly = Trained(samples="12.000000", weights=4096.0 * (1 + 1e-12))
    run = scripted(of_a_script(lambda asked: SAME if asked.rung == "ddp" else nearly))
    assert run.certified.certificate.passed


def test_a_script_whose_steps_overflow_differently_is_not_compared() -> None:
    def answer(asked: Trial) -> Outcome:
        ran = of_a_script(lambda asked: SAME)(asked)
        return replace(ran, skipped_steps=3 if asked.rung == "ddp" else 5) if asked.exam == "parity" else ran  # type: ignore[arg-type]

    (why,) = scripted(answer).certified.certificate.not_checked
    assert why.endswith("fp16 gradients overflowed in 5 and 3 steps, so the updates come from other samples")


def test_a_winner_like_its_reference_meets_another_rung() -> None:
    settings = dict(PLAIN.trial.knobs.settings)
    winner, other = winner_with(settings), timed(trial("zero1", 2, settings=settings), 30)
    run = against(winner, losing(never), seen=(PLAIN, other, winner))
    assert [each.rung for each in parities(run)] == ["zero2", "zero1"]
    run = against(winner, losing(never), seen=(PLAIN, winner))
    assert parities(run) == []


def test_zero_init_compares_stage_3_with_stage_3_alone() -> None:
    """A model that is built in parts has other random weights, and the whole one may not fit into host memory."""
    winner, plain = timed(trial("zero3", 4, settings={OVERLAP: True}), 60), timed(trial("zero3", 2), 51)
    run = certifying(losing(never), winner, reference=timed(trial("zero2", 2)), zero_init=True, seen=(plain, winner))
    assert [one.rung for one in run.trials if one.exam == "parity"] == ["zero3", "zero3"]
    parity = run.certified.certificate.parity
    assert parity is not None
    assert (parity.reference, parity.within) == ("zero3", True)


def test_zero_init_compares_nothing_without_a_second_stage_3() -> None:
    winner = timed(trial("zero3", 4), 60)
    run = certifying(losing(never), winner, reference=timed(trial("zero2", 2)), zero_init=True, seen=(winner,))
    assert not [one for one in run.trials if one.exam == "parity"]
    assert "parity was not checked: --zero-init gives stage 3 other random weights" in run.said
    whole = timed(trial("zero2", 4, settings={OVERLAP: True}), 60)
    run = certifying(losing(never), whole, reference=timed(trial("zero2", 2)), zero_init=True)
    assert [one.rung for one in run.trials if one.exam == "parity"] == ["zero2", "zero2"]
