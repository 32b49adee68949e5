"""The page of a run: whole, escaped, and of the steps that its folder has on record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autods.report.answers.run import make_run_document
from autods.report.render_html import RUN_PAGE, to_page, write_page
from autods.report.render_markdown import to_markdown
from autods.report.results.run import AttemptRow, RunReport, read_steps, summarize_steps
from autods.report.serialize import read_run, write_run
from autods.types import Knobs
from tests.support.pages import HOSTILE, check_page
from tests.support.terminal import printed


@pytest.fixture
def report(tmp_path: Path) -> RunReport:
    """A run of two attempts; the second one repeats step 2 and ends at step 4."""
    for attempt, steps in ((1, (1, 2, 3)), (2, (2, 3, 4))):
        folder = tmp_path / "attempts" / str(attempt)
        folder.mkdir(parents=True)
        rows = ({"step": n, "loss": n * attempt / 10, "seconds": 0.5, "device_peak_bytes": n * 2**20} for n in steps)
        (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = AttemptRow(
        number=1, began=0.0, rung="zero2", micro_batch=4, accumulation=1, world_size=2, checkpointing=False,
        first_step=0, last_step=3, repeated=0, seconds=5.0, ending="failed", evidence="out of memory on device",
        changed="micro batch 2 instead of 4",
    )  # fmt: skip
    last = replace(
        first, number=2, micro_batch=2, accumulation=2, first_step=1, last_step=4, repeated=2, ending="done",
        evidence=None, changed=None,
    )  # fmt: skip
    return RunReport(
        status="done", exit_code=0, step=4, steps=4, global_batch=8, attempts=(first, last), rescues=1,
        ds_config={"train_batch_size": 8}, checkpoint=str(tmp_path / "checkpoints" / "step-00000004"),
        fit=str(tmp_path), out=str(tmp_path),
    )  # fmt: skip


def test_the_page_has_attempts_charts_and_the_config(report: RunReport, tmp_path: Path) -> None:
    parsed = check_page(to_page(make_run_document(report, tmp_path)))
    assert "done at step 4 of 4" in parsed.words
    assert "1 rescue, 2 steps repeated" in parsed.words
    assert "zero2, 4 × 1 × 2" in parsed.words
    assert "micro batch 2 instead of 4" in parsed.words
    assert sum(tag == "svg" for tag, _ in parsed.tags) == 3
    assert '"train_batch_size": 8' in parsed.words


def test_what_ended_an_attempt_can_be_read_at_any_width(report: RunReport) -> None:
    evidence = "out of memory on device, rank 0, backward, step 2: wanted 1.0 GiB, 0.1 GiB free of 80.0 GiB"
    row = replace(
        report.attempts[0], ending="out_of_memory", evidence=evidence, first_step=500, last_step=1520,
        changed="micro batch 2 × accumulation 2 instead of 4 × 1",
    )  # fmt: skip
    for width in range(60, 121):
        words = set(printed(make_run_document(replace(report, attempts=(row, row))), width).split())
        assert {*evidence.split(), *str(row.changed).split()} <= words, width


def test_a_run_whose_steps_nobody_counted_names_none(report: RunReport) -> None:
    attempt = replace(report.attempts[0], first_step=0, last_step=0, ending="done", evidence=None, changed=None)
    uncounted = replace(report, step=0, steps=None, attempts=(attempt,), rescues=0, checkpoint=None)
    words = check_page(to_page(make_run_document(uncounted))).words
    assert "at step" not in words
    assert "0–0" not in words


def test_the_page_says_model_config_final_loss_and_rate(report: RunReport, tmp_path: Path) -> None:
    known = replace(
        report, workload="gpt", parameters=32_600_000, device_bytes=2**30, rung="zero2", world_size=2,
        knobs=Knobs(micro_batch=2, accumulation=2), **summarize_steps(read_steps(tmp_path), report.attempts),
    )  # fmt: skip
    words = check_page(to_page(make_run_document(known, tmp_path))).words
    assert "gpt, 32.6M parameters, trained by 2 ranks" in words
    assert "zero2, micro batch 2 × accumulation 2, global batch 8" in words
    assert "0.8 at the end, 0.1 at the start" in words
    assert "16 samples/s: 0.5 s for an optimizer step" in words
    assert "limit 1.0 GiB" in words


def test_a_run_that_failed_names_its_own_step_and_the_saved_one(report: RunReport) -> None:
    row = replace(report.attempts[0], first_step=300, last_step=1347)
    failed = replace(report, status="failed", step=300, steps=2000, attempts=(report.attempts[0], row))
    headline = "failed at step 1,347 of 2,000; saved: step 300"
    document = make_run_document(failed)
    assert repr(failed) == f"<RunReport: {headline}>"
    assert headline in check_page(to_page(document)).words
    assert headline in to_markdown(document)
    assert headline in printed(document, 100)
    assert repr(replace(failed, step=0, steps=None)) == "<RunReport: failed at step 1,347; saved: step 0>"
    assert repr(replace(failed, steps=1000)) == "<RunReport: failed at step 1,347; saved: step 300>"


def test_a_run_whose_last_step_is_saved_names_one_step(report: RunReport) -> None:
    row = replace(report.attempts[0], first_step=300, last_step=300)
    failed = replace(report, status="failed", step=300, steps=400, attempts=(row,))
    for ended, headline in (
        (failed, "failed at step 300 of 400"),
        (replace(failed, step=350), "failed at step 350 of 400"),  # the last steps before a failure may be unknown
        (replace(failed, status="stopped"), "stopped at step 300 of 400"),
        (replace(failed, status="done", step=400), "done at step 400 of 400"),
        (replace(failed, status="nothing_fits", step=0, attempts=()), "nothing fits at step 0 of 400"),
    ):
        assert repr(ended) == f"<RunReport: {headline}>"


def test_fewer_steps_than_were_done_are_not_named(report: RunReport) -> None:
    for steps, is_named in ((400, True), (60, False)):
        done = replace(report, status="done", step=300, steps=steps)
        words = check_page(to_page(make_run_document(done))).words
        assert "done at step 300" in words
        assert (f"300 of {steps}" in words) == is_named


def test_a_step_of_milliseconds_is_not_shown_as_none(report: RunReport) -> None:
    fast = replace(report, step_s=0.0321, global_batch=8)
    assert "249 samples/s: 0.0321 s for an optimizer step" in check_page(to_page(make_run_document(fast))).words


def test_a_repeated_step_is_shown_as_it_was_done_last(report: RunReport, tmp_path: Path) -> None:
    assert {step: done.loss for step, done in read_steps(tmp_path).items()} == {1: 0.1, 2: 0.4, 3: 0.6, 4: 0.8}


def test_a_page_shows_what_users_wrote_as_text(report: RunReport, tmp_path: Path) -> None:
    row = replace(report.attempts[0], evidence=HOSTILE, changed=HOSTILE, rung=HOSTILE)
    hostile = replace(report, reason=HOSTILE, advice=HOSTILE, warnings=(HOSTILE,), attempts=(row,))
    check_page(to_page(make_run_document(hostile, tmp_path)))


def test_a_run_without_steps_or_attempts_has_a_page(tmp_path: Path) -> None:
    empty = RunReport(status="nothing_fits", exit_code=1, reason="no config fits", out=str(tmp_path))
    assert "nothing fits" in check_page(to_page(make_run_document(empty, tmp_path))).words


def test_torn_lines_and_infinite_losses_are_left_out(report: RunReport, tmp_path: Path) -> None:
    with open(tmp_path / "attempts" / "2" / "steps.jsonl", "a") as file:
        file.write('{"step": 5, "loss": null, "seconds": 0.5, "device_peak_bytes": null}\n{"step": 6, "lo')
    assert list(read_steps(tmp_path)) == [1, 2, 3, 4, 5]
    check_page(to_page(make_run_document(report, tmp_path)))


def test_a_loss_below_0_is_in_the_chart(report: RunReport, tmp_path: Path) -> None:
    rows = ({"step": n, "loss": n - 3, "seconds": 0.5, "device_peak_bytes": 2**30} for n in (1, 2, 3, 4))
    (tmp_path / "attempts" / "2" / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = to_page(make_run_document(report, tmp_path))
    assert "loss: -2 to 1, optimizer step 1 to 4" in page


def test_lines_that_are_no_steps_are_left_out(report: RunReport, tmp_path: Path) -> None:
    others = ("12", '"loss"', "null", '["loss"]', '{"step": 7, "loss": 1}', '{"step": null, "loss": 1, "seconds": 1}')
    with open(tmp_path / "attempts" / "2" / "steps.jsonl", "a") as file:
        file.write("\n".join((*others, '{"step": 8, "loss": 1, "seconds": "fast"}', "")))
    assert list(read_steps(tmp_path)) == [1, 2, 3, 4]


def test_many_steps_make_a_small_page(report: RunReport, tmp_path: Path) -> None:
    rows = ({"step": n, "loss": 1 / n, "seconds": 0.5, "device_peak_bytes": 2**30} for n in range(1, 5001))
    (tmp_path / "attempts" / "2" / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parsed = check_page(to_page(make_run_document(report, tmp_path)))
    assert sum(tag == "circle" for tag, _ in parsed.tags) < 200


def test_the_page_is_that_of_the_run_that_is_read_again(report: RunReport, tmp_path: Path) -> None:
    write_run(report)
    page = write_page(make_run_document(read_run(tmp_path), tmp_path), tmp_path / RUN_PAGE)
    assert page.read_text() == to_page(make_run_document(report, tmp_path))
