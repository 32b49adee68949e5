"""Progress while a forecast works: on a terminal the table as it fills, elsewhere a line for each finished rung."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..catalogue import ASKED, HERE
from ..events import Note
from ..forecast.events import Forecasted, ForecastEvent, Simulating
from ..forecast.values import RungForecast
from . import words
from .live import LiveView
from .plan_table import MARKS, of_predicted, rung_table


class PlanProgress(LiveView):
    """A `forecast.events.ForecastListener` and a context manager. Events may come from any thread."""

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
                case Simulating():
                    self._doing[event.rung] = f"{event.rung} at micro batch {event.micro_batch}"
                case Forecasted():
                    self._finished(event)

    def _finished(self, event: Forecasted) -> None:
        said = event.forecast
        before = self._rows.get((event.machine, said.rung))
        self._rows[event.machine, said.rung] = said
        self._share = f"{event.done} of at most {event.total}"
        self._doing.pop(said.rung, None)
        if self._live is None and (before is None or before.exact != said.exact):
            self._print_plain(f"{_of(event.machine)}{line_of(said)}")
        elif self._live is None and said.largest_micro_batch is not None:
            self._print_plain(f"{_of(event.machine)}{said.rung}: up to micro batch {said.largest_micro_batch}")

    def _now(self) -> RenderableType:
        """What is redrawn: the rows of the machine that is at work, and what is being simulated."""
        with self._lock:
            doing = ", ".join(list(self._doing.values())[-2:]) or self._note
            share, rows = self._share, dict(self._rows)
        elapsed = words.of_seconds(self._clock() - self._since)
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
    peak = f"{of_predicted(device)}, " if device is not None and not said.reason.startswith("needs ") else ""
    estimate = "" if said.exact else ", estimate"
    return f"{mark} {said.rung}: {word}{estimate}: {peak}{said.reason}"
