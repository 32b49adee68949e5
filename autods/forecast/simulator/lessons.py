"""Engines tell the process that forked them what operators return, so that the next ones need not learn it again."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recipes import Recipes


class Lessons:
    """Made before the engines are forked. Neither side ever waits: what does not get through is learned again."""

    def __init__(self, recipes: Recipes) -> None:
        self._recipes = recipes
        self._there, self._here = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (self._there, self._here):
            end.setblocking(False)
        recipes.told()  # what this process learned itself, its children know

    def tell(self) -> None:
        """In an engine's process: what it learned since the last time."""
        told = self._recipes.told()
        if not told:
            return
        with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
            file.write(told)
            file.flush()
            socket.send_fds(self._there, [b"."], [file.fileno()])

    def hear(self) -> None:
        """In the process that forks: what engines told so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                _, descriptors, _, _ = socket.recv_fds(self._here, 1, 1)
                for descriptor in descriptors:
                    with open(descriptor, "rb") as file:
                        file.seek(0)
                        self._recipes.hear(file.read())
