"""The bytes of every tensor by tier, from allocation to end: current, peaks by phase, and the trace of events."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from ...types import Tier
from ..values import ForecastPhase

DEVICE, HOST, PINNED, _SUM = 0, 1, 2, 3
_TIERS: tuple[Tier, Tier, Tier] = ("device", "host", "pinned")
_TRACED = (DEVICE, PINNED)


class _Watch(weakref.ref[Any]):
    """A weak reference that knows its storage. It is cheaper than weakref.finalize, which keeps a registry."""

    __slots__ = ("key",)
    key: int


class Ledger:
    """Live bytes and allocation events of one rank. With `one_memory` (CPU ranks) every tier counts as the device."""

    def __init__(self, *, one_memory: bool) -> None:
        self.one_memory = one_memory
        self.device_bytes = 0
        self.assumed: dict[str, None] = {}
        self.nvme: dict[str, int] = {}
        self._live: dict[int, tuple[int, int, int, _Watch]] = {}  # storage → bytes, tier, block, watch
        self.current = [0, 0, 0, 0]
        self.highest = [0, 0, 0, 0]  # of the current phase
        self.phase: ForecastPhase = "init"
        self._by_phase: dict[ForecastPhase, list[int]] = {}
        self._events = [array("q"), array("q"), array("q")]
        self._blocks = [0, 0, 0]
        self._marks: list[list[tuple[int, ForecastPhase]]] = [[], [], []]
        self.emptied: list[int] = []  # events of the device before each empty_cache()
        self.copied: list[tuple[int, int]] = []  # events of the device before each collective, bytes that it copies
        self.locked: list[int] = []  # pinned blocks that do not come from torch's allocator
        self.kinds = bytearray()  # of the device's blocks, see `attribution`
        self.kind_of_new: Callable[[int], int] = lambda size: 0

    def begin(self, phase: ForecastPhase) -> None:
        """Begin a phase; the peaks of the former phase are kept."""
        self._close()
        self.phase = phase
        for tier in _TRACED:
            marks, count = self._marks[tier], len(self._events[tier])
            if not marks or marks[-1][1] != phase:
                marks.append((count, phase))

    def restart(self) -> None:
        """Begin a trace for another micro batch: living tensors open it, as if allocated in init."""
        self._close()
        self._by_phase.clear()
        self._events = [array("q"), array("q"), array("q")]
        self._blocks = [0, 0, 0]
        self._marks = [[], [], []]
        self.emptied, self.copied, locked, self.locked = [], [], set(self.locked), []
        self.begin("init")
        old_kinds, self.kinds = self.kinds, bytearray()
        for key, (size, tier, block, watch) in list(self._live.items()):  # insertion order: that of allocation
            number = self._blocks[tier]
            self._blocks[tier] += 1
            self._events[tier].append(size)
            if tier == DEVICE:
                self.kinds.append(old_kinds[block])
            elif tier == PINNED and block in locked:
                self.locked.append(number)
            self._live[key] = (size, tier, number, watch)

    def enter(self, tensor: Any, tier: int | None = None) -> None:
        """Enter the tensor's storage if it is new or has changed its size; without a tier, its device decides."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[0] == size:
                return
            self._remove(key)
            self._add(key, size, known[1], known[3])
            return
        if tier is None:
            kind = tensor.device.type
            if kind == "meta":
                return
            tier = DEVICE if kind == "cuda" or self.one_memory else HOST
        elif self.one_memory:
            tier = DEVICE
        watch = _Watch(storage, self._on_gone)
        watch.key = key
        self._add(key, size, tier, watch)

    def enter_new(self, tensor: Any, size: int, device: Any) -> None:
        """Enter a storage of `size` bytes that is known to be new."""
        kind = device.type
        if kind == "meta":
            return
        storage = tensor.untyped_storage()
        watch = _Watch(storage, self._on_gone)
        watch.key = key = storage._cdata
        self._add(key, size, DEVICE if kind == "cuda" or self.one_memory else HOST, watch)

    def empty_cache(self, *args: Any) -> None:
        """Note that torch's allocator returns its cached memory here."""
        self.emptied.append(len(self._events[DEVICE]))

    def copy(self, size: int) -> None:
        """Note that a collective allocates so many bytes until it ends; they are no tensor and no live bytes."""
        if size:
            self.copied.append((len(self._events[DEVICE]), size))

    def lock(self, tensor: Any) -> None:
        """Note that a pinned tensor does not come from torch's allocator, which would round its size."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        if known is not None and known[1] == PINNED:
            self.locked.append(known[2])

    def is_pinned(self, tensor: Any) -> bool:
        """Whether the tensor lies in pinned host memory."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return known is not None and known[1] == PINNED

    def label(self, tensor: Any, kind: int) -> None:
        """Set the kind of a living tensor of the device."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        if known is not None and known[1] == DEVICE:
            self.kinds[known[2]] = kind

    def assume(self, sentence: str) -> None:
        """Note a sentence for the user, once."""
        self.assumed[sentence] = None

    def peaks(self) -> dict[ForecastPhase, dict[Tier, int]]:
        """Phase → tier → peak bytes."""
        self._close()
        return {phase: dict(zip(_TIERS, tops, strict=False)) for phase, tops in self._by_phase.items()}

    def summed_peaks(self) -> dict[ForecastPhase, int]:
        """Phase → peak bytes of all tiers together."""
        self._close()
        return {phase: tops[_SUM] for phase, tops in self._by_phase.items()}

    def trace(self, tier: int) -> tuple[array[int], list[tuple[int, ForecastPhase]]]:
        """Events and marks of a tier so far, as in `values.Trace`."""
        return self._events[tier], self._marks[tier]

    def bytes_at_peak(self) -> Mapping[int, int]:
        """Bytes on the device at the moment of its highest peak, by kind."""
        current = peak = peak_event = 0
        sizes: list[int] = []
        for index, event in enumerate(self._events[DEVICE]):
            if event >= 0:
                sizes.append(event)
                current += event
                if current > peak:
                    peak, peak_event = current, index
            else:
                current -= sizes[-event - 1]
        live: dict[int, int] = {}
        block = 0
        for event in self._events[DEVICE][: peak_event + 1]:
            if event >= 0:
                live[block] = event
                block += 1
            else:
                del live[-event - 1]
        by_kind: dict[int, int] = {}
        for block, size in live.items():
            by_kind[self.kinds[block]] = by_kind.get(self.kinds[block], 0) + size
        return by_kind

    def _add(self, key: int, size: int, tier: int, watch: _Watch) -> None:
        block = self._blocks[tier]
        self._blocks[tier] = block + 1
        self._live[key] = (size, tier, block, watch)
        for counter in (tier, _SUM):
            current = self.current[counter] = self.current[counter] + size
            if current > self.highest[counter]:
                self.highest[counter] = current
        self._events[tier].append(size)
        if tier == DEVICE:
            self.kinds.append(self.kind_of_new(size))

    def _remove(self, key: int) -> None:
        size, tier, block, _ = self._live.pop(key)
        self.current[tier] -= size
        self.current[_SUM] -= size
        self._events[tier].append(-block - 1)

    def _on_gone(self, watch: _Watch) -> None:
        known = self._live.get(watch.key)
        if known is not None and known[3] is watch:  # another storage may have the address by now
            self._remove(watch.key)

    def _close(self) -> None:
        """Keep the peaks of the current phase."""
        kept = self._by_phase.setdefault(self.phase, [0, 0, 0, 0])
        for tier in range(4):
            kept[tier] = max(kept[tier], self.highest[tier])
        self.highest = list(self.current)
