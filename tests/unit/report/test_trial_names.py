"""What people call a trial: the same words in every line, on a page too."""

from __future__ import annotations

from dataclasses import replace

from autods.config.checkpointing import set_state
from autods.report.answers.trials import list_trials
from autods.report.trial_names import DifferenceFromFirst, format_record, unusual_knobs
from autods.types import Knobs
from tests.support.reports import fit, record


def test_a_trial_is_labelled_by_its_difference_from_the_first() -> None:
    said = DifferenceFromFirst()
    walk = record(1, "ddp", fit()).trial
    keeps = replace(walk, knobs=replace(walk.knobs, checkpointing=False))
    half = replace(keeps, knobs=replace(keeps.knobs, settings={"bf16.enabled": False, "fp16.enabled": True}))
    assert [said(walk), said(keeps), said(half), said(walk)] == [
        "", "without checkpointing", "in fp16 without checkpointing", "",
    ]  # fmt: skip


def test_a_model_that_cannot_recompute_has_no_label() -> None:
    said = DifferenceFromFirst()
    walk = record(1, "ddp", fit()).trial
    plain = replace(walk, knobs=replace(walk.knobs, checkpointing=False))
    assert [said(plain), said(plain), said(walk)] == ["", "", "recomputing"]


def test_unusual_knobs_are_one_phrase() -> None:
    knobs = set_state(Knobs(expandable=True), "offload")
    assert unusual_knobs(knobs, recomputes=True) == "with inputs on the host and expandable segments"
    assert unusual_knobs(Knobs(), recomputes=True) == ""


def test_a_page_calls_a_trial_what_the_terminal_calls_it() -> None:
    walk = record(1, "zero3", fit(), knobs=Knobs(micro_batch=2, accumulation=4, checkpointing=True))
    eager = record(2, "zero3", fit(), knobs=Knobs(micro_batch=2, accumulation=4, checkpointing=False))
    shown = [str(item.summary) for item in list_trials([walk, eager], None, DifferenceFromFirst()).items]
    label = DifferenceFromFirst()
    printed = [format_record(each, label=label(each.trial)).removeprefix("trial ") for each in (walk, eager)]
    assert shown == printed
    assert ", micro batch 2 × 4 (walk), without checkpointing: " in shown[1]
