"""The schedule of an optimizer step: what the engine issued to the card and to the host, in order, without any time.

A schedule does not depend on the machine. `step_time` replays it on the clocks of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# What a piece of work is limited by. `view` and `hook`, a call of DeepSpeed's, cost the host time and nothing else.
WorkKind = Literal[
    "matmul",
    "attention",
    "kernel",
    "reduction",
    "view",
    "hook",
    "copy",
    "pageable_copy",
    "collective",
    "host",
    "host_optimizer",
    "nvme",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The amount of one piece of work. `name` is its operator's, for people.

    `bytes` are read and written; of a collective, those that a ring of infinitely many ranks would move a rank.
    `fresh` of them are written to host memory that the process has just got from the system. `compared` elements of
    host memory become truth values.
    `dtype` is that of a matmul's operands. `aligned` says whether all its rows begin at multiples of 16 bytes.
    A collective has `ranks`, and `stride` is the distance of neighbours among all ranks.
    `launches` counts views that follow one another.
    """

    kind: WorkKind
    name: str = ""
    flops: float = 0.0
    bytes: int = 0
    fresh: int = 0
    compared: int = 0
    dtype: str = ""
    aligned: bool = True
    ranks: int = 1
    stride: int = 1
    launches: int = 1


# An event is `argument << BITS | code`. Streams are numbered; 0 is the default stream.
BITS, CODES = 4, 15
RUN = 0  # a work, on the current stream; the host pays its launch
HOST = 1  # a work of the host itself
SWITCH = 2  # a stream becomes the current one
RECORD = 3  # a stream's clock is kept: `record << STREAM_BITS | stream`
WAIT = 4  # a stream waits for a record: `record << STREAM_BITS | stream`
HOST_WAITS_RECORD = 5
HOST_WAITS_STREAM = 6
HOST_WAITS_ALL = 7
MICRO_BATCH = 8  # the next micro batch of the step begins
STREAM_BITS = 12
STREAMS = (1 << STREAM_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The events of one optimizer step; RUN and HOST have the index of their work as the argument.

    `first` is how many events came before this step.
    """

    events: Sequence[int]
    works: tuple[Work, ...]
    first: int = 0
