"""The schedule of an optimizer step, replayed on clocks: one for each stream and one for the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...config.catalogue import Machine
from .prices import Constants, PriceList, Work, WorkKind, read_constants

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
    """What the engine issued in one optimizer step, in order and without any time: it does not depend on the machine.

    RUN and HOST have the index of their work as the argument. `first` is how many events came before this step.
    """

    events: Sequence[int]
    works: tuple[Work, ...]
    first: int = 0


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
    `issued_seconds` are what the host needs to issue all operators, also while the card computes.
    `unaligned_seconds` are what matmuls take longer because their rows do not begin at multiples of 16 bytes.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    spent: Mapping[Bound, float]
    issued_seconds: float
    unaligned_seconds: float = 0.0

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


CLOSE = 0.03  # share by which two forecast rates may differ without telling anything


def find_fastest(rates: Sequence[float | None]) -> int | None:
    """Return the place of the first rate that a forecast cannot tell from the highest; None where none is known."""
    most = max((rate for rate in rates if rate is not None), default=None)
    if most is None:
        return None
    return next(place for place, rate in enumerate(rates) if rate is not None and rate >= (1 - CLOSE) * most)


def least_step_s(schedule: Schedule, machine: Machine, *, ranks_per_node: int, accumulation: int) -> float:
    """Return the seconds that a step takes at least, with all work at the machine's peak rates. Raises Unpriced."""
    prices = PriceList.at_peak(machine, ranks_per_node)
    return forecast_step(schedule, prices, read_constants(), accumulation=accumulation).seconds


def forecast_step(
    schedule: Schedule, prices: PriceList, constants: Constants, *, accumulation: int, returned: int = 0
) -> StepTime:
    """Return the time of a step of so many micro batches. Raises Unpriced where the machine's file lacks a rate.

    Those that the schedule lacks take as long as its last but one, which has no optimizer step after it. A schedule
    may also have more of them: a large micro batch of a global batch is simulated on the engine of a small one. Then
    its first ones and its last one count. `returned` is how many pieces of memory torch's allocator gives back to the
    driver in the schedule's step, and takes again.
    """
    clocks = StepClocks(schedule, prices)
    step = _leave_out(clocks.run(), clocks.micro_batches[accumulation - 1 :])
    more = max(0, accumulation - len(clocks.micro_batches) - 1)
    repeated = clocks.micro_batches[-1] if clocks.micro_batches else step
    total = step.seconds + more * repeated.seconds
    spent = {cause: part + more * repeated.spent[cause] for cause, part in step.spent.items()}
    returned_s = constants.efficiency.return_us * 1e-6 * returned * accumulation / (1 + len(clocks.micro_batches))
    total, spent["host"] = total + returned_s, spent["host"] + returned_s
    issued_s = step.issued_s + more * repeated.issued_s
    guessed_s = min(total, step.guessed_s + more * repeated.guessed_s)
    rest = total - spent["host"] - spent["launch"]
    longest = constants.high * rest + constants.host_high * spent["host"] + constants.launch_high * spent["launch"]
    longest += constants.unsure_high * guessed_s
    return StepTime(
        seconds=total,
        low_seconds=(total - returned_s - guessed_s) * constants.low,
        high_seconds=max(longest, constants.launch_high * issued_s),
        issued_seconds=issued_s,
        unaligned_seconds=_time_unaligned(schedule, prices) * accumulation / (1 + len(clocks.micro_batches)),
        spent=spent,
    )


