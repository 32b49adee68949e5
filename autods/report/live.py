"""Progress on the terminal while a command works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ..config.catalogue import ASKED, HERE
from ..events import Event, Note, TrialFinished, TrialMoved, TrialStarted
from ..forecast.values import ForecastEvent, RungFinished, RungForecast, SimulationStarted
from ..types import Failed, Fit, Outcome, OutOfMemory, Phase, Skipped, Trial
from . import text
from .plan_view import MARKS, format_predicted, rung_table


class LiveView:
    """A context manager around `_now`, which says what is redrawn; it writes to `console`, else to standard error."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock, self._since = clock, clock()
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None  # None where lines are printed instead

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._now, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _now(self) -> RenderableType:
        raise NotImplementedError

    def _print_plain(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True, style=None)


def mark_of(outcome: Outcome) -> tuple[str, str]:
    """A one-letter mark and its style."""
    match outcome:
        case Fit():
            return "✓", "green"
        case OutOfMemory():
            return "✗", "yellow"
        case Failed():
            return "!", "red"


@dataclass(slots=True)
class _Running:
    """A trial that runs now."""

    trial: Trial
    since: float
    phase: Phase = "start"
    step: int = 0


class Progress(LiveView):
    """A `events.Listener` and a context manager.

    On a terminal: finished trials as lines and the running one below them, with its phase and seconds. Elsewhere: one
    plain line for each finished trial, skipped rung and note. Events may come from any thread.
    label: what else is to be said of a trial, beside its rung and batch.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        label: Callable[[Trial], str] = lambda trial: "",
    ) -> None:
        super().__init__(console, clock=clock)
        self._label = label
        self._running: dict[int, _Running] = {}
        self._doing = Note(text="")

    def __call__(self, event: Event) -> None:
        match event:
            case Note():
                self._doing, self._since = event, self._clock()
                self._print(Text(event.text, style="dim"), event.text)
            case Skipped():
                line = f"skipped {event.rung}: {event.reason}"
                self._print(
                    _row("–", "dim", event.rung, "", f"skipped: {event.reason}", "", "dim", wide=self._wide), line
                )
            case TrialStarted():
                self._running[event.id] = _Running(event.trial, self._clock())
            case TrialMoved():
                if (now := self._running.get(event.id)) is not None:
                    now.phase, now.step = event.phase, event.step
            case TrialFinished():
                self._running.pop(event.record.id, None)
                self._doing = Note(text="")
                label = self._label(event.record.trial)
                plain = text.format_record(event.record, replayed=event.replayed, label=label)
                self._print(_finished(event, label, wide=self._wide), plain)

    def _print(self, pretty: RenderableType, plain: str) -> None:
        if self._live is not None:
            self._console.print(pretty)
        else:
            self._print_plain(plain)

    @property
    def _wide(self) -> bool:
        return self._console.width >= 110

    def _now(self) -> RenderableType:
        """What is redrawn: a line for each running trial, or the last note while nothing runs."""
        running = list(self._running.values())  # others may begin and end meanwhile
        if not running:
            elapsed = text.format_seconds(self._clock() - self._since)
            self._spinner.update(text=Text(f"{self._doing.text or 'deciding'}  {elapsed}", style="dim"))
        else:
            self._spinner.update(text=Text("\n").join(map(self._line, running)))
        return self._spinner

    def _line(self, now: _Running) -> Text:
        place, elapsed = text.format_phase(now.phase, now.step), text.format_seconds(self._clock() - now.since)
        return Text.assemble(
            (now.trial.rung, "bold"),
            f"  {_asked(now.trial)}  ",
            self._label(now.trial),
            "  ",
            (place, "cyan"),
            (f"  {elapsed}", "dim"),
        )


def _finished(event: TrialFinished, label: str, *, wide: bool) -> RenderableType:
    record = event.record
    mark, style = mark_of(record.outcome)
    end = "journal" if event.replayed else text.format_seconds(record.seconds)
    said = f"{label}{': ' * bool(label)}{text.format_outcome(record.outcome)}"
    return _row(
        mark, style, record.trial.rung, _asked(record.trial), said, end, "dim" if event.replayed else "", wide=wide
    )


def _asked(trial: Trial) -> str:
    """'tune 4×2': why, and micro batch × accumulation."""
    limit = "" if trial.limited else ", no limit"
    return f"{trial.purpose} {trial.knobs.micro_batch}×{trial.knobs.accumulation}{limit}"


def _row(mark: str, mark_style: str, rung: str, asked: str, said: str, end: str, style: str, *, wide: bool) -> Table:
    """One line with its columns at fixed places, so that lines printed one by one stand under each other."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=1, style=mark_style)
    table.add_column(width=19 if wide else 13, overflow="fold", style="bold")
    table.add_column(width=12 if wide else 9)
    table.add_column(ratio=1)
    table.add_column(width=7, justify="right", style="dim")
    table.add_row(mark, Text(rung), Text(asked), Text(said), end, style=style)
    return table


class PlanProgress(LiveView):
    """A `forecast.values.ForecastListener` and a context manager. Events may come from any thread."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock=clock)
        self._doing: dict[str, str] = {}
        self._note = ""
        self._rows: dict[tuple[str, str], RungForecast] = {}
        self._share = ""
        self._lock = threading.Lock()

    def __call__(self, event: ForecastEvent) -> None:
        with self._lock:
            match event:
                case Note():
                    self._note = event.text
                    if self._live is None:
                        self._print_plain(event.text)
                case SimulationStarted():
                    self._doing[event.rung] = f"{event.rung} at micro batch {event.micro_batch}"
                case RungFinished():
                    self._finished(event)

    def _finished(self, event: RungFinished) -> None:
        said = event.forecast
        before = self._rows.get((event.machine, said.rung))
        self._rows[event.machine, said.rung] = said
        self._share = f"{event.done} of at most {event.total}"
        self._doing.pop(said.rung, None)
        if self._live is None and before is None:
            self._print_plain(f"{_of(event.machine)}{line_of(said)}")
        elif self._live is None and said.largest_micro_batch is not None:
            self._print_plain(f"{_of(event.machine)}{said.rung}: up to micro batch {said.largest_micro_batch}")

    def _now(self) -> RenderableType:
        """What is redrawn: the rows of the machine that is at work, and what is being simulated."""
        with self._lock:
            doing = ", ".join(list(self._doing.values())[-2:]) or self._note
            share, rows = self._share, dict(self._rows)
        elapsed = text.format_seconds(self._clock() - self._since)
        self._spinner.update(text=Text.assemble((f"{doing}  ", ""), (f"{share}  {elapsed}", "dim")))
        machines = {machine for machine, _ in rows}
        if len(machines) != 1:
            return self._spinner
        return Group(rung_table(rows.values(), best=None, width=min(self._console.width, 130)), self._spinner)


def _of(machine: str) -> str:
    """A machine of the catalogue by its name; the one that was described, or this one, needs none."""
    return "" if machine in (ASKED, HERE) else f"{machine}: "


def line_of(said: RungForecast) -> str:
    """A rung as one plain line; its reason says what it needs of what decides."""
    mark, word, _ = MARKS[said.verdict]
    device = said.memory.get("device")
    peak = f"{format_predicted(device)}, " if device is not None and not said.reason.startswith("needs ") else ""
    return f"{mark} {said.rung}: {word}: {peak}{said.reason}"
