"""The live view of a fit: what its state says at a moment, and how that looks on terminals of several sizes."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from autods.events import (
    Event,
    Note,
    SearchStarted,
    Stage,
    StageStarted,
    TrialFinished,
    TrialForecasted,
    TrialMoved,
    TrialStarted,
)
from autods.report.fit_progress import (
    FitState,
    advance,
    describe_progress,
    describe_status,
    find_best,
    render_search,
)
from autods.types import Knobs, Outcome, Phase, Purpose, Skipped, Steps, TierUse, Trial
from tests.support.reports import LADDER, LIMIT, MIB, fit, memory, oom, record

SEARCH = SearchStarted(ladder=LADDER, device_bytes=LIMIT, usable_bytes=0.95 * LIMIT, most_trials=40, most_seconds=1200)
STEPS = Steps(warmup=1, timed=4, most_timed=4)


def forecasted(rung: str, mib: float, knobs: Knobs | None = None, host_mib: float = 900) -> TrialForecasted:
    trial = Trial(rung=rung, knobs=knobs or Knobs(), purpose="walk")
    host = TierUse(peak_bytes=int(host_mib * MIB), limit_bytes=1000 * MIB)
    return TrialForecasted(trial=trial, memory={**memory(mib), "host": host})


def timed(number: int, purpose: Purpose, seconds: float) -> TrialFinished:
    return TrialFinished(record=replace(record(number, "zero2", fit(), purpose=purpose), seconds=seconds))


def finished(number: int, rung: str, outcome: Outcome, knobs: Knobs | None = None) -> TrialFinished:
    return TrialFinished(record=record(number, rung, outcome, knobs=knobs))


def started(number: int, rung: str, steps: Steps = STEPS, knobs: Knobs | None = None) -> TrialStarted:
    return TrialStarted(id=number, trial=Trial(rung=rung, knobs=knobs or Knobs(), purpose="grow", steps=steps))


def state_after(*events: Event | tuple[float, Event]) -> FitState:
    """The state after these events; a bare one comes a second after the one before it."""
    state, now_s = FitState(since_s=0.0), 0.0
    for each in events:
        now_s, event = each if isinstance(each, tuple) else (now_s + 1, each)
        state = advance(state, event, now_s)
    return state


def draw(state: FitState, now_s: float, width: int = 80, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    search = render_search(state, now_s, console)
    for part in (search, describe_status(state, now_s)):
        if part is not None:
            console.print(part)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def moved(number: int, phase: Phase, step: int) -> TrialMoved:
    return TrialMoved(id=number, phase=phase, step=step)


MIDWAY = (
    Note(text="starting Ray"),
    SEARCH,
    forecasted("ddp", 530),
    Skipped(rung="ddp", reason="cannot fit by the forecast"),
    forecasted("zero1", 430),
    finished(1, "zero1", oom("step", 0, 62.0)),
    forecasted("zero2", 330),
    finished(2, "zero2", fit(350, 9.5)),
    forecasted("zero3", 200),
    (10.0, started(3, "zero2", knobs=Knobs(micro_batch=4, accumulation=2))),
    (14.0, moved(3, "forward", 0)),
    (18.0, moved(3, "backward", 2)),
)


def test_a_table_that_a_terminal_would_cut_is_not_drawn() -> None:
    state = state_after(replace(SEARCH, ladder=("zero3-" + "x" * 80, "zero3")))
    assert any("zero3-x" in row for row in draw(state, 9.0, width=140))
    assert not any("zero3-x" in row for row in draw(state, 9.0, width=78))


@pytest.mark.parametrize("width", [80, 120])
def test_a_rung_has_a_row_with_its_state_and_its_memory(width: int) -> None:
    lines = draw(state_after(*MIDWAY), 19.0, width)
    by_rung = {rung: next(" ".join(line.split()) for line in lines if f" {rung} " in f"{line} ") for rung in LADDER}
    assert by_rung["ddp"] == "ddp – skipped device ~530.0 / 416.0 MiB"
    assert by_rung["zero1"] == "zero1 ✗ out of memory device ≥442.9 / 416.0 MiB"
    assert by_rung["zero2"] == "zero2 ▸ running device 350.0 / 416.0 MiB 9.5"
    assert by_rung["zero3"] == "zero3 waiting device ~200.0 / 416.0 MiB"
    assert by_rung["zero3-nvme"] == "zero3-nvme waiting"


def test_the_widest_rows_keep_their_state_at_80_columns() -> None:
    rung, full = "zero3-offload-optimizer", replace(oom("step", 0, 2**20), limit_bytes=1000 * MIB)
    rows = draw(state_after(SEARCH, finished(1, rung, fit(300, 1234.5)), finished(2, "zero3-nvme", full)), 5.0)
    assert any(" zero3-nvme               ✗ out of memory  device " in row for row in rows)
    assert any(f" {rung}  ✓ fits           device " in row for row in rows)


@pytest.mark.parametrize("width", [60, 76, 80, 120])
def test_no_line_of_the_view_is_wider_than_the_terminal(width: int) -> None:
    lines = draw(state_after(*MIDWAY, forecasted("zero3-offload-param", 100, host_mib=2000)), 19.0, width)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= len(LADDER) + (9 if width >= 80 else 13)  # sizes break below 80 columns


def test_the_view_of_a_rehearsal_says_that_nothing_is_proven() -> None:
    events = (event if event is not SEARCH else replace(SEARCH, rehearsed=True) for event in MIDWAY)
    text = "\n".join(draw(state_after(*events), 19.0))
    assert "best so far, not proven: zero2" in text


def test_the_view_shows_best_so_far_budget_and_current_steps() -> None:
    text = "\n".join(draw(state_after(*MIDWAY), 19.0, 120))
    assert "best so far: zero2 1×1, 9.5 samples/s" in text
    assert "budget used: 2 of 40 trials, 15.8 s of 20 min 0 s" in text
    assert "zero2  grow 4×2  backward, 2 of 5 steps done  9.0 s" in text


@pytest.mark.parametrize(
    ("trials", "seconds", "words"),
    [
        (0, 0.0, "budget used: 1 trial, 2.9 s"),
        (9, 0.0, "budget used: 1 of 9 trials, 2.9 s"),
        (0, 2.0, "budget used: 1 trial, 2.9 s of 2.0 s"),
        (9, 20.0, "budget used: 1 of 9 trials, 2.9 s of 20.0 s"),
    ],
)
def test_the_budget_is_shown_against_its_limits(trials: int, seconds: float, words: str) -> None:
    search = replace(SEARCH, most_trials=trials, most_seconds=seconds)
    assert words in draw(state_after(search, finished(1, "zero2", fit())), 9.0)


def test_a_full_host_is_shown_in_place_of_the_device() -> None:
    lines = draw(state_after(SEARCH, forecasted("zero3-offload", 100, host_mib=2000)), 5.0)
    assert "host   ~2000.0 / 1000.0 MiB" in next(line for line in lines if " zero3-offload " in line)


def test_the_best_so_far_leaves_the_headroom() -> None:
    tight, roomy = fit(410, 20.0), fit(300, 10.0)
    state = state_after(SEARCH, finished(1, "zero2", tight))
    assert (best := find_best(state)) is not None
    assert best.fits == (tight,)
    state = state_after(SEARCH, finished(1, "zero2", tight), finished(2, "zero3", roomy))
    assert (best := find_best(state)) is not None
    assert best.fits == (roomy,)


def test_a_rung_that_left_no_headroom_says_so() -> None:
    tight, roomy = fit(410, 20.0), fit(300, 10.0)
    state = state_after(SEARCH, finished(1, "zero2", tight))
    row = next(line for line in draw(state, 5.0) if " zero2 " in f"{line} ")
    assert "no headroom" in row
    assert "fits" not in row
    # What counts stands in the row, also where what does not was faster.
    state = state_after(SEARCH, finished(1, "zero2", tight), finished(2, "zero2", roomy, Knobs(micro_batch=2)))
    row = next(line for line in draw(state, 5.0) if " zero2 " in f"{line} ")
    assert "fits" in row
    assert "300.0 / 416.0 MiB" in row


def test_a_variant_that_ran_out_is_not_its_rung() -> None:
    bare = TrialFinished(record=record(2, "zero2", oom(), purpose="race", knobs=Knobs(checkpointing=False)))
    search = replace(SEARCH, recomputes=True)
    state = state_after(search, finished(1, "zero3", fit(300, 9.5)), bare)
    assert "waiting" in next(line for line in draw(state, 9.0) if "zero2 " in line)
    state = state_after(search, finished(1, "zero2", oom()), bare)
    assert "out of memory" in next(line for line in draw(state, 9.0) if "zero2 " in line)


def test_the_best_by_memory_has_the_lowest_peak() -> None:
    lean = replace(SEARCH, least_memory=True)
    state = state_after(lean, finished(1, "zero2", fit(390, 20.0)), finished(2, "zero3", fit(300, 10.0)))
    assert (best := find_best(state)) is not None
    assert best.trial.rung == "zero3"


TRIALS = {"walk": 1, "race": 6, "tune": 3, "certify": 1}
STAGED = replace(SEARCH, most_seconds=0.0)
STAGES = tuple(Stage(name=name, trials=trials) for name, trials in TRIALS.items())


def begun(name: str) -> StageStarted:
    return StageStarted(stages=STAGES, place=[*TRIALS].index(name))


WALKED = (
    (0.0, STAGED),
    (0.0, begun("walk")),
    (0.0, started(1, "zero2")),
    (5.0, timed(1, "walk", 5.0)),
    (5.0, begun("race")),
    (5.0, started(2, "zero2")),
)


def test_no_time_is_named_before_a_trial_was_timed() -> None:
    assert describe_progress(state_after(), 0.0) == ""
    assert describe_progress(state_after(*WALKED[:2]), 0.0) == "walk, 1 of 4"
    assert describe_progress(state_after(*WALKED), 9.0) == "race, 2 of 4: trial 2 of about 11"


def test_the_time_left_is_that_of_the_trials_left() -> None:
    raced = (*WALKED, (25.0, timed(2, "grow", 20.0)), (25.0, started(3, "zero2")))
    # 5 of the race, 3 of tuning, and a certificate of one and a half
    assert describe_progress(state_after(*raced), 25.0) == "race, 2 of 4: trial 3 of about 11, about 3 min left"
    assert describe_progress(state_after(*raced), 40.0) == "race, 2 of 4: trial 3 of about 11, about 3 min left"
    # One that takes longer than the others takes nothing from those after it.
    assert describe_progress(state_after(*raced), 400.0) == "race, 2 of 4: trial 3 of about 11, about 3 min left"
    certifying = (
        *raced,
        (45.0, timed(3, "grow", 20.0)),
        (45.0, begun("certify")),
        (45.0, started(4, "zero2")),
    )
    assert describe_progress(state_after(*certifying), 50.0) == "certify, 4 of 4: trial 4 of about 4, about 20 s left"


def test_a_trial_left_counts_as_long_as_the_longest_timed() -> None:
    raced = (*WALKED, (25.0, timed(2, "grow", 20.0)), (65.0, timed(3, "grow", 40.0)), (70.0, timed(4, "grow", 5.0)))
    # 3 of the race, 3 of tuning, and a certificate of one and a half
    assert describe_progress(state_after(*raced), 70.0) == "race, 2 of 4: 4 of about 11 trials done, about 5 min left"


def test_what_lies_between_trials_counts_as_time_left() -> None:
    raced = (*WALKED[:-1], (35.0, started(2, "zero2")), (55.0, timed(2, "grow", 20.0)))  # simulations took 30 s
    assert describe_progress(state_after(*raced), 55.0).endswith("about 5 min left")


def test_a_stage_that_takes_longer_counts_on() -> None:
    records = [timed(number, "grow", 20.0) for number in range(2, 12)]
    text = describe_progress(state_after(*WALKED[:-1], *records, started(12, "zero2")), 99.0)
    assert text.startswith("race, 2 of 4: trial 12 of about 16, ")


def test_no_more_is_left_than_the_budget() -> None:
    for limits, words in (
        ({"most_trials": 4}, "of at most 4 trials done,"),
        ({"most_seconds": 60.0}, "about 40 s left"),
    ):
        search = replace(STAGED, **{"most_trials": 0, **limits})  # type: ignore[arg-type]
        assert words in describe_progress(state_after((0.0, search), *WALKED[1:], (25.0, timed(2, "grow", 20.0))), 25.0)


def test_a_rehearsal_names_no_time() -> None:
    rehearsed = (replace(STAGED, rehearsed=True), *WALKED[1:], (25.0, timed(2, "grow", 20.0)))
    assert "left" not in describe_progress(state_after(*rehearsed), 25.0)


def test_the_view_shows_stage_and_time_left() -> None:
    lines = draw(state_after(*WALKED, (25.0, timed(2, "grow", 20.0))), 25.0)
    assert "race, 2 of 4: 2 of about 11 trials done, about 3 min left" in lines


def test_a_low_terminal_shows_only_what_runs() -> None:
    assert len(draw(state_after(*MIDWAY), 19.0, height=10)) == 1


def test_a_probe_has_no_table_of_rungs() -> None:
    assert len(draw(state_after(started(1, "zero2")), 2.0)) == 1


def test_without_colours_the_view_has_the_same_text() -> None:
    state = state_after(*MIDWAY)
    console = Console(
        file=io.StringIO(),
        width=80,
        height=40,
        force_terminal=True,
        _environ={"TERM": "xterm-256color", "NO_COLOR": "1"},
    )
    view = render_search(state, 19.0, console)
    assert view is not None
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b[3" not in text
    assert "\x1b[9" not in text
    assert "350.0 / 416.0 MiB" in text
