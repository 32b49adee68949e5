"""A signal to the supervisor becomes a request to its ranks: save, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from ..rank.job import RunOrder
from ..units import format_signal

_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopRequest:
    """Turns a signal into a request to save and to end. `number` is that of the first signal, None before.

    A second Ctrl-C, a signal while no rank has done a step, and the end of the time limit raise KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._order: RunOrder | None = None
        self._limit_s = 0.0
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Handle signals. Elsewhere than in the main thread there are none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _END_SIGNALS}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def during(self, order: RunOrder, limit_s: float) -> Iterator[None]:
        """Ask the ranks of an attempt to save and to end, while they run."""
        self._order, self._limit_s = order, limit_s
        try:
            yield
        finally:
            self._order = None
            if self._timer is not None:
                self._timer.cancel()

    def _handle(self, number: int, frame: object) -> None:
        if self.number is None:
            self.number = number
            if self._order is not None and self._order.steps_file.exists():
                self._order.stop_file.touch()
                self._timer = threading.Timer(self._limit_s, os.kill, (os.getpid(), signal.SIGINT))
                self._timer.daemon = True
                self._timer.start()
                return
        elif number != signal.SIGINT:  # a scheduler repeats itself
            return
        raise KeyboardInterrupt(format_signal(number))
