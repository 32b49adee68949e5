"""Replay a schedule on clocks: one for each stream and one for the host. The span of the step is its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..config.catalogue import Machine
from .prices import Constants, PriceList, Unpriced, read_constants
from .schedule import (
    BITS,
    CODES,
    HOST,
    HOST_WAITS_RECORD,
    HOST_WAITS_STREAM,
    MICRO_BATCH,
    RECORD,
    RUN,
    STREAM_BITS,
    STREAMS,
    SWITCH,
    WAIT,
    Schedule,
    WorkKind,
)

Bound = Literal["compute", "memory", "communication", "host", "launch"]
BOUNDS: tuple[Bound, ...] = ("compute", "memory", "communication", "host", "launch")
_CAUSES: Mapping[WorkKind, Bound] = {
    "collective": "communication", "copy": "host", "pageable_copy": "host", "nvme": "host",
    "host": "host", "host_optimizer": "host",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The forecast of one optimizer step's seconds with its bounds.

    `spent` splits the step as the default stream sees it: busy with compute or memory, idle for the others.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    spent: Mapping[Bound, float]

    @property
    def bound(self) -> Bound:
        """What takes the largest part."""
        return max(BOUNDS, key=lambda cause: self.spent.get(cause, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The step time of an engine on a machine, and its rate over all ranks.

    `tokens_per_second` is None when a sample has no fixed length.
    """

    step: StepTime
    micro_batch: int
    accumulation: int
    samples_per_second: float
    tokens_per_second: float | None = None


def forecast_speed(
    schedule: Schedule,
    machine: Machine,
    *,
    world_size: int,
    ranks_per_node: int,
    micro_batch: int,
    micro_batches: int,
    accumulation: int,
    tokens_per_sample: int | None,
) -> Speed | None:
    """Return the speed of a step with the shipped constants; None where the machine's file lacks a rate it needs.

    `micro_batches` and `accumulation` are those of `forecast_step`.
    """
    constants = read_constants()
    prices = PriceList(machine=machine, ranks_per_node=ranks_per_node, efficiency=constants.efficiency)
    try:
        step = forecast_step(schedule, prices, constants, micro_batches=micro_batches, accumulation=accumulation)
    except Unpriced:
        return None
    rate = micro_batch * accumulation * world_size / step.seconds
    return Speed(
        step=step,
        micro_batch=micro_batch,
        accumulation=accumulation,
        samples_per_second=rate,
        tokens_per_second=None if tokens_per_sample is None else rate * tokens_per_sample,
    )


def forecast_step(
    schedule: Schedule, prices: PriceList, constants: Constants, *, micro_batches: int, accumulation: int
) -> StepTime:
    """Return the time of a step. Raises Unpriced where the machine's file lacks a rate that the step needs.

    `micro_batches` is how many the schedule has; of `accumulation` the others take as long as its first.
    """
    seconds, first_s, spent = _Clocks(schedule, prices).run()
    more = max(0, accumulation - micro_batches) * (first_s if micro_batches > 1 else seconds)
    scale = (seconds + more) / seconds if seconds else 1.0
    total = seconds + more
    return StepTime(
        seconds=total,
        low_seconds=total * constants.low,
        high_seconds=total * constants.high,
        spent={cause: part * scale for cause, part in spent.items()},
    )


class _Clocks:
    """The clocks of one replay, in seconds since the step began."""

    def __init__(self, schedule: Schedule, prices: PriceList) -> None:
        self._schedule, self._contention = schedule, prices.efficiency.contention
        priced = [prices.price(work) for work in schedule.works]
        self._launch = [price.launch_s for price in priced]
        self._seconds = [price.seconds for price in priced]
        self._causes: list[Bound] = [
            _CAUSES.get(work.kind, "compute" if price.compute_bound else "memory")
            for work, price in zip(schedule.works, priced, strict=True)
        ]

    def run(self) -> tuple[float, float, dict[Bound, float]]:
        """Return the step's seconds, those of its first micro batch, and what they were spent on."""
        launch, seconds, causes = self._launch, self._seconds, self._causes
        contention = self._contention
        streams: defaultdict[int, float] = defaultdict(float)
        # What each stream was held by most, of its last wait and the work since then.
        last: dict[int, Bound] = {}
        weights: defaultdict[int, float] = defaultdict(float)
        records: dict[int, tuple[float, Bound]] = {}
        spent: dict[Bound, float] = dict.fromkeys(BOUNDS, 0.0)
        # Since the default stream last waited for the host: the host's own work, and its waits for other streams.
        behind: dict[Bound, float] = {"host": 0.0, "communication": 0.0}
        host = first_s = 0.0
        current = 0

        def attribute(gap: float) -> None:
            """Split the default stream's wait for the host by what the host has done meanwhile."""
            for cause in behind:
                part = min(gap, behind[cause])
                spent[cause] += part
                gap -= part
                behind[cause] = 0.0
            spent["launch"] += gap

        def hold_host(until: float, cause: Bound) -> None:
            nonlocal host
            if until > host:
                # The default stream's own work is no reason for its next gap.
                waited = until - max(host, streams[0])
                if waited > 0 and cause in behind:
                    behind[cause] += waited
                host = until

        for event in self._schedule.events:
            code, argument = event & CODES, event >> BITS
            if code == RUN:
                host += launch[argument]
                start = streams[current]
                if host > start:
                    if current == 0 and seconds[argument]:
                        attribute(host - start)
                    start = host
                if seconds[argument]:
                    streams[current] = start + seconds[argument]
                    if current == 0 or seconds[argument] >= weights[current]:
                        last[current], weights[current] = causes[argument], seconds[argument]
                    if current == 0:
                        spent[causes[argument]] += seconds[argument]
                    elif causes[argument] == "communication" and streams[0] > start:
                        slower = contention * min(seconds[argument], streams[0] - start)
                        streams[0] += slower
                        spent["communication"] += slower
            elif code == HOST:
                host += launch[argument] + seconds[argument]
                behind["host"] += seconds[argument]
            elif code == SWITCH:
                current = argument
            elif code == RECORD:
                stream = argument & STREAMS
                records[argument >> STREAM_BITS] = streams[stream], last.get(stream, "launch")
            elif code == WAIT:
                stream = argument & STREAMS
                until, cause = records.get(argument >> STREAM_BITS, (0.0, "launch"))
                if until > streams[stream]:
                    if stream == 0:
                        spent[cause] += until - streams[0]
                    else:
                        last[stream], weights[stream] = cause, until - streams[stream]
                    streams[stream] = until
            elif code == HOST_WAITS_RECORD:
                hold_host(*records.get(argument, (0.0, "launch")))
            elif code == HOST_WAITS_STREAM:
                hold_host(streams[argument], last.get(argument, "launch"))
            elif code == MICRO_BATCH:
                first_s = first_s or max(host, streams[0])
            else:  # the host waits for all
                latest = max(streams, key=streams.__getitem__, default=0)
                hold_host(streams[latest], last.get(latest, "launch"))
        end = max([host, *streams.values()])
        if end > streams[0]:
            latest = max(streams, key=streams.__getitem__)
            if streams[latest] >= host:
                spent[last.get(latest, "launch")] += end - streams[0]
            else:
                attribute(end - streams[0])
        return end, first_s or end, spent
