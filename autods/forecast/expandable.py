"""Expandable segments: one range of addresses for each pool, of which pages of 2 or 20 MiB are mapped when needed.

With PYTORCH_ALLOC_CONF=expandable_segments:True. A block at the end of what is mapped can grow, so blocks of growing
sizes leave no unusable segments behind. Source: torch's c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .heap import LARGE_SEGMENT, MASK, SHIFT, SMALL_SEGMENT, UNIT, Heap

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
