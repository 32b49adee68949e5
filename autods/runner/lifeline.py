"""Connections by which a node notices that its driver has gone."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, cast

_CONNECTS_S = 10.0
# A silent link is dead after _IDLE_S + _TRIES × _EVERY_S.
_IDLE_S, _EVERY_S, _TRIES = 2, 2, 3


class Lifelines:
    """The driver's ends, by the number of the node. `close` lets the nodes know that nobody wants them any more."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._token = secrets.token_hex(16)
        self._door: socket.socket | None = None
        self._lines: dict[int, socket.socket] = {}

    def open(self) -> dict[str, Any]:
        """Where nodes connect, for `hold`."""
        self._door = socket.create_server((self._address, 0))
        return {"address": self._address, "port": self._door.getsockname()[1], "token": self._token}

    def admit(self, nodes: int) -> list[int]:
        """Wait until so many nodes have connected; those that did not in time."""
        assert self._door is not None
        until = time.monotonic() + _CONNECTS_S
        with self._door as door, selectors.DefaultSelector() as waiting:
            door.setblocking(False)
            waiting.register(door, selectors.EVENT_READ)
            callers: set[socket.socket] = set()  # who says nothing, or is slow to, keeps nobody out
            while len(self._lines) < nodes and (left := until - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    if key.fileobj is door:
                        with contextlib.suppress(OSError):
                            callers.add(caller := door.accept()[0])
                            waiting.register(caller, selectors.EVENT_READ)
                    else:
                        caller = cast(socket.socket, key.fileobj)
                        waiting.unregister(caller)
                        callers.discard(caller)
                        self._admit(caller)
            for caller in callers:
                caller.close()
        return [number for number in range(nodes) if number not in self._lines]

    def ended(self) -> dict[int, str]:
        """Nodes whose line has ended, and how."""
        return {number: said for number, line in self._lines.items() if (said := _end_of(line)) is not None}

    def close(self) -> None:
        """End all of them."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _admit(self, caller: socket.socket) -> None:
        """A stranger is sent away."""
        caller.setblocking(False)
        try:
            said = json.loads(caller.recv(1024))
            token, node = str(said["token"]), int(said["node"])
        except (OSError, ValueError, LookupError, TypeError):
            token, node = "", -1
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            caller.close()
            return
        watched(caller)
        self._lines[node] = caller


def hold(place: dict[str, Any], number: int, gone: Callable[[], None]) -> bool:
    """Connect this node to the driver; `gone` is called, in a thread of its own, when the driver's end is no more.

    False where the driver cannot be reached.
    """
    try:
        line = socket.create_connection((place["address"], place["port"]), _CONNECTS_S)
        line.sendall(json.dumps({"token": place["token"], "node": number}).encode())
    except OSError:
        return False
    watched(line)
    threading.Thread(target=_wait, args=(line, gone), daemon=True).start()
    return True


def _wait(line: socket.socket, gone: Callable[[], None]) -> None:
    line.settimeout(None)
    with line, contextlib.suppress(OSError):
        line.recv(1)  # nothing is ever said
    gone()


def _end_of(line: socket.socket) -> str | None:
    """How it ended, if it did."""
    try:
        line.recv(1)
    except BlockingIOError:
        return None
    except TimeoutError:
        return f"it cannot be reached any more: no answer for {_IDLE_S + _EVERY_S * _TRIES} s"
    except OSError as error:
        return f"its connection broke: {error.strerror}"
    return "its actor's process ended"


def watched(line: socket.socket) -> None:
    """With keepalives: a link on which nobody answers any more ends."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _EVERY_S), ("TCP_KEEPCNT", _TRIES)):
        line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


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
