"""A model of torch's CUDA caching allocator, on which `replay` replays allocation traces.

After torch 2.13's c10/cuda/CUDACachingAllocator.cpp: `BlockComparatorSize` orders free blocks by stream first, so that
each stream has pools of its own; `free` leaves a block that other streams use to `process_events`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

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
    """The allocator's state in units of 512 B: two pools of free blocks a stream, and where each block of the trace is.

    No more than `limit_bytes` may be reserved. Segments never touch, so two free blocks that touch are in one segment.
    `streams` has the stream of each block of the trace; if it is empty, all of them are of the first.
    `late` are the blocks that stay out of their pool when they are freed, until `give_back`.
    """

    leave_large: ClassVar[int] = SMALL + 1  # the smallest remainder that is split off a large block
    blocks_grow: ClassVar[bool] = False  # whether free blocks can be extended by unmapped pages
    own_tables: ClassVar[tuple[str, ...]] = ()  # of a subclass

    limit_bytes: int | None = None
    streams: Sequence[int] = ()
    late: Collection[int] = ()

    pools: list[list[int]] = field(init=False)  # free blocks, sorted: the small pool of each stream, and its large one
    waiting: dict[int, None] = field(default_factory=dict)  # freed blocks that have not come back yet, in order
    starts: dict[int, int] = field(default_factory=dict)  # address of a free block → its size
    ends: dict[int, int] = field(default_factory=dict)  # one past a free block → its address
    segments: dict[int, int] = field(default_factory=dict)  # address → size
    addresses: list[int] = field(default_factory=list)  # one for each block of the trace
    sizes: list[int] = field(default_factory=list)
    top: int = 0  # where the next segment lies
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    most_granted: int = 0  # of what was asked to be reserved in all; torch may ask for more than it then maps
    peak_allocated: int = 0  # since it was last set back, as at the begin of a phase
    retries: int = 0  # how often cached segments were given back to make room
    returned: int = 0  # how many segments, or pages of expandable ones

    def __post_init__(self) -> None:
        self.pools = [[] for _ in range(2 + 2 * max(self.streams, default=0))]

    def run(self, events: Iterable[int]) -> int | None:
        """Replay events of a `Trace`. Returns the index of the one that ran out of memory, or None."""
        pools, starts, ends = self.pools, self.starts, self.ends
        addresses, sizes, streams, late = self.addresses, self.sizes, self.streams, self.late
        allocated, peak = self.allocated, self.peak_allocated
        blocks_grow, leave_large = self.blocks_grow, self.leave_large
        failed = None
        # A trace has a million events and this loop is all the time that a replay takes: it calls bisect only.
        for at, event in enumerate(events):
            if event > 0:
                size = (event + 511) >> 9
                index = 2 * streams[len(addresses)] if streams else 0
                leave = 1
                if size > SMALL:
                    index += 1
                    leave = leave_large
                pool = pools[index]
                place = bisect_left(pool, size << SHIFT)
                if place < len(pool):
                    if blocks_grow:
                        place = self.choose(pool, place)
                    block = pool.pop(place)
                    address, have = block & MASK, block >> SHIFT
                    del starts[address]
                else:
                    address = self._grow(index, size)
                    if address < 0:
                        failed = at
                        break
                    have = starts.pop(address)
                    del pool[bisect_left(pool, have << SHIFT | address)]
                rest = have - size
                if rest >= leave:
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
                number = ~event
                size = sizes[number]
                if not size:
                    continue
                allocated -= size
                if late and number in late and number not in self.waiting:
                    self.waiting[number] = None
                    continue
                address = addresses[number]
                index = 2 * streams[number] if streams else 0
                pool = pools[index + 1 if size > SMALL else index]
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
            else:  # an empty tensor has no memory
                addresses.append(0)
                sizes.append(0)
        self.allocated, self.peak_allocated = allocated, peak
        return failed

    def copy(self, limit_bytes: int | None, streams: Sequence[int]) -> Self:
        """Return a heap that goes on from here by itself, with this limit and these streams of the trace's blocks."""
        twin = replace(self, limit_bytes=limit_bytes, streams=streams)
        for name in ("waiting", "starts", "ends", "segments", "addresses", "sizes", *self.own_tables):
            setattr(twin, name, getattr(self, name).copy())
        twin.pools = [pool.copy() for pool in self.pools]
        return twin

    def choose(self, pool: list[int], place: int) -> int:
        """Return the index of the block to take; the smallest that is large enough is at `place`."""
        return place

    def may_reserve(self, size: int) -> bool:
        """Return whether the limit leaves room for `size` more; if so, note the total that was granted."""
        total = self.reserved + size
        if self.limit_bytes is not None and total * UNIT > self.limit_bytes:
            return False
        self.most_granted = max(self.most_granted, total)
        return True

    def reserve(self, size: int) -> None:
        """Count `size` more as reserved, or less if it is negative."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def extend(self, index: int, size: int, segment: int) -> int:
        """Reserve memory for a pool. Returns the address of a free block of at least `size`; −1 at the limit."""
        if not self.may_reserve(segment):
            return -1
        address = self.top
        self.top += segment + 1  # a gap, so that segments do not touch
        self.segments[address] = segment
        self.reserve(segment)
        self.put(self.pools[index], address, segment)
        return address

    def give_back(self, blocks: Iterable[int]) -> None:
        """Put freed blocks that waited for another stream into their pools."""
        for block in blocks:
            if block in self.waiting:
                self.allocated += self.sizes[block]  # `run` takes them off a second time
                self.run((~block,))
                del self.waiting[block]

    def release_all(self) -> None:
        """Wait for all streams, and return every segment that is free as a whole to the driver."""
        self.give_back(tuple(self.waiting))
        for pool in self.pools:
            for block in tuple(pool):
                address, size = block & MASK, block >> SHIFT
                if self.segments.get(address) == size:
                    self.take(pool, address)
                    del self.segments[address]
                    self.reserve(-size)
                    self.returned += 1

    def put(self, pool: list[int], address: int, size: int) -> None:
        """Add a free block."""
        self.starts[address] = size
        self.ends[address + size] = address
        insort(pool, size << SHIFT | address)

    def take(self, pool: list[int], address: int) -> int:
        """Remove a free block and return its size."""
        size = self.starts.pop(address)
        del self.ends[address + size]
        del pool[bisect_left(pool, size << SHIFT | address)]
        return size

    def _grow(self, index: int, size: int) -> int:
        """Call `extend`; at the limit, give cached segments back and call it again."""
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        address = self.extend(index, size, segment)
        if address < 0:
            self.release_all()
            self.retries += 1
            address = self.extend(index, size, segment)
        return address


_ENDLESS = 2**18 * LARGE_SEGMENT  # the length of a range: 5 TiB, more than any card has; a whole number of pages
_NEXT_RANGE = _ENDLESS + LARGE_SEGMENT  # from the begin of a pool's range to that of the next


@dataclass(slots=True)
class ExpandableHeap(Heap):
    """The allocator with expandable segments: each pool is one range of addresses, and maps pages as it needs them.

    `holes` maps the address of an unmapped range to its size.
    """

    leave_large: ClassVar[int] = 1
    blocks_grow: ClassVar[bool] = True
    own_tables: ClassVar[tuple[str, ...]] = ("holes",)

    holes: dict[int, int] = field(default_factory=dict)

    def choose(self, pool: list[int], place: int) -> int:
        """Take the next larger block while it can grow less: a block counts with the unmapped pages behind it."""
        while place + 1 < len(pool) and self._largest_size(pool[place + 1]) < self._largest_size(pool[place]):
            place += 1
        return place

    def _largest_size(self, block: int) -> int:
        size = block >> SHIFT
        return size + self.holes.get((block & MASK) + size, 0)

    def extend(self, index: int, size: int, segment: int) -> int:
        """Map pages until a free block of at least `size` lies in, or before, the lowest hole with room for it."""
        page = _page(index)
        if not self.may_reserve(segment):  # torch checks its limit before it knows how many pages it has to map
            return -1
        address = at = self._find_space(index, size)
        while (missing := size - (at - address)) > 0:
            if mapped := self.starts.get(at):
                at += mapped
                continue
            pages = min(self.holes[at], -(-missing // page) * page)
            if not self.may_reserve(pages):
                return -1
            at = self._map(index, at, pages)
        return address

    def release_all(self) -> None:
        """Wait for all streams, and return every free page to the driver."""
        self.give_back(tuple(self.waiting))
        for index, pool in enumerate(self.pools):
            for block in tuple(pool):
                self._unmap(index, block & MASK, block >> SHIFT)

    def _find_space(self, index: int, size: int) -> int:
        """Return the lowest address from which adjoining free and unmapped ranges hold `size`."""
        home = index * _NEXT_RANGE
        if home not in self.segments:
            self.segments[home] = self.holes[home] = _ENDLESS
        for hole in sorted(hole for hole in self.holes if home <= hole < home + _ENDLESS):
            start = at = self.ends.get(hole, hole)
            while at - start < size and (more := self.starts.get(at) or self.holes.get(at)):
                at += more
            if at - start >= size:
                return start
        raise AssertionError(f"{size * UNIT} bytes are more than any card has")

    def _map(self, index: int, hole: int, pages: int) -> int:
        """Map the first pages of a hole and join them to their free neighbours. Returns the end of the free block."""
        room = self.holes.pop(hole)
        end = hole + pages
        if room > pages:
            self.holes[end] = room - pages
        self.reserve(pages)
        pool, start = self.pools[index], hole
        if hole in self.ends:
            start = self.ends[hole]
            self.take(pool, start)
        if end in self.starts:
            end += self.take(pool, end)
        self.put(pool, start, end - start)
        return end

    def _unmap(self, index: int, address: int, size: int) -> None:
        """Give back the whole pages of a free block; the rest at its ends stays free."""
        page, pool = _page(index), self.pools[index]
        first, last = -(-address // page) * page, (address + size) // page * page
        if first >= last:
            return
        self.take(pool, address)
        if first > address:
            self.put(pool, address, first - address)
        if address + size > last:
            self.put(pool, last, address + size - last)
        self.reserve(first - last)
        self.returned += (last - first) // page
        for start, room in tuple(self.holes.items()):
            if start + room == first:
                first = start
        last += self.holes.pop(last, 0)
        self.holes[first] = last - first


def _page(index: int) -> int:
    """The unit in which an expandable pool of this index maps memory: even ones are small pools."""
    return LARGE_SEGMENT if index % 2 else SMALL_SEGMENT
