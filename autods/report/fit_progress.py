"""The live view of a fit: a state that events advance, and how a state looks on a terminal.

Both are pure functions. `live.TrialProgress` keeps the state and has the clock and the terminal. The rungs are drawn as
the ladder of the answer, as far as it is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..config.checkpointing import describe_state, find_state
from ..events import (
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
from ..types import Fit, Phase, Record, Skipped, Trial
from ..units import escape_controls
from .answers.ladder import LADDER, LadderRow, find_telling_trials, gauge_use, list_ladder
from .document import Gauge, Medium, tabulate
from .render_terminal import fit_table, is_whole
from .results.fit import FitQuestion, FitReport
from .results.measured import Measured, has_headroom, measure_configs
from .text import MARKS, Mark, format_about, format_number_of, format_phase, format_rate, format_seconds
from .trial_names import LabelTrial

_STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "step")
_WAITING, _RUNNING = Mark(" ", "waiting", "dim"), Mark("▸", "running", "cyan")
_COLUMNS = tuple(column for column in LADDER if not column.below)
_LEAST_COLUMNS = 76  # of a terminal, from which the rows fit into a line each
_EXAM = 1.5  # so many times as long as another trial one of the certificate takes: 0.9 to 2 on 2 CPU ranks
_OTHER_LINES = 9  # of the view, besides a row for each rung and a line for each trial


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrial:
    """A trial that runs now: when it began, in seconds of the clock, and its last heartbeat."""

    trial: Trial
    since_s: float
    phase: Phase = "start"
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitState:
    """What is known of a fit or a probe that works.

    `search` is None for a probe, and until a fit knows its rungs. `note` is the last sentence about progress, empty
    while trials run. `forecasts` has the last one of each rung. `stages` began after `earlier` trials. `fresh`
    counts the trials that ran since the search began, and were not replayed. `between_s` are the seconds before each
    of them, in which forecasts are made. The last one ended at `ended_s`.
    """

    since_s: float
    search: SearchStarted | None = None
    forecasts: Mapping[str, TrialForecasted] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    running: Mapping[int, RunningTrial] = field(default_factory=dict)
    note: str = ""
    stages: StageStarted | None = None
    earlier: int = 0
    fresh: int = 0
    between_s: float = 0.0
    ended_s: float = 0.0


def advance(state: FitState, event: Event, now_s: float) -> FitState:
    """The state after an event that comes at `now_s`."""
    match event:
        case Note(passing=False):
            return replace(state, note=escape_controls(str(event)), since_s=now_s)
        case SearchStarted():
            return replace(state, search=event, ended_s=now_s)
        case StageStarted():
            return replace(state, stages=event, earlier=len(state.records))
        case TrialForecasted():
            return replace(state, forecasts={**state.forecasts, event.trial.rung: event})
        case Skipped():
            return replace(state, skipped=(*state.skipped, event))
        case TrialStarted():
            between_s = state.between_s
            if not state.running and state.search is not None:
                between_s += now_s - state.ended_s
            started = RunningTrial(trial=event.trial, since_s=now_s)
            return replace(state, running={**state.running, event.id: started}, between_s=between_s)
        case TrialMoved() if event.id in state.running:
            moved = replace(state.running[event.id], phase=event.phase, step=event.step)
            return replace(state, running={**state.running, event.id: moved})
        case TrialFinished(record=record, replayed=replayed):
            running = {id: trial for id, trial in state.running.items() if id != record.id}
            state = replace(state, running=running, records=(*state.records, record), note="", since_s=now_s)
            return state if replayed else replace(state, fresh=state.fresh + 1, ended_s=now_s)
        case _:
            return state


# What a state says.


def describe_progress(state: FitState, now_s: float) -> str:
    """'race, 2 of 4: trial 7 of about 14, about 3 min left'; '' before the search.

    The trials left are those that each stage usually takes, less those it has had. Each counts as long as
    the longest of this fit that timed steps, since those of larger micro batches follow. Before there is one no time is
    named: a walk's trial takes a fourth of it, or all. Nor is there one in a rehearsal, where nobody waits for trials.
    """
    search = state.search
    if search is None or state.stages is None:
        return ""
    stages, place = state.stages.stages, state.stages.place
    left = _count_left(state, stages[place:])
    number = len(state.records) + bool(state.running)
    usual = len(state.records) + sum(left)
    is_limited = 0 < search.most_trials < usual
    total = f"at most {max(search.most_trials, number)}" if is_limited else f"about {usual}"
    words = f"{stages[place].name}, {place + 1} of {len(stages)}"
    if state.running:
        words += f": trial {number} of {total}"
    elif number:
        words += f": {number} of {total} trials done"
    left_s = _estimate_left(state, search, list(zip(stages[place:], left, strict=True)), now_s)
    return words if left_s is None else f"{words}, {format_about(left_s)} left"


def _count_left(state: FitState, stages: Sequence[Stage]) -> list[int]:
    """The trials that this stage and those after it are to take; one that runs is among them."""
    current, *later = stages
    had = len(state.records) - state.earlier
    return [max(current.trials - had, len(state.running)), *(stage.trials for stage in later)]


def _estimate_left(
    state: FitState, search: SearchStarted, left: Sequence[tuple[Stage, int]], now_s: float
) -> float | None:
    """The seconds that the trials left take, with what lies between them; None where none was timed."""
    timed = [
        record.seconds
        for record in state.records
        if isinstance(record.outcome, Fit) and record.trial.purpose != "walk" and record.trial.exam is None
    ]
    if search.rehearsed or not timed:
        return None
    between_s = state.between_s / state.fresh if state.fresh else 0.0
    trial_s = [(_EXAM if stage.name == "certify" else 1.0) * max(timed) for stage, _ in left]
    seconds = sum(trials * (between_s + each_s) for (_, trials), each_s in zip(left, trial_s, strict=True))
    # One that takes longer than that does not shorten those after it.
    seconds -= sum(min(trial_s[0], now_s - running.since_s) for running in state.running.values())
    if search.most_seconds:
        seconds = min(seconds, search.most_seconds - _count_spent(state, now_s))
    return max(0.0, seconds)


def _count_spent(state: FitState, now_s: float) -> float:
    """The seconds of all trials, with those that run."""
    running_s = sum(now_s - running.since_s for running in state.running.values())
    return sum(record.seconds for record in state.records) + running_s


def leaves_headroom(record: Record, search: SearchStarted | None) -> bool:
    """What `has_headroom` tells. No trial of a probe, which has no search, is asked for headroom."""
    return search is None or has_headroom(record, search.usable_bytes)


def find_best(state: FitState) -> Measured | None:
    """The best config so far that ran within the limit, by the objective of the fit; None before one fitted.

    Those that leave the headroom free go before others.
    """
    search = state.search
    assert search is not None

    def rank(config: Measured) -> tuple[bool, float]:
        return config.leaves_headroom(search.usable_bytes), config.score(by_memory=search.least_memory)

    return max(measure_configs(state.records), key=rank, default=None)


def list_rows(state: FitState) -> list[LadderRow]:
    """A row for each rung of the ladder, as the answer has it; with the forecast where nothing was measured."""
    search, best = state.search, find_best(state)
    assert search is not None
    counting = {record.trial.rung for record in state.records if _fits(record) and leaves_headroom(record, search)}
    # What does not count stands in the row of a rung that has nothing better.
    trials = [
        record for record in state.records if record.trial.rung not in counting or leaves_headroom(record, search)
    ]
    so_far = FitReport(
        status="nothing_fits" if best is None else "fit",
        rung=None if best is None else best.trial.rung,
        knobs=None if best is None else best.trial.knobs,
        trials=tuple(trials),
        skipped=state.skipped,
        question=FitQuestion(
            ladder=search.ladder,
            usable_bytes=int(search.usable_bytes),
            objective="memory" if search.least_memory else "samples",
            checkpointing=search.recomputes,
        ),
    )
    known = {row.rung: row for row in list_ladder(so_far)}
    telling = find_telling_trials(so_far)
    running = {each.trial.rung for each in state.running.values()}
    rows = []
    for rung in search.ladder:
        row = known.get(rung) or LadderRow(rung=rung, wins=False, mark=_WAITING, reason="")
        memory = row.memory[:1] if isinstance(row.memory, tuple) else ()
        trial = telling.get(rung)
        counts = not isinstance(trial, Record) or leaves_headroom(trial, search)
        mark = _RUNNING if rung in running else row.mark if counts else MARKS["no_headroom"]
        rows.append(replace(row, mark=mark, memory=memory or _gauge_forecast(state.forecasts.get(rung))))
    return rows


def _fits(record: Record) -> bool:
    return isinstance(record.outcome, Fit) and record.trial.limited


def _gauge_forecast(forecast: TrialForecasted | None) -> tuple[Gauge, ...]:
    """The device's memory by the forecast, or that of the tier that is too small."""
    uses = {} if forecast is None else forecast.memory
    over = [tier for tier, use in uses.items() if use.limit_bytes and use.peak_bytes > use.limit_bytes]
    return tuple(gauge_use(tier, uses[tier], "~") for tier in (*over, *uses)[:1])