def _time_unaligned(schedule: Schedule, prices: PriceList) -> float:
    """The seconds by which all its matmuls with unaligned rows are slower than with aligned ones."""
    lost_s = {
        number: prices.price(work).seconds - prices.price(replace(work, aligned=True)).seconds
        for number, work in enumerate(schedule.works)
        if not work.aligned
    }
    if not lost_s:
        return 0.0
    return sum(lost_s.get(event >> BITS, 0.0) for event in schedule.events if event & CODES == RUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Seconds of a step or of a micro batch, and what the default stream spent them on.

    `issued_s` are those of all launches, and `guessed_s` those of works without a price of their own.
    """

    seconds: float
    spent: Mapping[Bound, float]
    issued_s: float
    guessed_s: float


def _leave_out(step: Span, micro_batches: Sequence[Span]) -> Span:
    """Return the step without these of its micro batches."""
    for span in micro_batches:
        step = Span(
            seconds=step.seconds - span.seconds,
            spent={cause: max(0.0, part - span.spent[cause]) for cause, part in step.spent.items()},
            issued_s=max(0.0, step.issued_s - span.issued_s),
            guessed_s=max(0.0, step.guessed_s - span.guessed_s),
        )
    return step


class StepClocks:
    """The clocks of one replay, in seconds since the step began: one for each stream and one for the host."""

    def __init__(self, schedule: Schedule, prices: PriceList) -> None:
        self._schedule = schedule
        priced = [prices.price(work) for work in schedule.works]
        self._launch = [price.launch_s for price in priced]
        self._contention = [price.contention for price in priced]
        self._guessed = {number for number, price in enumerate(priced) if not price.sure}
        self.seconds = [price.seconds for price in priced]
        self.causes: list[Bound] = [
            _CAUSES.get(work.kind, "compute" if price.compute_bound else "memory")
            for work, price in zip(schedule.works, priced, strict=True)
        ]
        self.host = 0.0
        self._issued_s = 0.0
        self._guessed_s = 0.0
        self.micro_batches: list[Span] = []  # of the step, without its last one
        self.streams: defaultdict[int, float] = defaultdict(float)
        # What each stream was held by most, of its last wait and the work since then, and for how long.
        self._held_by: dict[int, Bound] = {}
        self._held_s: defaultdict[int, float] = defaultdict(float)
        self._only_waited: set[int] = set()  # streams without work since their last wait: a further one belongs to it
        self._records: dict[int, tuple[float, Bound, int]] = {}  # a stream's clock, what held it, and the stream
        self.spent: dict[Bound, float] = dict.fromkeys(BOUNDS, 0.0)
        # Since the default stream last waited for the host: the host's own work, and its waits for other streams.
        self._behind: dict[Bound, float] = {"host": 0.0, "communication": 0.0}

    def run(self, events: Iterable[int] | None = None) -> Span:
        """Return the span of the step.

        `events` are those of the schedule, passed on by an observer that looks at the clocks between two of them.
        """
        current = 0
        for event in self._schedule.events if events is None else events:
            code, argument = event & CODES, event >> BITS
            if code == RUN:
                self._run_work(argument, current)
            elif code == HOST:
                self.host += self._launch[argument] + self.seconds[argument]
                self._issued_s += self._launch[argument]
                self._behind["host"] += self.seconds[argument]
            elif code == SWITCH:
                current = argument
            elif code == RECORD:
                stream = argument & STREAMS
                held_by = self._held_by.get(stream, "launch")
                self._records[argument >> STREAM_BITS] = self.streams[stream], held_by, stream
            elif code == WAIT:
                self._hold_stream(argument & STREAMS, *self._find_record(argument >> STREAM_BITS))
            elif code == HOST_WAITS_RECORD:
                self._hold_host(*self._find_record(argument)[:2])
            elif code == HOST_WAITS_STREAM:
                self._hold_host(self.streams[argument], self._held_by.get(argument, "launch"))
            elif code == MICRO_BATCH:
                self._end_micro_batch()
            else:  # the host waits for all
                latest = self._find_latest()
                self._hold_host(self.streams[latest], self._held_by.get(latest, "launch"))
        return self._end()

    def _find_record(self, number: int) -> tuple[float, Bound, int]:
        return self._records.get(number, (0.0, "launch", 0))

    def _find_latest(self) -> int:
        """The stream that is busy for longest."""
        return max(self.streams, key=self.streams.__getitem__, default=0)

    def _run_work(self, number: int, stream: int) -> None:
        """The host launches a work, and the stream does it when both are there."""
        self.host += self._launch[number]
        self._issued_s += self._launch[number]
        seconds, cause = self.seconds[number], self.causes[number]
        if not seconds:
            return
        if number in self._guessed:
            self._guessed_s += seconds
        self._only_waited.discard(stream)
        start = self.streams[stream]
        if self.host > start:
            if stream == 0:
                self._split_wait(self.host - start)
            start = self.host
        self.streams[stream] = start + seconds
        if stream == 0 or seconds >= self._held_s[stream]:
            self._held_by[stream], self._held_s[stream] = cause, seconds
        if stream == 0:
            self.spent[cause] += seconds
        elif cause == "communication" and self.streams[0] > start:
            # Kernels of both streams share the processors and the memory of the GPU meanwhile.
            slower = self._contention[number] * min(seconds, self.streams[0] - start)
            self.streams[0] += slower
            self.spent["communication"] += slower

    def _hold_stream(self, stream: int, until: float, cause: Bound, other: int) -> None:
        """A stream waits for an event of another one."""
        waited = until - self.streams[stream]
        if waited <= 0:
            return
        if stream == 0:
            self.spent[cause] += waited
        elif other == 0:
            # The default stream's own work is no reason for its next gap: what follows on this stream is.
            self._held_by[stream], self._held_s[stream] = cause, 0.0
            self._only_waited.add(stream)
        else:
            before_s = self._held_s[stream] if stream in self._only_waited else 0.0
            if waited >= before_s:
                self._held_by[stream], self._held_s[stream] = cause, waited
            self._only_waited.add(stream)
        self.streams[stream] = until

    def _hold_host(self, until: float, cause: Bound) -> None:
        if until <= self.host:
            return
        # The default stream's own work is no reason for its next gap.
        waited = until - max(self.host, self.streams[0])
        if waited > 0 and cause in self._behind:
            self._behind[cause] += waited
        self.host = until

    def _explain_wait(self, gap: float) -> dict[Bound, float]:
        """Split a wait of the default stream for the host by what the host has done meanwhile."""
        parts: dict[Bound, float] = {}
        for cause, seconds in self._behind.items():
            parts[cause] = min(gap, seconds)
            gap -= parts[cause]
        return parts | {"launch": gap}

    def _split_wait(self, gap: float) -> None:
        for cause, part in self._explain_wait(gap).items():
            self.spent[cause] += part
        self._behind = dict.fromkeys(self._behind, 0.0)

    def _end_micro_batch(self) -> None:
        """Note the span since the micro batch before."""
        seconds = max(self.host, self.streams[0])
        behind = self._explain_wait(seconds - self.streams[0])
        spent = {cause: self.spent[cause] + behind.get(cause, 0.0) for cause in BOUNDS}
        before = self.micro_batches
        self.micro_batches.append(
            Span(
                seconds=seconds - sum(span.seconds for span in before),
                spent={cause: part - sum(span.spent[cause] for span in before) for cause, part in spent.items()},
                issued_s=self._issued_s - sum(span.issued_s for span in before),
                guessed_s=self._guessed_s - sum(span.guessed_s for span in before),
            )
        )

    def _end(self) -> Span:
        end = max([self.host, *self.streams.values()])
        if end > self.streams[0]:
            latest = self._find_latest()
            if self.streams[latest] >= self.host:
                self.spent[self._held_by.get(latest, "launch")] += end - self.streams[0]
            else:
                self._split_wait(end - self.streams[0])
        return Span(seconds=end, spent=self.spent, issued_s=self._issued_s, guessed_s=self._guessed_s)
