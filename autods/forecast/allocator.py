"""A model of torch's CUDA caching allocator, on which allocation traces are replayed."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from .values import ForecastPhase, Trace

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9 and later read the second where the first is not
_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\]]*)")
_HARMLESS = ("expandable_segments", "pinned_use_cuda_host_register", "pinned_num_register_threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocConf:
    """name: of the variable that counts. unmodelled: settings that change what is reserved, and no forecast knows."""

    name: str | None = None
    expandable: bool = False
    unmodelled: tuple[str, ...] = ()

    @property
    def said(self) -> str | None:
        """What a person should know, if anything."""
        if not self.unmodelled:
            return None
        settings = ", ".join(self.unmodelled)
        return f"{self.name} has {settings}, of which the forecast knows nothing"


def alloc_conf(environment: Mapping[str, str]) -> AllocConf:
    """As torch reads it: the new name wins, whatever the old one says."""
    name = next((one for one in _NAMES if environment.get(one)), None)
    if name is None:
        return AllocConf()
    settings = {key: value.strip() for key, value in _SETTING.findall(environment[name])}
    expandable = settings.get("expandable_segments", "").lower() == "true"
    default = settings.get("backend") == "native"
    unmodelled = [key for key in settings if key not in _HARMLESS and not (key == "backend" and default)]
    return AllocConf(name=name, expandable=expandable, unmodelled=tuple(unmodelled))


# All sizes and addresses below are in units of 512 B, the allocator's smallest block.
UNIT = 512
MIB = 2**20 // UNIT
SMALL = 1 * MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # requests from here on get a segment of their own size
_ROUND_SEGMENT = 2 * MIB
SHIFT = 40  # a free block is the integer size << SHIFT | address, so that a sorted list is in order of both
MASK = 2**SHIFT - 1


@dataclass(slots=True)
class Heap:
    """The allocator's state, in units of 512 B: free blocks in two pools, and where each block of the trace lies.

    limit_bytes: what may be reserved. Segments never touch, so two free blocks that touch are of one segment.
    """

    leave_large: ClassVar[int] = SMALL + 1  # the least that is worth splitting off a large block
    picky: ClassVar[bool] = False  # best fit is more than the smallest that is large enough

    limit_bytes: int | None = None
    max_split_bytes: int | None = None

    small: list[int] = field(default_factory=list)
    large: list[int] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)  # address of a free block → its size
    ends: dict[int, int] = field(default_factory=dict)  # one past a free block → its address
    segments: dict[int, int] = field(default_factory=dict)  # address → size
    addresses: list[int] = field(default_factory=list)  # of each block of the trace
    sizes: list[int] = field(default_factory=list)
    top: int = 0  # where the next segment lies
    reserved: int = 0
    allocated: int = 0
    grown: int = 0  # the most that was reserved by growing, since `begin`
    peak: int = 0  # the most that was allocated, since `begin`
    retries: int = 0

    def begin(self) -> None:
        """A new phase: its peaks begin with what is there."""
        self.grown, self.peak = 0, self.allocated

    def run(self, events: Iterable[int]) -> int | None:
        """Do what the events of a `Trace` say. The index of the one that ran out, or None."""
        small, large, starts, ends = self.small, self.large, self.starts, self.ends
        addresses, sizes = self.addresses, self.sizes
        allocated, peak = self.allocated, self.peak
        picky, leave_large = self.picky or self.max_split_bytes is not None, self.leave_large
        split_below = MASK if self.max_split_bytes is None else self.max_split_bytes // UNIT
        failed = None
        # One loop without calls but bisect's: a trace has a million events, and this is all the time a replay takes.
        for at, event in enumerate(events):
            if event > 0:
                size = (event + 511) >> 9
                pool, leave = (small, 1) if size <= SMALL else (large, leave_large)
                place = bisect_left(pool, size << SHIFT)
                if picky:
                    place = self.choose(pool, place, size)
                if place < len(pool):
                    found = pool.pop(place)
                    address, have = found & MASK, found >> SHIFT
                    del starts[address]
                else:
                    address = self._grow(pool, size)
                    if address < 0:
                        failed = at
                        break
                    have = starts.pop(address)
                    del pool[bisect_left(pool, have << SHIFT | address)]
                rest = have - size
                if rest >= leave and size < split_below:
                    cut = address + size
                    starts[cut] = rest
                    ends[address + have] = cut
                    insort(pool, rest << SHIFT | cut)
                else:
                    size = have
                    del ends[address + have]
                addresses.append(address)
                sizes.append(size)
                allocated += size
                if allocated > peak:
                    peak = allocated
            elif event:
                size = sizes[~event]
                if not size:
                    continue
                address = addresses[~event]
                allocated -= size
                pool = small if size <= SMALL else large
                end = address + size
                if (before := ends.pop(address, -1)) >= 0:
                    del pool[bisect_left(pool, (address - before) << SHIFT | before)]
                    address = before
                if after := starts.pop(end, 0):
                    del pool[bisect_left(pool, after << SHIFT | end)]
                    end += after
                size = end - address
                starts[address] = size
                ends[end] = address
                insort(pool, size << SHIFT | address)
            else:  # torch hands out no memory for an empty tensor
                addresses.append(0)
                sizes.append(0)
        self.allocated, self.peak = allocated, peak
        return failed

    def choose(self, pool: list[int], place: int, size: int) -> int:
        """Where the block to take stands, `place` being the smallest that is large enough; len(pool): none will do."""
        if place < len(pool) and self.max_split_bytes is not None:
            # Blocks of max_split_size and more stay whole: for requests of that size, and within 20 MiB of it.
            most, have = self.max_split_bytes // UNIT, pool[place] >> SHIFT
            if (size < most <= have) or (size >= most and have >= size + LARGE_SEGMENT):
                return len(pool)
        return place

    def may_reserve(self, size: int) -> bool:
        """Whether the limit leaves room for `size` more."""
        return self.limit_bytes is None or (self.reserved + size) * UNIT <= self.limit_bytes

    def extend(self, pool: list[int], size: int, segment: int) -> int:
        """The address of a free block of at least `size`, out of new memory; −1 when the limit forbids it."""
        if not self.may_reserve(segment):
            return -1
        address = self.top
        self.top += segment + 1  # a gap, so that segments do not touch
        self.segments[address] = segment
        self.reserved += segment
        self.put(pool, address, segment)
        return address

    def release_all(self) -> None:
        """Give back every cached segment that nothing lies in."""
        for pool in (self.large, self.small):
            for block in tuple(pool):
                if self.segments.get(block & MASK) == block >> SHIFT:
                    self._release(pool, block & MASK)

    def put(self, pool: list[int], address: int, size: int) -> None:
        """A new free block."""
        self.starts[address] = size
        self.ends[address + size] = address
        insort(pool, size << SHIFT | address)

    def take(self, pool: list[int], address: int) -> int:
        """Remove a free block; its size."""
        size = self.starts.pop(address)
        del self.ends[address + size]
        del pool[bisect_left(pool, size << SHIFT | address)]
        return size

    def _grow(self, pool: list[int], size: int) -> int:
        """As `extend`; at the limit, cached segments are given back and it is tried again."""
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        address = self.extend(pool, size, segment)
        if address < 0 and self.max_split_bytes is not None and self._release_oversize(pool, size):
            address = self.extend(pool, size, segment)
        if address < 0:
            self.release_all()
            self.retries += 1
            address = self.extend(pool, size, segment)
        self.grown = max(self.grown, self.reserved)
        return address

    def _release_oversize(self, pool: list[int], size: int) -> bool:
        """Give back one cached segment that is large enough, or several of max_split_size, the largest first."""
        least = (self.max_split_bytes or 0) // UNIT
        key = max(size, least)
        place = bisect_left(pool, key << SHIFT)
        if place < len(pool):
            self._release(pool, pool[place] & MASK)
            return True
        released = 0
        while released < key and pool and pool[-1] >> SHIFT >= least:
            released += self._release(pool, pool[-1] & MASK)
        return released >= key

    def _release(self, pool: list[int], address: int) -> int:
        size = self.take(pool, address)
        del self.segments[address]
        self.reserved -= size
        return size


_ENDLESS = 2**18 * LARGE_SEGMENT  # the length of a range: 5 TiB, no card is that large; a whole number of pages
_LARGE_RANGE = 2 * _ENDLESS  # where the large pool's range begins; the small one's is at 0


@dataclass(slots=True)
class ExpandableHeap(Heap):
    """`holes`: address of an unmapped range → its size. Everything else as `Heap`."""

    leave_large: ClassVar[int] = 1
    picky: ClassVar[bool] = True

    holes: dict[int, int] = field(default_factory=dict)

    def choose(self, pool: list[int], place: int, size: int) -> int:
        """A block that can grow into unmapped pages counts as large as it can become: the next larger one wins."""
        while place + 1 < len(pool) and self._becomes(pool[place + 1]) < self._becomes(pool[place]):
            place += 1
        return Heap.choose(self, pool, place, size)

    def _becomes(self, block: int) -> int:
        size = block >> SHIFT
        return size + self.holes.get((block & MASK) + size, 0)

    def extend(self, pool: list[int], size: int, segment: int) -> int:
        """Map pages until a free block of at least `size` lies in, or before, the lowest hole with room for it."""
        page = self._page(pool)
        if not self.may_reserve(segment):  # torch asks this of its own limit, before it looks what is to be mapped
            return -1
        address = at = self._room(pool, size)
        while (missing := size - (at - address)) > 0:
            if mapped := self.starts.get(at):
                at += mapped
                continue
            pages = min(self.holes[at], -(-missing // page) * page)
            if not self.may_reserve(pages):
                return -1
            at = self._map(pool, at, pages)
        return address

    def release_all(self) -> None:
        """Give back every page that nothing lies in."""
        for pool in (self.large, self.small):
            for block in tuple(pool):
                self._unmap(pool, block & MASK, block >> SHIFT)

    def _page(self, pool: list[int]) -> int:
        return SMALL_SEGMENT if pool is self.small else LARGE_SEGMENT

    def _room(self, pool: list[int], size: int) -> int:
        """The lowest address from which free and unmapped ranges without a used block between them hold `size`."""
        home = 0 if pool is self.small else _LARGE_RANGE
        if home not in self.segments:
            self.segments[home] = self.holes[home] = _ENDLESS
        for hole in sorted(hole for hole in self.holes if home <= hole < home + _ENDLESS):
            start = at = self.ends.get(hole, hole)
            while at - start < size and (more := self.starts.get(at) or self.holes.get(at)):
                at += more
            if at - start >= size:
                return start
        raise AssertionError(f"{size * UNIT} bytes are more than any card has")

    def _map(self, pool: list[int], hole: int, pages: int) -> int:
        """Map the first pages of a hole and join them to their free neighbours; one past the free block."""
        room = self.holes.pop(hole)
        end = hole + pages
        if room > pages:
            self.holes[end] = room - pages
        self.reserved += pages
        self.grown = max(self.grown, self.reserved)
        start = hole
        if hole in self.ends:
            start = self.ends[hole]
            self.take(pool, start)
        if end in self.starts:
            end += self.take(pool, end)
        self.put(pool, start, end - start)
        return end

    def _unmap(self, pool: list[int], address: int, size: int) -> None:
        """Give back the whole pages of a free block; what is left at its ends stays free."""
        page = self._page(pool)
        first, last = -(-address // page) * page, (address + size) // page * page
        if first >= last:
            return
        self.take(pool, address)
        if first > address:
            self.put(pool, address, first - address)
        if address + size > last:
            self.put(pool, last, address + size - last)
        self.reserved -= last - first
        for start, room in tuple(self.holes.items()):
            if start + room == first:
                first = start
        last += self.holes.pop(last, 0)
        self.holes[first] = last - first


@dataclass(frozen=True, slots=True, kw_only=True)
class RanOut:
    """The request that no segment could be had for, even after all cached segments were given back.

    event: its index in the trace. reserved_bytes, allocated_bytes: at that moment.
    """

    event: int
    phase: ForecastPhase
    wanted_bytes: int
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the allocator holds.

    by_phase: the reserved bytes when the phase last had to ask the driver for more, or the most it allocated when what
    was cached sufficed; the largest is peak_reserved_bytes while nothing is given back. retries: how often cached
    segments were given back to make room (torch's num_alloc_retries); late_retries: those after the first optimizer
    step, which come again in every step. ran_out: the replay ended there.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    by_phase: dict[ForecastPhase, int]
    allocated_by_phase: dict[ForecastPhase, int]
    retries: int = 0
    late_retries: int = 0
    ran_out: RanOut | None = None

    @property
    def runs_well(self) -> bool:
        """It does not run out, and once it has settled no step gives memory back."""
        return self.ran_out is None and not self.late_retries


def replay(
    trace: Trace,
    *,
    expandable: bool = False,
    limit_bytes: int | None = None,
    max_split_bytes: int | None = None,
    whole: bool = True,
) -> Replayed:
    """The allocator's reserved and allocated bytes over a trace.

    limit_bytes: what the allocator may reserve; None: as much as it asks for. max_split_bytes: torch's max_split_size.
    whole: False ends the replay with the phase in which it is found not to run well.
    """
    kind = ExpandableHeap if expandable else Heap
    heap = kind(limit_bytes=limit_bytes, max_split_bytes=max_split_bytes)
    reserved: dict[ForecastPhase, int] = {}
    allocated: dict[ForecastPhase, int] = {}
    peak, ran_out = 0, None
    stepped, early = False, None
    for first, stop, phase in phases(trace):
        if stepped and phase != "step" and early is None:
            early = heap.retries
        stepped = stepped or phase == "step"
        heap.begin()
        failed = _run(heap, trace, first, stop)
        reserved[phase] = max(reserved.get(phase, 0), heap.grown * UNIT)
        allocated[phase] = max(allocated.get(phase, 0), heap.peak * UNIT)
        peak = max(peak, heap.grown)
        if failed is not None:
            ran_out = RanOut(
                event=failed,
                phase=phase,
                wanted_bytes=trace.events[failed],
                reserved_bytes=heap.reserved * UNIT,
                allocated_bytes=heap.allocated * UNIT,
            )
            break
        if not whole and early is not None and heap.retries > early:
            break
    return Replayed(
        peak_reserved_bytes=peak * UNIT,
        peak_allocated_bytes=max(allocated.values(), default=0),
        by_phase={phase: max(grown, allocated[phase]) for phase, grown in reserved.items()},
        allocated_by_phase=allocated,
        retries=heap.retries,
        late_retries=0 if early is None else heap.retries - early,
        ran_out=ran_out,
    )


def squeezed(trace: Trace, roomy: Replayed, *, expandable: bool = False, within: float = 0.01) -> tuple[int, Replayed]:
    """The least limit at which the trace runs well, and its replay there.

    roomy: the replay without a limit. A large card caches what a smaller one gives back once and never misses: what
    initialising leaves in pieces that no later request fits. within: how exactly, relatively.
    """
    low, high, best = roomy.peak_allocated_bytes, roomy.peak_reserved_bytes, roomy
    while high - low > max(2**21, within * high):
        middle = (low + high) // 2
        tried = replay(trace, expandable=expandable, limit_bytes=middle, whole=False)
        if tried.runs_well:
            high, best = middle, tried
        else:
            low = middle
    return high, best


def _run(heap: Heap, trace: Trace, first: int, stop: int) -> int | None:
    """Events `first` to `stop`, with what is emptied between them. The index of the one that ran out, or None."""
    for cut in (*(at for at in trace.emptied if first <= at < stop), stop):
        failed = heap.run(trace.events[first:cut])
        if failed is not None:
            return first + failed
        if cut < stop:
            heap.release_all()
        first = cut
    return None


def phases(trace: Trace) -> Iterator[tuple[int, int, ForecastPhase]]:
    """(first event, one past the last, phase); what comes before the first mark belongs to init."""
    marks = trace.marks
    if not marks or marks[0][0] > 0:
        marks = ((0, "init"), *marks)
    stops = [*(at for at, _ in marks[1:]), len(trace.events)]
    return ((first, stop, phase) for (first, phase), stop in zip(marks, stops, strict=True))