def describe_status(state: FitState, now_s: float, label: LabelTrial = lambda trial: "") -> Text:
    """A line for each running trial: its phase, its steps, and the seconds it took; else the last note."""
    if not state.running:
        return Text(f"{state.note or 'deciding'}  {format_seconds(now_s - state.since_s)}", style="dim")
    lines = []
    for running in state.running.values():
        trial = running.trial
        limit = "" if trial.limited else ", no limit"
        purpose = f"{trial.purpose} {trial.knobs.micro_batch}×{trial.knobs.accumulation}{limit}"
        purpose = "  ".join(filter(None, (purpose, label(trial))))
        place, spent = (_describe_place(running), "cyan"), (f"  {format_seconds(now_s - running.since_s)}", "dim")
        lines.append(Text.assemble((trial.rung, "bold"), f"  {purpose}  ", place, spent))
    return Text("\n").join(lines)


def _describe_place(running: RunningTrial) -> str:
    """'backward, 2 of 5 steps done', 'init'."""
    steps = running.trial.steps
    if running.phase not in _STEP_PHASES or running.trial.exam is not None:
        return format_phase(running.phase, running.step)
    planned = steps.warmup + steps.timed
    done = f"{running.step} of {planned}" if running.step < planned else str(running.step)
    return f"{running.phase}, {done} steps done"


