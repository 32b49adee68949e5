"""From what the ranks of a trial report to its outcome."""

from __future__ import annotations

from typing import Any

from autods.trial.job import describe
from autods.trial.loss_parity import Incomparable
from autods.types import Examined, Failed, Fit
from tests.support.ends import end, outcome

PASSED = {
    "batch_shape": [2, 64],
    "draws": 16,
    "evaluated": True,
    "checkpoint_bytes": 1000,
    "save_s": 1.0,
    "load_s": 0.5,
    "gathered": True,
    "restored": True,
    "left_out": [],
}


def passed(rank: int, examined: dict[str, Any] | None) -> dict[str, Any]:
    timing = {"step_s": [0.5], "steps_s": 1.0, "losses": [2.0, 1.0], "build_s": 0.1, "init_s": 0.1}
    peaks = {"device": 100, "host": 50, "pinned": 0}
    return end(rank, {"ok": True, "result": {**timing, "peaks": peaks, "examined": examined}})


def test_a_trial_without_an_exam_has_none() -> None:
    fits = outcome(passed(0, None), passed(1, None))
    assert isinstance(fits, Fit)
    assert fits.examined is None


def test_what_the_ranks_did_is_the_longest_batch_and_the_slowest_save() -> None:
    slow = {**PASSED, "batch_shape": [2, 96], "save_s": 3.0, "left_out": ["no room"]}
    fits = outcome(passed(0, PASSED), passed(1, slow))
    assert isinstance(fits, Fit)
    assert fits.examined == Examined(
        batch_shape=(2, 96),
        draws=16,
        evaluated=True,
        checkpoint_bytes=1000,
        save_s=3.0,
        load_s=0.5,
        gathered=True,
        restored=True,
        left_out=("no room",),
    )


def test_one_rank_whose_loss_does_not_come_back_is_enough() -> None:
    fits = outcome(passed(0, PASSED), passed(1, {**PASSED, "restored": False}))
    assert isinstance(fits, Fit)
    assert fits.examined is not None
    assert fits.examined.restored is False


def test_losses_that_cannot_be_compared_are_nobodys_fault() -> None:
    error = describe(Incomparable("samples differ in shape", hint="pad every sample"), "/model.py")
    refused = end(1, {"ok": False, "error": error, "phase": "build", "step": 0}, exit=1)
    other = end(0, {}, exit=-9, killed=True) | {"record": None}
    failed = outcome(refused, other)
    assert isinstance(failed, Failed)
    assert failed.action == "nothing"
    assert failed.evidence == "samples differ in shape"
    assert failed.advice == "pad every sample"
