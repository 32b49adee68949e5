"""The parts of one attempt of a run: the runner of its ranks, a request to stop them, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..config.settings import Settings
from ..events import Listener, RunListener
from ..files import exists_now
from ..rank.job import RunOrder
from ..rank.record import RunResult
from ..runner.runner import RayRunner
from ..types import Failed, ModelFacts, OutOfMemory
from ..units import format_signal
from .run_journal import AttemptEnd

_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


StartRunner = Callable[..., RayRunner]  # as the class itself


@dataclass(slots=True)
class RunnerSession:
    """The runner of one number of ranks; None while there is none."""

    start: StartRunner
    listen: RunListener
    runner: RayRunner | None = None
    _key: tuple[Any, ...] = ()
    _is_lent: bool = False
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @contextlib.contextmanager
    def lend(self, settings: Settings, listen: Listener) -> Iterator[RayRunner]:
        """The runner for the fit before the run, which goes on with it: Ray and the zygotes start once."""
        self.close()
        self.runner = self._stack.enter_context(self.start(settings, listen))
        self._key, self._is_lent = (settings.gpus, settings.nodes), True
        yield self.runner

    def open(self, settings: Settings, *, facts: ModelFacts | None = None) -> RayRunner:
        """Return the runner of these ranks; another one is ended first. A new one takes the facts, if there are."""
        key = (settings.gpus, settings.nodes)
        if self.runner is None or key != self._key:
            self.close()
            self.runner = self._stack.enter_context(self.start(settings, self.listen))
            self._key = key
        elif self._is_lent:
            self._is_lent = False
            self.runner.take_over(settings, self.listen)
        else:
            return self.runner
        if facts is not None:
            self.runner.adopt(facts)
        return self.runner

    def close(self) -> None:
        """End the runner, its ranks and Ray."""
        self.runner, self._is_lent = None, False
        self._stack.close()


def judge_attempt(result: RunResult | OutOfMemory | Failed, *, seen_step: int, seconds: float) -> AttemptEnd:
    """Return how an attempt ended by rank 0's result, or by why the ranks failed.

    `seen_step` is the last one whose line was seen. Lines come about once a second, so that ranks which were killed in
    a later step have done those before it.
    """
    if isinstance(result, OutOfMemory | Failed):
        done_step = max(seen_step, result.step - 1)
        return AttemptEnd(ending="failed", last_step=done_step, seconds=seconds, cause=result)
    if result.ended == "done" and result.unsaved is not None:  # the same again would meet the same full disk
        cause = Failed(
            failure="infrastructure", rank=0, phase="done", action="fix_environment",
            evidence=f"step {result.step} is not saved: {result.unsaved}",
            advice="free some space, and give the same command again",
        )  # fmt: skip
        return AttemptEnd(ending="failed", last_step=seen_step, seconds=seconds, cause=cause)
    counted = 0 if result.step is None else max(seen_step, result.step)  # a script may train without being counted
    return AttemptEnd(ending=result.ended, last_step=counted, seconds=seconds)


class StopRequest:
    """Turns a signal into a request to save and to end. `number` is that of the first signal, None before.

    A second Ctrl-C, a signal while no rank has done a step, and the end of the time limit raise KeyboardInterrupt. So
    does a signal where the disk has no room for the request, nor for a checkpoint then.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._order: RunOrder | None = None
        self._find_limit_s: Callable[[], float] = lambda: 0.0
        self._timer: threading.Timer | None = None
        self._is_overdue = False

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
    def during(self, order: RunOrder, find_limit_s: Callable[[], float]) -> Iterator[None]:
        """Ask the ranks of an attempt to save and to end, while they run. They have the seconds of `find_limit_s`."""
        self._order, self._find_limit_s = order, find_limit_s
        try:
            yield
        finally:
            self._order = None
            if self._timer is not None:
                self._timer.cancel()

    def _handle(self, number: int, frame: object) -> None:
        if self.number is None:
            self.number = number
            if self._order is not None and exists_now(self._order.steps_file) and _write_request(self._order):
                self._timer = threading.Timer(self._find_limit_s(), self._end_at_limit)
                self._timer.daemon = True
                self._timer.start()
                return
        elif number != signal.SIGINT and not self._is_overdue:  # a scheduler repeats itself
            return
        raise KeyboardInterrupt(format_signal(number))

    def _end_at_limit(self) -> None:
        """Interrupt the main thread, by the signal that has come: a shell starts its `command &` deaf to SIGINT."""
        assert self.number is not None
        self._is_overdue = True
        os.kill(os.getpid(), self.number)


def _write_request(order: RunOrder) -> bool:
    """Ask the ranks to save and to end; return whether the file that asks them could be made."""
    try:
        order.stop_file.touch()
    except OSError:
        return False
    return True