def render_search(state: FitState, now_s: float, console: Console) -> RenderableType | None:
    """A row for each rung, the best so far, the progress and the budget; None before the search, or without room."""
    if state.search is None or console.width < _LEAST_COLUMNS:
        return None
    if console.height < len(state.search.ladder) + len(state.running) + _OTHER_LINES:
        return None
    table, _ = fit_table(tabulate(_COLUMNS, list_rows(state)), console, Medium.BRIEF)
    if not is_whole(table, console):
        return None
    progress = describe_progress(state, now_s)
    parts = [Text(progress, style="bold")] if progress else []
    return Group(table, _describe_best(state, state.search), *parts, _describe_budget(state, state.search, now_s))


def _describe_best(state: FitState, search: SearchStarted) -> Text:
    best = find_best(state)
    so_far = "best so far, not proven" if search.rehearsed else "best so far"
    if best is None:
        return Text(f"{so_far}: nothing has fitted", style="dim")
    knobs, rate = best.trial.knobs, format_rate(best.samples_per_second)
    checkpointing = "" if find_state(knobs) == "on" else f", {describe_state(knobs)}"
    config = f" {knobs.micro_batch}×{knobs.accumulation}{checkpointing}, {rate} samples/s"
    return Text.assemble(f"{so_far}: ", (best.trial.rung, "bold green"), config)


def _describe_budget(state: FitState, search: SearchStarted, now_s: float) -> Text:
    """'budget used: 7 of 40 trials, 3 min 20 s of 20 min 0 s'. What runs without regard to it may go beyond."""
    spent_s = _count_spent(state, now_s)
    trials = f"{len(state.records)} of " if search.most_trials else ""
    trials += format_number_of(search.most_trials or len(state.records), "trial")
    limit = f" of {format_seconds(search.most_seconds)}" if search.most_seconds else ""
    return Text(f"budget used: {trials}, {format_seconds(spent_s)}{limit}", style="dim")
