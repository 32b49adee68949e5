"""The live view of a fit: a state that events advance, and how a state looks on a terminal.

Both are pure functions. `live.Progress` keeps the state and has the clock and the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..events import Event, Note, SearchStarted, TrialFinished, TrialForecasted, TrialMoved, TrialStarted
from ..types import Fit, OutOfMemory, Phase, Record, Skipped, Tier, TierUse, Trial
from ..units import escape_controls, format_bytes
from .text import MARKS, Mark, format_number_of, format_phase, format_rate, format_seconds

LabelTrial = Callable[[Trial], str]
_STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "step")
_WIDE = 110  # terminal columns from which more is shown
_NARROW_BAR, _WIDE_BAR = 15, 30  # cells
_FORECAST, _MEASURED, _BOTH = "▀", "▄", "█"
_AT_LIMIT, _BEYOND_LIMIT = "│", "▶"
_WAITING, _RUNNING = Mark(" ", "waiting", "dim"), Mark("▸", "running", "cyan")
_OTHER_LINES = 6  # of the view, besides a row for each rung and a line for each trial


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrial:
    """A trial that runs now, and the times of its heartbeats in seconds of the clock.

    `stepping_since_s` is the start of its first optimizer step, `moved_s` that of its step number `step`, from 0.
    """

    trial: Trial
    since_s: float
    phase: Phase = "start"
    step: int = 0
    stepping_since_s: float | None = None
    moved_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitState:
    """What is known of a fit or a probe that works.

    `search` is None for a probe, and until a fit knows its rungs. `note` is the last sentence about progress, empty
    while trials run.
    """

    since_s: float
    search: SearchStarted | None = None
    forecasts: tuple[TrialForecasted, ...] = ()
    records: tuple[Record, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    running: Mapping[int, RunningTrial] = field(default_factory=dict)
    note: str = ""


def advance(state: FitState, event: Event, now_s: float) -> FitState:
    """The state after an event that comes at `now_s`."""
    match event:
        case Note(passing=False):
            return replace(state, note=escape_controls(event.text), since_s=now_s)
        case SearchStarted():
            return replace(state, search=event)
        case TrialForecasted():
            return replace(state, forecasts=(*state.forecasts, event))
        case Skipped(rung=rung, reason=reason):
            return replace(state, skipped={**state.skipped, rung: reason})
        case TrialStarted():
            started = RunningTrial(trial=event.trial, since_s=now_s, moved_s=now_s)
            return replace(state, running={**state.running, event.id: started})
        case TrialMoved() if event.id in state.running:
            moved = _move(state.running[event.id], event, now_s)
            return replace(state, running={**state.running, event.id: moved})
        case TrialFinished(record=record):
            running = {id: trial for id, trial in state.running.items() if id != record.id}
            return replace(state, running=running, records=(*state.records, record), note="", since_s=now_s)
        case _:
            return state


def _move(running: RunningTrial, event: TrialMoved, now_s: float) -> RunningTrial:
    since_s = running.stepping_since_s
    if since_s is None and event.phase in _STEP_PHASES:
        since_s = now_s
    moved_s = running.moved_s if event.step == running.step else now_s
    return replace(running, phase=event.phase, step=event.step, stepping_since_s=since_s, moved_s=moved_s)


# What a state says.


def estimate_seconds_left(running: RunningTrial, now_s: float) -> float | None:
    """Seconds until the trial's planned steps are done, by those that are; None before one is, and in an exam."""
    trial = running.trial
    if trial.exam is not None or running.stepping_since_s is None or not running.step:
        return None
    if running.phase not in _STEP_PHASES:
        return None
    step_s = (running.moved_s - running.stepping_since_s) / running.step
    return max(0.0, step_s * (trial.steps.warmup + trial.steps.timed - running.step) - (now_s - running.moved_s))


def find_best(state: FitState) -> Record | None:
    """The best trial so far that ran within the limit, by the objective of the fit; None before one fitted.

    Those that leave the headroom free and never flushed the allocator's cache go before others.
    """
    search = state.search
    assert search is not None

    def rank(item: tuple[Record, Fit]) -> tuple[bool, float]:
        fit = item[1]
        return fit.leaves_headroom(
            search.usable_bytes
        ), -fit.device_peak_bytes if search.least_memory else fit.samples_per_second

    return max(_fits(state), key=rank, default=(None, None))[0]


def _fits(state: FitState) -> list[tuple[Record, Fit]]:
    return [
        (record, record.outcome)
        for record in state.records
        if isinstance(record.outcome, Fit) and record.trial.exam is None and record.trial.limited
    ]


def describe_trial(trial: Trial) -> str:
    """'tune 4×2': the trial's purpose, micro batch and accumulation."""
    limit = "" if trial.limited else ", no limit"
    return f"{trial.purpose} {trial.knobs.micro_batch}×{trial.knobs.accumulation}{limit}"


