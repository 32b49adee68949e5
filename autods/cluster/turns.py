"""Trials that run at the same time: who shares a machine with whom, and who has to be alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..outcomes import Fit, Outcome, OutOfMemory


@dataclass(slots=True, eq=False)
class Turn:
    """A trial under way, itself alone: two on the same machines are never one. others: how many ran on one of its
    machines meanwhile."""

    hosts: frozenset[str]
    others: int = 0


class Turns:
    """Shared by all who run trials; may be used from any thread. `beside` runs a trial as others do, `alone` waits for
    them to end and holds back those that come.

    Once it is stopped, every trial ends in KeyboardInterrupt: it was no fault of the trial.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._changed = threading.Condition()
        self._running: list[Turn] = []
        self._one_alone = False

    @contextmanager
    def beside(self, hosts: frozenset[str]) -> Iterator[Turn]:
        """A trial on these machines."""
        own = Turn(hosts)
        with self._changed:
            self._changed.wait_for(lambda: not self._one_alone or self.stopped)
            for other in self._running:
                if other.hosts & hosts:
                    other.others, own.others = other.others + 1, own.others + 1
            self._running.append(own)
        with self._until_stopped():
            try:
                yield own
            finally:
                with self._changed:
                    self._running.remove(own)
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A trial with nothing beside it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._one_alone or self.stopped)
            self._one_alone = True
        with self._until_stopped():
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._running or self.stopped)
                yield
            finally:
                with self._changed:
                    self._one_alone = False
                    self._changed.notify_all()

    def stop(self) -> None:
        """No trial begins any more, and what those that run still say does not count."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        try:
            self._check()
            yield
        except Exception:
            self._check()
            raise
        self._check()

    def _check(self) -> None:
        if self.stopped:
            raise KeyboardInterrupt


def may_be_theirs(outcome: Outcome) -> bool:
    """Whether trials on the same machine may be why it failed: they share the host's memory, its processors and its
    network. A device's memory is each one's own."""
    match outcome:
        case Fit():
            return False
        case OutOfMemory(tier=tier):
            return tier != "device"
        case _:
            return outcome.failure in ("memory_pressure", "infrastructure", "communication", "secondary", "unknown")
