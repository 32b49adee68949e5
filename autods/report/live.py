"""What a progress view is: a part of the terminal that is redrawn while work goes on, or plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner


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