def describe_status(state: FitState, now_s: float, label: LabelTrial = lambda trial: "") -> Text:
    """A line for each running trial: its phase, steps, and the seconds it took and has left; else the last note."""
    if not state.running:
        return Text(f"{state.note or 'deciding'}  {format_seconds(now_s - state.since_s)}", style="dim")
    lines = []
    for running in state.running.values():
        left_s = estimate_seconds_left(running, now_s)
        left = "" if left_s is None or left_s < 1 else f", about {_format_rough_seconds(left_s)} left"
        purpose = "  ".join(filter(None, (describe_trial(running.trial), label(running.trial))))
        spent = f"  {format_seconds(now_s - running.since_s)}{left}"
        place = (_describe_place(running), "cyan")
        lines.append(Text.assemble((running.trial.rung, "bold"), f"  {purpose}  ", place, (spent, "dim")))
    return Text("\n").join(lines)


# How it looks.


def _format_rough_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else format_seconds(seconds)


def _describe_place(running: RunningTrial) -> str:
    """'backward, 2 of 5 steps done', 'init'."""
    steps = running.trial.steps
    if running.phase not in _STEP_PHASES or running.trial.exam is not None:
        return format_phase(running.phase, running.step)
    planned = steps.warmup + steps.timed
    done = f"{running.step} of {planned}" if running.step < planned else str(running.step)
    return f"{running.phase}, {done} steps done"


