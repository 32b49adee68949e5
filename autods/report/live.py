"""Progress on the terminal while a command works."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rich.console import Console, ConsoleRenderable, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from ..config.catalogue import ASKED, HERE
from ..events import (
    AttemptStarted,
    Event,
    Note,
    RankPrinted,
    RunEvent,
    SearchStarted,
    StageStarted,
    StepDone,
    TrialFinished,
    TrialForecasted,
    TrialMoved,
    TrialStarted,
)
from ..forecast.values import RungFinished, RungForecast, SimulationStarted
from ..types import Skipped, Trial
from ..units import escape_controls, format_bytes
from .answers.plan_advice import describe_site_answer
from .answers.plan_rungs import tabulate_rungs
from .document import Medium
from .fit_progress import FitState, advance, describe_progress, describe_status, leaves_headroom, render_search
from .rank_logs import RankLogs
from .render_terminal import fit_table, is_whole
from .results.plan import AnswerSoFar, PlanEvent
from .text import MARKS, Mark, format_number_of, format_seconds, format_step_seconds
from .trial_names import LabelTrial, format_record, unusual_knobs

_QUIET_S, _QUIET_AGAIN_S = 25.0, 60.0  # without a line, where nothing is redrawn
_LOOK_EVERY_S = 1.0
_DRAWS_PER_S = 4  # a drawing takes 9 ms, which trials on CPU ranks must not feel
_LOGS_EVERY_S = 0.5
_LINES_KEPT = 200  # to be printed again on a terminal that got smaller
_PROGRESS_EVERY_S = 60.0  # at the end of a trial, where nothing is redrawn
_STEP_LINE_EVERY_S = 10.0  # of a real run


class _ResizableLive(Live):
    """A Live that leaves no ghost on a terminal that got smaller.

    Some terminals break the lines of the last drawing anew, and some cut them, so that nobody knows how many rows it
    has then. The screen is cleared, and the last of `printed`, the lines above the drawing, are printed again.
    """

    def __init__(self, console: Console, draw: Callable[[], RenderableType]) -> None:
        super().__init__(console=console, get_renderable=draw, refresh_per_second=_DRAWS_PER_S, transient=True)
        self.printed: deque[Text] = deque(maxlen=_LINES_KEPT)
        self._size = console.size

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        before, self._size = self._size, self.console.size
        processed = super().process_renderables(renderables)
        if self._size.width >= before.width and self._size.height >= before.height:
            return processed
        back, *rest = processed
        return [back, Control.home(), Control.clear(), *self._list_lines_above(), *rest]

    def _list_lines_above(self) -> list[Text]:
        """The last of the printed lines that have room above the drawing."""
        rows, lines = self._size.height - len(self.console.render_lines(self.get_renderable(), pad=False)), list[Text]()
        for line in reversed(self.printed):
            rows -= max(1, -(-line.cell_len // self._size.width))
            if rows < 1:
                break
            lines.insert(0, line)
        return lines


class LiveView:
    """A context manager that redraws `_current` on a terminal. It writes to `console`, else to standard error.

    Where nothing can be redrawn, a line says what goes on when there was none for some time.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._since = time.monotonic()
        self._quiet_until_s = self._since + _QUIET_S
        self._over = threading.Event()
        self._spinner = Spinner("dots", style="cyan")
        self._live: _ResizableLive | None = None  # None where lines are printed instead

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = _ResizableLive(self._console, self._current)
            self._live.start()
        else:
            threading.Thread(target=self._break_silence, name="progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _current(self) -> RenderableType:
        """What is drawn: a line with what goes on now."""
        self._spinner.update(text=self._status())
        return self._spinner

    def _status(self) -> Text:
        """What goes on now, with its seconds."""
        raise NotImplementedError

    def _break_silence(self) -> None:
        """Say what goes on whenever nothing was printed for some time."""
        while not self._over.wait(_LOOK_EVERY_S):
            if time.monotonic() > self._quiet_until_s:
                lines = (" ".join(line.split()) for line in self._status().plain.splitlines())
                self._print_plain("\n".join(f"… {line}" for line in lines), _QUIET_AGAIN_S)

    def _print_above(self, line: Text) -> None:
        """Print a line above the drawing, whole, so that it can be copied."""
        if self._live is not None:
            self._live.printed.append(line)
        self._console.print(line, soft_wrap=True)

    def _print_plain(self, line: str, quiet_s: float | None = None) -> None:
        self._quiet_until_s = time.monotonic() + (_QUIET_S if quiet_s is None else quiet_s)
        self._console.print(escape_controls(line), markup=False, highlight=False, soft_wrap=True, style=None)


class CheckProgress(LiveView):
    """A context manager that shows what is checked, which may take long: files that do not answer, or a cluster."""

    def __init__(self, subject: str) -> None:
        super().__init__()
        self._subject = subject

    def _status(self) -> Text:
        return Text(f"{self._subject} {format_seconds(time.monotonic() - self._since)}")


class TrialProgress(LiveView):
    """An `events.Listener` and a context manager.

    On a terminal it prints finished trials as lines. Below them it draws the rungs of a fit, the best so far, the
    budget, and what runs.
    Elsewhere it prints one plain line for each finished trial, skipped rung and note. Events may come from any thread.
    `label` formats a trial's conditions, which stand beside its rung and batch; those of a fit are its unusual knobs.
    With `logs`, the folder of all logs,
    it also prints what the ranks print.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        label: LabelTrial | None = None,
        logs: Path | None = None,
    ) -> None:
        super().__init__(console)
        self._label = label
        self._logs = RankLogs(logs) if logs is not None else None
        self._state = FitState(since_s=time.monotonic())
        self._progress_said_s = time.monotonic()
        self._lock = threading.Lock()
        self.warned: set[str] = set()  # the warnings that were printed

    def __enter__(self) -> Self:
        super().__enter__()
        if self._logs is not None:
            threading.Thread(target=self._follow_logs, name="rank logs", daemon=True).start()
        return self

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._state = advance(self._state, event, time.monotonic())
        if isinstance(event, TrialFinished) and not event.replayed:
            self._print_logs(event.record.id, event.record.trial, ended=True)
        match event:
            case Note():
                self._print(str(event), style="yellow" if event.warns else "dim")
                if event.warns:
                    self.warned.add(event.text)
            case Skipped(rung=rung, reason=reason):
                self._print(f"skipped {rung}: {reason}", mark=MARKS["skipped"], style="dim")
            case TrialFinished(record=record, replayed=replayed):
                counts = leaves_headroom(record, self._state.search)
                line = format_record(record, replayed=replayed, label=self._name(record.trial), counts=counts)
                mark = MARKS[record.outcome.kind if counts else "no_headroom"]
                self._print(line, mark=mark, style="dim" if replayed else "")
                if self._live is None and not replayed and time.monotonic() - self._progress_said_s > _PROGRESS_EVERY_S:
                    self._print_progress()
            case StageStarted() if self._live is None:
                self._print_progress()
            case SearchStarted() | StageStarted() | TrialForecasted() | TrialStarted() | TrialMoved():
                pass  # the view below shows them

    def _name(self, trial: Trial) -> str:
        if self._label is not None:
            return self._label(trial)
        search = self._state.search
        return "" if search is None else unusual_knobs(trial.knobs, recomputes=search.recomputes)

    def _print_progress(self) -> None:
        """Print the stage and how long it takes still, where nothing is redrawn."""
        if progress := describe_progress(self._state, now_s := time.monotonic()):
            self._progress_said_s = now_s
            self._print_plain(progress)

    def _follow_logs(self) -> None:
        while not self._over.wait(_LOGS_EVERY_S):
            for id, running in self._state.running.items():
                self._print_logs(id, running.trial)

    def _print_logs(self, id: int, trial: Trial, *, ended: bool = False) -> None:
        for line in self._logs.read_new_lines(id, trial, ended=ended) if self._logs is not None else ():
            if self._live is not None:
                self._print_above(Text(escape_controls(line), style="dim"))
            else:
                self._print_plain(line)

    def _print(self, line: str, *, mark: Mark | None = None, style: str = "") -> None:
        if self._live is None:
            self._print_plain(line)
            return
        sign = (f"{mark.sign} ", mark.style) if mark is not None else ""
        self._print_above(Text.assemble(sign, (escape_controls(line), style)))

    def _current(self) -> RenderableType:
        search = render_search(self._state, time.monotonic(), self._console)
        return super()._current() if search is None else Group("", search, super()._current())

    def _status(self) -> Text:
        now_s = time.monotonic()
        status = describe_status(self._state, now_s, self._name)
        progress = "" if self._live is not None else describe_progress(self._state, now_s)
        return Text(f"{progress}\n").append_text(status) if progress else status


class PlanProgress(LiveView):
    """A `results.plan.PlanListener` and a context manager. Events may come from any thread."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._doing: dict[str, str] = {}
        self._note = ""
        self._rows: dict[tuple[str, str], RungForecast] = {}
        self._share = ""
        self._all_done = False
        self._lock = threading.Lock()

    def __call__(self, event: PlanEvent) -> None:
        with self._lock:
            match event:
                case Note():
                    if not event.passing:
                        self._note = escape_controls(event.text)
                    if self._live is None:
                        self._print_plain(event.text)
                    elif event.passing:  # the line below shows what goes on
                        self._print_above(Text(escape_controls(event.text), style="dim"))
                case SimulationStarted():
                    self._doing.pop(event.rung, None)  # the newest are shown
                    self._doing[event.rung] = f"{event.rung} at micro batch {event.micro_batch}"
                    if self._all_done:
                        self._share = "every rung is done; simulating what else would help"
                case RungFinished(forecast=forecast):
                    is_new = (event.machine, forecast.rung) not in self._rows
                    self._rows[event.machine, forecast.rung] = forecast
                    self._share = f"{event.done} of at most {event.total}"
                    self._all_done = event.done == event.total
                    self._doing.pop(forecast.rung, None)
                    if self._live is None:
                        self._print_rung(event, is_new)
                case AnswerSoFar(report=report, left=left):
                    answer = describe_site_answer(report, report.sites[0])
                    still = format_number_of(left, "more rung")
                    self._print_above(Text(f"so far: {escape_controls(answer)}  ({still} to simulate)", style="bold"))

    def _print_rung(self, event: RungFinished, is_new: bool) -> None:
        forecast, mark = event.forecast, MARKS[event.forecast.verdict]
        # A machine of the catalogue is named, but not this machine or one described by options.
        machine = "" if event.machine in (ASKED, HERE) else f"{event.machine}: "
        if is_new:
            self._print_plain(f"{machine}{mark.sign} {forecast.rung}: {mark.word}: {forecast.reason}")
        elif forecast.largest_micro_batch is not None:
            self._print_plain(f"{machine}{forecast.rung}: up to micro batch {forecast.largest_micro_batch}")

    def _status(self) -> Text:
        """The current simulations."""
        with self._lock:
            doing = ", ".join(list(self._doing.values())[-2:]) or self._note
            share = self._share
        elapsed = format_seconds(time.monotonic() - self._since)
        return Text.assemble((doing, ""), (f" · {share} · {elapsed}" if share else f" · {elapsed}", "dim"))

    def _current(self) -> RenderableType:
        """The rows of the machine that is being simulated, where they have room, and a line with the simulation."""
        with self._lock:
            rows = dict(self._rows)
        if len({machine for machine, _ in rows}) != 1:
            return super()._current()
        table, _ = fit_table(tabulate_rungs(rows.values()), self._console, Medium.BRIEF)
        return Group(table, super()._current()) if is_whole(table, self._console) else super()._current()


class RunProgress(TrialProgress):
    """A listener of a run and a context manager: the fit's progress, then what rank 0 prints, and steps now and then.

    Everything goes to standard error.
    """

    _trains = False
    _steps: int | None = None
    _step_printed_s = 0.0

    def __call__(self, event: RunEvent) -> None:
        match event:
            case AttemptStarted():
                self.__exit__()
                self._trains, self._steps, self._step_printed_s = True, event.steps, 0.0
            case RankPrinted(text=text):
                self._print_plain(text)
            case StepDone():
                self._print_step(event)
            case Note() if self._trains:
                self._print_plain(f"autods: {event}")
            case _:
                if not self._trains:
                    super().__call__(event)

    def _print_step(self, event: StepDone) -> None:
        now = time.monotonic()
        self._steps = event.steps if event.steps is not None else self._steps
        if now - self._step_printed_s < _STEP_LINE_EVERY_S and event.step != self._steps:
            return
        self._step_printed_s = now
        parts = [f"step {event.step:,}" + (f" of {self._steps:,}" if self._steps is not None else "")]
        if event.loss is not None:
            parts.append(f"loss {event.loss:.4g}")
        parts.append(format_step_seconds(event.seconds))
        if event.device_peak_bytes is not None:
            parts.append(f"device {format_bytes(event.device_peak_bytes)}")
        self._print_plain(f"autods: {', '.join(parts)}")
