"""Simulated memory that grows with the micro batch."""

from __future__ import annotations

from autods.forecast.values import ForecastPhase

MIB, GIB = 2**20, 2**30


def grown(steps: int) -> tuple[list[int], tuple[tuple[int, ForecastPhase], ...]]:
    """Every step allocates ten ever larger buffers, each freed after the next one came, while small ones pin parts."""
    events: list[int] = []
    marks: list[tuple[int, ForecastPhase]] = [(0, "init")]
    block = 0
    for _ in range(steps):
        marks.append((len(events), "forward"))
        before: int | None = None
        for number in range(10):
            events.append((1000 + 60 * number) * MIB)
            if before is not None:
                events.append(-before - 1)
            before, block = block, block + 1
        assert before is not None
        events.append(-before - 1)
        marks.append((len(events), "step"))
    return events, tuple(marks)