def render_search(state: FitState, now_s: float, *, width: int, height: int) -> RenderableType | None:
    """A row for each rung, the best so far and the budget; None before the search, or where they leave no room."""
    if state.search is None or height < len(state.search.ladder) + len(state.running) + _OTHER_LINES:
        return None
    return Group(_rung_table(state, state.search, width), _describe_best(state), _describe_budget(state, now_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RungRow:
    """The memory of a rung on one tier: what the forecast says and what was measured, None where unknown.

    `record` is the rung's best trial, or its last one if none fitted.
    """

    mark: Mark
    tier: Tier
    limit_bytes: int
    forecast_bytes: int | None = None
    measured_bytes: int | None = None
    record: Record | None = None


def list_rows(state: FitState) -> dict[str, RungRow]:
    """The row of each rung, by its name and in the ladder's order.

    A forecast stands beside a measurement only if both are of one config. The tier is the device, or the tier that the
    forecast or the trial found too small.
    """
    search = state.search
    assert search is not None
    rows: dict[str, RungRow] = {}
    for rung in search.ladder:
        records = [record for record in state.records if record.trial.rung == rung and record.trial.exam is None]
        best = find_best(replace(state, records=tuple(records)))
        record = best or (records[-1] if records else None)
        forecasts = [
            forecast
            for forecast in state.forecasts
            if forecast.trial.rung == rung and (record is None or forecast.trial.knobs == record.trial.knobs)
        ]
        needs = forecasts[-1].memory if forecasts else {}
        uses = _measured_uses(record)
        over = [tier for tier, use in (*uses.items(), *needs.items()) if use.limit_bytes and _share(use) > 1]
        tier: Tier = over[0] if over else "device"
        need, use = needs.get(tier), uses.get(tier)
        limits = [known.limit_bytes for known in (use, need) if known is not None and known.limit_bytes]
        rows[rung] = RungRow(
            mark=_find_mark(state, rung, record),
            tier=tier,
            limit_bytes=limits[0] if limits else search.device_bytes,
            forecast_bytes=None if need is None else need.peak_bytes,
            measured_bytes=None if use is None else use.peak_bytes,
            record=record,
        )
    return rows


def _measured_uses(record: Record | None) -> Mapping[Tier, TierUse]:
    """The peaks of a trial. That of a full tier is its limit and what was missing, at least."""
    match record.outcome if record is not None else None:
        case Fit(memory=memory):
            return memory
        case OutOfMemory(tier=tier, limit_bytes=int(limit)) as outcome:
            return {tier: TierUse(peak_bytes=limit + (outcome.missing_bytes or 1), limit_bytes=limit)}
        case _:
            return {}


def _share(use: TierUse) -> float:
    return use.peak_bytes / use.limit_bytes if use.limit_bytes else 0.0


def _find_mark(state: FitState, rung: str, record: Record | None) -> Mark:
    if any(running.trial.rung == rung for running in state.running.values()):
        return _RUNNING
    if record is not None:
        return MARKS[record.outcome.kind]
    return MARKS["skipped"] if rung in state.skipped else _WAITING


def _rung_table(state: FitState, search: SearchStarted, width: int) -> Table:
    wide = width >= _WIDE
    rows = list_rows(state)
    other_tiers = any(row.tier != "device" for row in rows.values())
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold", max_width=24 if wide else 19, overflow="ellipsis")
    bar = _WIDE_BAR if wide else _NARROW_BAR - (7 if other_tiers else 0)
    table.add_column(no_wrap=True, width=bar + 1)
    for _ in range(4):
        table.add_column(justify="right", no_wrap=True)
    if other_tiers:
        table.add_column(no_wrap=True)
    if wide:
        table.add_column(no_wrap=True)
    size = format_bytes(search.device_bytes)
    limit = f"limit {size}" if len(size) + 6 <= bar + 1 else size
    heads = (
        "",
        "",
        limit[: bar + 1].rjust(bar + 1),
        f"{_FORECAST} forecast",
        f"{_MEASURED} {'simulated' if search.rehearsed else 'measured'}",
        "batch",
    )
    table.add_row(*heads, "samples/s", style="dim")
    for rung, row in rows.items():
        fit = row.record.outcome if row.record is not None else None
        is_full = isinstance(fit, OutOfMemory)
        forecast = "" if row.forecast_bytes is None else format_bytes(row.forecast_bytes)
        measured = "" if row.measured_bytes is None else "full" if is_full else format_bytes(row.measured_bytes)
        cells: list[RenderableType] = [
            Text(row.mark.sign, style=row.mark.style),
            Text(rung),
            _memory_bar(row, bar),
            forecast,
            measured,
            "" if row.record is None else str(row.record.trial.knobs.micro_batch),
            format_rate(fit.samples_per_second) if isinstance(fit, Fit) else "",
        ]
        if other_tiers:
            cells.append("" if row.tier == "device" else row.tier)
        if wide:
            cells.append(Text(row.mark.word, style=row.mark.style))
        table.add_row(*cells, style="dim" if row.mark.word in ("waiting", "skipped") else "")
    return table


def _memory_bar(row: RungRow, cells: int) -> Text:
    """Forecast and measurement as the upper and the lower half of a bar, which is as long as the limit."""
    known = [size for size in (row.forecast_bytes, row.measured_bytes) if size is not None]
    if not known or not row.limit_bytes:
        return Text()
    upper, lower = (
        0 if size is None else max(1, min(cells, round(cells * size / row.limit_bytes)))
        for size in (row.forecast_bytes, row.measured_bytes)
    )
    both = min(upper, lower)
    is_over = max(known) > row.limit_bytes
    signs = _BOTH * both + (_FORECAST if upper > lower else _MEASURED) * (max(upper, lower) - both)
    style = "red" if is_over else "blue" if row.measured_bytes is None else "green"
    end = (_BEYOND_LIMIT, "red") if is_over else (_AT_LIMIT, "dim")
    return Text.assemble((signs.ljust(cells), style), end)


def _describe_best(state: FitState) -> Text:
    best = find_best(state)
    so_far = "best so far" if state.search is None or not state.search.rehearsed else "best so far, not proven"
    if best is None or not isinstance(best.outcome, Fit):
        return Text(f"{so_far}: nothing has fitted", style="dim")
    device = best.outcome.memory.get("device")
    memory = f", {format_bytes(device.peak_bytes)}" if device is not None else ""
    knobs = best.trial.knobs
    checkpointing = "" if knobs.checkpointing else ", without checkpointing"
    return Text.assemble(
        f"{so_far}: ",
        (best.trial.rung, "bold green"),
        f" {knobs.micro_batch}×{knobs.accumulation}{checkpointing}, "
        f"{format_rate(best.outcome.samples_per_second)} samples/s{memory}",
    )


def _describe_budget(state: FitState, now_s: float) -> Text:
    """'budget: 7 of 40 trials, 3 min 20 s of 20 min 0 s'. What runs without regard to it may go beyond."""
    search = state.search
    assert search is not None
    spent_s = sum(record.seconds for record in state.records)
    spent_s += sum(now_s - running.since_s for running in state.running.values())
    trials, seconds = len(state.records), _format_rough_seconds(spent_s)
    most_trials, most_seconds = search.most_trials, _format_rough_seconds(search.most_seconds)
    if (most_trials and trials > most_trials) or (search.most_seconds and spent_s > search.most_seconds):
        limits = [f"{most_trials} trials"] if most_trials else []
        limits += [most_seconds] if search.most_seconds else []
        return Text(
            f"budget used up ({', '.join(limits)}): {format_number_of(trials, 'trial')}, {seconds}", style="dim"
        )
    used = f"{trials} of {most_trials} trials" if most_trials else format_number_of(trials, "trial")
    used += f", {seconds} of {most_seconds}" if search.most_seconds else f", {seconds}"
    limit = "" if most_trials or search.most_seconds else " (no limit)"
    return Text(f"budget used: {used}{limit}", style="dim")
