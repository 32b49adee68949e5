"""The moments at which blocks that other streams still used can be given out again, by the clocks of a machine.

torch records an event on each of these streams when the block is freed. It asks for the events at every allocation
(c10/cuda/CUDACachingAllocator.cpp, `insert_events` and `process_events`). The host asks when its own clock has come to
the allocation. The event has happened when the stream's clock has passed it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..values import Trace
from .prices import PriceList
from .schedule import Schedule
from .step_time import StepClocks


def find_returns(trace: Trace, schedule: Schedule, prices: PriceList) -> dict[int, int]:
    """Return blocks of the schedule's step that come back late, as `Trace.held` has them. Raises Unpriced.

    Blocks of earlier steps are left out. Memory is reserved there, which keeps the host behind the device. None comes
    back later than `Trace.held` says: the driver's queue does not let the host run ahead any further.
    """
    clocks = StepClocks(schedule, prices)
    returns: dict[int, int] = {}
    waiting: list[tuple[float, int]] = []  # when the last of its streams is done with it, and the block

    def pass_on() -> Iterator[int]:
        """Yield the schedule's events; what the trace has before the next one happens at the present clocks."""
        at = next((at for at, issued in enumerate(trace.issued) if issued >= schedule.first), len(trace.events))
        for position, event in enumerate((*schedule.events, None), schedule.first):
            while at < len(trace.events) and trace.issued[at] <= position:
                happen(at)
                at += 1
            if event is not None:
                yield event

    def happen(at: int) -> None:
        event = trace.events[at]
        if event < 0 and (users := trace.users.get(~event)) is not None:
            heapq.heappush(waiting, (max(clocks.streams[stream] for stream in users), ~event))
        while event > 0 and waiting and waiting[0][0] <= clocks.host:
            returns[heapq.heappop(waiting)[1]] = at

    clocks.run(pass_on())
    returns.update((block, len(trace.events)) for _, block in waiting)
    return {block: min(at, trace.held[block]) for block, at in returns.items()}
