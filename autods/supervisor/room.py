"""A run waits for room on a full disk, and for a cluster without a head: to end would cost it a place in a queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import DiskFull
from ..events import Note, RunListener
from ..report.text import format_seconds

_LOOK_AGAIN_S = 1.0
_WAIT_FOR_S = 3600.0
# Kubernetes may take minutes to place another head, and to load its image.
_CLUSTER_EVERY_S, _CLUSTER_BACK_S = 5.0, 900.0


@dataclass(slots=True, kw_only=True)
class Room:
    """Waits for room on a disk. `is_stopping` tells whether the user has asked the run to end."""

    listen: RunListener
    is_stopping: Callable[[], bool]
    wait_for_s: float = _WAIT_FOR_S

    def await_for(self, write: Callable[[], object]) -> None:
        """Call `write`, again and again while it raises DiskFull. It may be called any number of times.

        Raises DiskFull where the disk is full for `wait_for_s`, or when the user asks the run to end meanwhile.
        """
        began_s, is_waiting = time.monotonic(), False
        while True:
            try:
                write()
                break
            except DiskFull as error:
                if self.is_stopping() or time.monotonic() - began_s >= self.wait_for_s:
                    raise
                if not is_waiting:
                    problem, at_most = str(error).splitlines()[0], format_seconds(self.wait_for_s)
                    self.listen(Note(text=f"{problem}; the run waits for room, {at_most} at most", warns=True))
                is_waiting = True
                time.sleep(_LOOK_AGAIN_S)
        if is_waiting:
            waited = format_seconds(time.monotonic() - began_s)
            self.listen(Note(text=f"there is room on the disk again after {waited}: the run goes on"))


def await_cluster(count_ranks: Callable[[], int | None], ranks: int, *, listen: RunListener) -> int | None:
    """Wait until a cluster whose head is gone holds `ranks` ranks again; return those that it holds in the end.

    Whoever runs the cluster may start it again, and its nodes join a new head one by one. `count_ranks` returns None
    while no cluster answers.
    """
    began_s, room = time.monotonic(), None
    text = f"no Ray cluster answers; the run waits for it, {format_seconds(_CLUSTER_BACK_S)} at most"
    listen(Note(text=text, warns=True))
    while (room is None or room < ranks) and time.monotonic() - began_s < _CLUSTER_BACK_S:
        time.sleep(_CLUSTER_EVERY_S)
        room = count_ranks()
    return room
