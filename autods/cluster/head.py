"""Whether the head of the Ray cluster is there: the process (Ray's GCS) that knows all nodes and places all actors.

Without it Ray's calls wait for a minute, and then Ray ends this process without a word. What actors do goes on.
"""

from __future__ import annotations

import contextlib
import select
import socket

from .lifeline import watched

_ANSWERS_S = 2.0


class Head:
    """A connection to it, which its end closes, and which nobody answers any more where its machine is gone."""

    def __init__(self, address: str) -> None:
        self.address = address  # HOST:PORT
        self._line: socket.socket | None = None

    def gone(self) -> str | None:
        """How that is known; None: it is there. It may end a connection on which nothing is said: then there is
        another."""
        if self._line is not None and _lives(self._line):
            return None
        self.close()
        host, _, port = self.address.rpartition(":")
        try:
            self._line = socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_S)
        except OSError as error:
            return str(error.strerror or error).lower()
        watched(self._line)
        return None

    def close(self) -> None:
        """No more is asked of it."""
        if self._line is not None:
            self._line.close()
            self._line = None


def _lives(line: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        ready, _, _ = select.select([line], [], [], 0)
        return not ready or bool(line.recv(1 << 16))  # it may greet
    return False
