"""What people call a trial: the same words in every line, on a page too."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from autods.config.checkpointing import set_state
from autods.events import SearchStarted, TrialFinished
from autods.report.answers.fit import make_fit_document
from autods.report.document import Details
from autods.report.live import TrialProgress
from autods.report.trial_names import unusual_knobs
from autods.types import Knobs
from tests.support.reports import fit, fitting_report, record


def test_unusual_knobs_are_one_phrase() -> None:
    knobs = set_state(Knobs(expandable=True), "offload")
    assert unusual_knobs(knobs, recomputes=True) == "with inputs on the host and expandable segments"
    assert unusual_knobs(Knobs(), recomputes=True) == ""
    half = Knobs(checkpointing=False, settings={"bf16.enabled": False, "fp16.enabled": True})
    assert unusual_knobs(half, recomputes=True) == "in fp16 without checkpointing"
    assert unusual_knobs(half, recomputes=False) == "in fp16"


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_page_calls_a_trial_what_the_terminal_calls_it(recomputes: bool) -> None:
    """In a walk that begins without checkpointing, too."""
    knobs = Knobs(micro_batch=2, accumulation=4, checkpointing=False)
    trials = [record(1, "zero3", fit(), knobs=knobs), record(2, "zero3", fit(), knobs=set_state(knobs, "on"))]
    report = fitting_report()
    question = replace(report.question, checkpointing=recomputes)
    page = make_fit_document(replace(report, trials=tuple(trials), question=question))
    details = next(part for part in page.parts if isinstance(part, Details) and len(part.items) == len(trials))
    shown = [str(item.summary) for item in details.items]
    printed = io.StringIO()
    with TrialProgress(Console(file=printed, width=200)) as listen:
        listen(SearchStarted(ladder=("zero3",), device_bytes=0, usable_bytes=math.inf, recomputes=recomputes))
        for each in trials:
            listen(TrialFinished(record=each))
    assert [f"trial {line}" for line in shown] == printed.getvalue().splitlines()
    assert (", micro batch 2 × 4 (walk), without checkpointing: " in shown[0]) is recomputes
