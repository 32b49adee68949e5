"""Progress while a forecast works: on a terminal the table as it fills, elsewhere a line for each finished rung."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from ..forecast.events import Forecasted, ForecastEvent, Simulating
from ..forecast.values import RungForecast
from ..values import Note
from . import words
from .plan_table import MARKS, of_predicted, rung_table


class PlanProgress:
    """A `forecast.events.ForecastListener` and a context manager; it writes to `console` only, standard error's.

    Events may come from any thread.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock, self._since = clock, clock()
        self._doing: dict[str, str] = {}
        self._note = ""
        self._rows: dict[tuple[str, str], RungForecast] = {}
        self._share = ""
        self._lock = threading.Lock()
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None

    def __enter__(self) -> PlanProgress:
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

    def __call__(self, event: ForecastEvent) -> None:
        with self._lock:
            match event:
                case Note():
                    self._note = event.text
                    if self._live is None:
                        self._print(event.text)
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
            self._print(f"{event.machine}: {line_of(said)}")
        elif self._live is None and said.largest_micro_batch is not None:
            self._print(f"{event.machine}: {said.rung}: up to micro batch {said.largest_micro_batch}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True, style=None)

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


def line_of(said: RungForecast) -> str:
    """A rung as one plain line."""
    mark, word, _ = MARKS[said.verdict]
    device = said.memory.get("device")
    peak = f"{of_predicted(device)}, " if device is not None else ""
    estimate = "" if said.exact else ", estimate"
    return f"{mark} {said.rung}: {word}{estimate}: {peak}{said.reason}"
