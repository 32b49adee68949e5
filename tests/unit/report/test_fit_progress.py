"""The live view of a fit: what its state says at a moment, and how that looks at 80 and 120 columns."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from autods.events import (
    Event,
    Note,
    SearchStarted,
    TrialFinished,
    TrialForecasted,
    TrialMoved,
    TrialStarted,
)
from autods.report.fit_progress import (
    FitState,
    advance,
    describe_status,
    estimate_seconds_left,
    find_best,
    list_rows,
    render_search,
)
from autods.types import Knobs, Outcome, Phase, Skipped, Steps, TierUse, Trial
from tests.support.reports import LADDER, LIMIT, MIB, fit, memory, oom, record

SEARCH = SearchStarted(ladder=LADDER, device_bytes=LIMIT, usable_bytes=0.95 * LIMIT, most_trials=40, most_seconds=1200)
STEPS = Steps(warmup=1, timed=4, most_timed=4)


def forecasted(rung: str, mib: float, knobs: Knobs | None = None, host_mib: float = 900) -> TrialForecasted:
    trial = Trial(rung=rung, knobs=knobs or Knobs(), purpose="walk")
    host = TierUse(peak_bytes=int(host_mib * MIB), limit_bytes=1000 * MIB)
    return TrialForecasted(trial=trial, memory={**memory(mib), "host": host})


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
    console = Console(file=io.StringIO(), width=width)
    search = render_search(state, now_s, width=width, height=height)
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


@pytest.mark.parametrize("width", [80, 120])
def test_a_rung_has_a_row_with_its_forecast_and_measured_peak(width: int) -> None:
    lines = draw(state_after(*MIDWAY), 19.0, width)
    by_rung = {rung: next(line for line in lines if f" {rung} " in f"{line} ") for rung in LADDER}
    assert "330.0 MiB" in by_rung["zero2"]
    assert "350.0 MiB" in by_rung["zero2"]
    assert "9.5" in by_rung["zero2"]
    assert "200.0 MiB" in by_rung["zero3"]
    assert by_rung["zero1"].split()[0] == "✗"
    assert "full" in by_rung["zero1"]
    assert "▶" in by_rung["zero1"]
    assert by_rung["ddp"].split()[0] == "–"
    assert "530.0 MiB" in by_rung["ddp"]
    assert by_rung["zero2"].split()[0] == "▸"
    assert [line for line in lines if "416.0 MiB" in line]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_of_the_view_is_wider_than_the_terminal(width: int) -> None:
    lines = draw(state_after(*MIDWAY, forecasted("zero3-offload-param", 100, host_mib=2000)), 19.0, width)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= 1 + len(LADDER) + 5


def test_the_view_of_a_rehearsal_says_that_nothing_is_proven() -> None:
    events = (event if event is not SEARCH else replace(SEARCH, rehearsed=True) for event in MIDWAY)
    text = "\n".join(draw(state_after(*events), 19.0))
    assert "best so far, not proven: zero2" in text
    assert "▄ simulated" in text
    assert "measured" not in text


def test_the_view_shows_best_so_far_budget_and_current_steps() -> None:
    text = "\n".join(draw(state_after(*MIDWAY), 19.0, 120))
    assert "best so far: zero2 1×1, 9.5 samples/s, 350.0 MiB" in text
    assert "measured" in text
    assert "budget used: 2 of 40 trials, 16 s of 20 min 0 s" in text
    assert "zero2  grow 4×2  backward, 2 of 5 steps done  9.0 s, about 5 s left" in text


@pytest.mark.parametrize(
    ("trials", "seconds", "words"),
    [
        (0, 0.0, "budget used: 1 trial, 3 s (no limit)"),
        (9, 0.0, "budget used: 1 of 9 trials, 3 s"),
        (0, 2.0, "budget used up (2 s): 1 trial, 3 s"),
        (9, 2.0, "budget used up (9 trials, 2 s): 1 trial, 3 s"),
    ],
)
def test_the_budget_is_shown_against_its_limits(trials: int, seconds: float, words: str) -> None:
    search = replace(SEARCH, most_trials=trials, most_seconds=seconds)
    assert words in draw(state_after(search, finished(1, "zero2", fit())), 9.0)


def test_the_upper_half_of_a_bar_is_the_forecast() -> None:
    events = (SEARCH, forecasted("zero2", 208), finished(1, "zero2", fit(312)), forecasted("zero3", 208))
    lines = draw(state_after(*events), 5.0, 120)
    assert f"{'█' * 15}{'▄' * 7}{' ' * 8}│" in next(line for line in lines if " zero2 " in line)
    assert f"{'▀' * 15}{' ' * 15}│" in next(line for line in lines if " zero3 " in line)


def test_a_forecast_stands_beside_a_trial_of_the_same_config() -> None:
    larger = Knobs(micro_batch=8)
    events = (SEARCH, forecasted("zero2", 208), finished(1, "zero2", fit(300, 20.0), larger))
    row = list_rows(state_after(*events))["zero2"]
    assert (row.forecast_bytes, row.measured_bytes) == (None, 300 * MIB)
    row = list_rows(state_after(*events, forecasted("zero2", 290, larger)))["zero2"]
    assert row.forecast_bytes == 290 * MIB


def test_a_full_host_is_shown_in_place_of_the_device() -> None:
    row = list_rows(state_after(SEARCH, forecasted("zero3-offload", 100, host_mib=2000)))["zero3-offload"]
    assert (row.tier, row.forecast_bytes, row.limit_bytes) == ("host", 2000 * MIB, 1000 * MIB)


def test_the_best_so_far_leaves_the_headroom() -> None:
    tight, roomy = fit(410, 20.0), fit(300, 10.0)
    state = state_after(SEARCH, finished(1, "zero2", tight))
    assert (best := find_best(state)) is not None
    assert best.outcome == tight
    state = state_after(SEARCH, finished(1, "zero2", tight), finished(2, "zero3", roomy))
    assert (best := find_best(state)) is not None
    assert best.outcome == roomy


def test_the_best_by_memory_has_the_lowest_peak() -> None:
    lean = replace(SEARCH, least_memory=True)
    state = state_after(lean, finished(1, "zero2", fit(390, 20.0)), finished(2, "zero3", fit(300, 10.0)))
    assert (best := find_best(state)) is not None
    assert best.trial.rung == "zero3"


def left_s(events: Iterable[Event | tuple[float, Event]], now_s: float) -> float | None:
    state = state_after(*events)
    (running,) = state.running.values()
    return estimate_seconds_left(running, now_s)


def test_time_left_follows_from_the_steps_that_were_seen() -> None:
    seen = ((10.0, started(1, "zero2")), (20.0, moved(1, "forward", 0)), (26.0, moved(1, "forward", 2)))
    assert left_s(seen, 27.0) == pytest.approx(3.0 * 3 - 1.0)
    assert left_s(seen, 99.0) == 0.0
    assert left_s(seen[:1], 11.0) is None
    assert left_s((*seen, (30.0, moved(1, "done", 4))), 31.0) is None


def test_a_low_terminal_shows_only_what_runs() -> None:
    assert len(draw(state_after(*MIDWAY), 19.0, height=10)) == 1


def test_a_probe_has_no_table_of_rungs() -> None:
    assert render_search(state_after(started(1, "zero2")), 2.0, width=80, height=40) is None


def test_without_colours_the_view_has_the_same_text() -> None:
    state = state_after(*MIDWAY)
    console = Console(
        file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm-256color", "NO_COLOR": "1"}
    )
    view = render_search(state, 19.0, width=80, height=40)
    assert view is not None
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b[3" not in text
    assert "\x1b[9" not in text
    assert "350.0 MiB" in text
