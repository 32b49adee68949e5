"""Progress while a fit works: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..events import Event, Note, TrialFinished, TrialMoved, TrialStarted
from ..outcomes import Failed, Fit, Outcome, OutOfMemory, Phase
from ..values import Skipped, Trial
from . import words
from .live import LiveView


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
                plain = words.of_record(event.record, replayed=event.replayed, label=label)
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
            elapsed = words.of_seconds(self._clock() - self._since)
            self._spinner.update(text=Text(f"{self._doing.text or 'deciding'}  {elapsed}", style="dim"))
        else:
            self._spinner.update(text=Text("\n").join(map(self._line, running)))
        return self._spinner

    def _line(self, now: _Running) -> Text:
        place, elapsed = words.of_phase(now.phase, now.step), words.of_seconds(self._clock() - now.since)
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
    end = "journal" if event.replayed else words.of_seconds(record.seconds)
    said = f"{label}{': ' * bool(label)}{words.of_outcome(record.outcome)}"
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
