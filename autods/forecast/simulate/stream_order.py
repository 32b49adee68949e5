"""The order that streams and events impose on the work of the simulated GPU, and what the host knows to be done.

There is no time in it. Work is known to be done when the host has waited for it: for an event, a stream, the device or
a value. It also is when so much was launched after it that the driver's queue would have made the host wait. A real
host often learns of it earlier, so memory that waits for another stream is held here rather too long than too short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

QUEUE = 1024  # launches that a stream holds before the next one blocks the host; observed, NVIDIA documents no figure
_POLLS = 1000  # a program that asks an event so often is taken to wait for it

Progress = Mapping[int, int]  # stream → launches


class StreamOrder:
    """Progress of every stream, counted in launches."""

    def __init__(self) -> None:
        self._launched: Counter[int] = Counter()
        self._seen: dict[int, Progress] = {}  # stream → what it waits for before its next launch
        self._known: Progress = {}  # what the host knows to be done
        self._records: list[tuple[int, Progress]] = [(0, {})]  # stream, and what is done when it is reached
        self._polls = 0

    def launch(self, stream: int) -> None:
        """Count a kernel on the stream."""
        self._launched[stream] += 1

    def launched(self, stream: int) -> int:
        """Return how much was launched on a stream: the mark of its last kernel."""
        return self._launched[stream]

    def record(self, stream: int) -> int:
        """Keep what was launched on the stream so far; return the record's number, from 1."""
        self._records.append((stream, self._after(stream)))
        return len(self._records) - 1

    def wait(self, record: int, stream: int) -> None:
        """Let later work of the stream wait for a record."""
        self._seen[stream] = _join(self._seen.get(stream, {}), self._records[record][1])

    def host_waits_for_record(self, record: int) -> None:
        self._finish(self._records[record][1])

    def host_waits_for_stream(self, stream: int) -> None:
        self._finish(self._after(stream))

    def host_waits_for_all(self) -> None:
        self._finish(self._launched)

    def passed(self, stream: int) -> int:
        """Return the last mark that the host knows the stream to have passed."""
        return max(self._known.get(stream, 0), self._launched[stream] - QUEUE)

    def is_done(self, stream: int, mark: int) -> bool:
        """Return whether the host knows that the stream has passed the mark."""
        return self.passed(stream) >= mark

    def query(self, record: int) -> bool:
        """Return whether the host knows that a record was reached. A program that polls waits for it in the end."""
        stream, progress = self._records[record]
        if self.is_done(stream, progress.get(stream, 0)):
            self._polls = 0
            return True
        self._polls += 1
        if self._polls >= _POLLS:
            self._finish(progress)
        return False

    def _after(self, stream: int) -> Progress:
        """Return what is done once all that was launched on the stream is done."""
        return {**self._seen.get(stream, {}), stream: self._launched[stream]}

    def _finish(self, progress: Progress) -> None:
        self._known = _join(self._known, progress)


def _join(first: Progress, second: Progress) -> Progress:
    """Return the later of both, for every stream."""
    joined = dict(first)
    for stream, launches in second.items():
        if launches > joined.get(stream, 0):
            joined[stream] = launches
    return joined
