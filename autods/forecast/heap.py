"""torch's CUDA caching allocator: an exact model of its rules for one stream.

Sizes are rounded up to 512 B. Up to 1 MiB they come from a pool of 2 MiB segments; above, from segments of 20 MiB, or
of their own size rounded up to 2 MiB from 10 MiB on. The smallest free block that is large enough is taken, of equal
ones the one with the lowest address; what is left of it is split off, and a freed block merges with free neighbours.
Source: torch's c10/cuda/CUDACachingAllocator.cpp.

Not modelled: blocks used on several streams (their free is delayed), CUDA graphs' pools, garbage collection,
roundup_power2_divisions. Addresses of segments are taken to rise with time, which the driver does not promise.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

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
