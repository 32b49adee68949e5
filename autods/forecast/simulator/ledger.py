"""Every tensor's bytes by tier, from its allocation to its end: current, peaks by phase, and the trace of events."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping
from typing import Any

from ...types import Tier
from ..values import ForecastPhase

DEVICE, HOST, PINNED, _SUM = 0, 1, 2, 3
_TIERS: tuple[Tier, Tier, Tier] = ("device", "host", "pinned")
_TRACED = (DEVICE, PINNED)


class _Watch(weakref.ref[Any]):
    """Knows which storage it watched. Cheaper than weakref.finalize, which keeps a registry."""

    __slots__ = ("key",)
    key: int


class Ledger:
    """The books of one rank. `one_memory`: all tiers are the process's memory, and count as the device (CPU ranks)."""

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
        self.copied: list[tuple[int, int]] = []  # events of the device before each collective, bytes of its copies
        self.locked: list[int] = []  # pinned blocks that DeepSpeed locks itself
        self.kinds = bytearray()  # of the device's blocks: what allocated them
        self.kind_of_new = _unknown

    def begin(self, phase: ForecastPhase) -> None:
        """A phase begins; the peaks of the one before are kept."""
        self._close()
        self.phase = phase
        for tier in _TRACED:
            marks, count = self._marks[tier], len(self._events[tier])
            if not marks or marks[-1][1] != phase:
                marks.append((count, phase))

    def restart(self) -> None:
        """A trace of its own for another micro batch: it opens with what lives now, as if allocated in init."""
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

    def see(self, tensor: Any, tier: int | None = None) -> None:
        """Enter the tensor's storage if it is new or has another size than before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[0] == size:
                return
            self._take(key)
            self._enter(key, size, known[1], known[3])
            return
        if tier is None:
            kind = tensor.device.type
            if kind == "meta":
                return
            tier = DEVICE if kind == "cuda" or self.one_memory else HOST
        elif self.one_memory:
            tier = DEVICE
        watch = _Watch(storage, self._gone)
        watch.key = key
        self._enter(key, size, tier, watch)

    def enter_new(self, tensor: Any, size: int, device: Any) -> None:
        """Enter a storage that is known to be new."""
        kind = device.type
        if kind == "meta":
            return
        storage = tensor.untyped_storage()
        watch = _Watch(storage, self._gone)
        watch.key = key = storage._cdata
        self._enter(key, size, DEVICE if kind == "cuda" or self.one_memory else HOST, watch)

    def empty_cache(self, *args: Any) -> None:
        """The allocator gives back what it caches."""
        self.emptied.append(len(self._events[DEVICE]))

    def copy(self, size: int) -> None:
        """A collective is about to allocate so much inside. That is no tensor, and no part of the live bytes."""
        if size:
            self.copied.append((len(self._events[DEVICE]), size))

    def lock(self, tensor: Any) -> None:
        """A pinned tensor that does not come from torch's allocator, and is not rounded."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        if known is not None and known[1] == PINNED:
            self.locked.append(known[2])

    def is_pinned(self, tensor: Any) -> bool:
        """Whether the tensor lies in pinned host memory."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return known is not None and known[1] == PINNED

    def label(self, tensor: Any, kind: int) -> None:
        """Say what a living tensor of the device is."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        if known is not None and known[1] == DEVICE:
            self.kinds[known[2]] = kind

    def assume(self, sentence: str) -> None:
        """A sentence for the user, once."""
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
        """The events and marks so far."""
        return self._events[tier], self._marks[tier]

    def at_the_peak(self) -> Mapping[int, int]:
        """What allocated it → bytes on the device at the moment of the highest peak."""
        now = top = where = 0
        sizes: list[int] = []
        for index, event in enumerate(self._events[DEVICE]):
            if event >= 0:
                sizes.append(event)
                now += event
                if now > top:
                    top, where = now, index
            else:
                now -= sizes[-event - 1]
        alive: dict[int, int] = {}
        block = 0
        for event in self._events[DEVICE][: where + 1]:
            if event >= 0:
                alive[block] = event
                block += 1
            else:
                del alive[-event - 1]
        found: dict[int, int] = {}
        for block, size in alive.items():
            found[self.kinds[block]] = found.get(self.kinds[block], 0) + size
        return found

    def _enter(self, key: int, size: int, tier: int, watch: _Watch) -> None:
        block = self._blocks[tier]
        self._blocks[tier] = block + 1
        self._live[key] = (size, tier, block, watch)
        now = self.current[tier] + size
        self.current[tier] = now
        if now > self.highest[tier]:
            self.highest[tier] = now
        self.current[_SUM] = now = self.current[_SUM] + size
        if now > self.highest[_SUM]:
            self.highest[_SUM] = now
        self._events[tier].append(size)
        if tier == DEVICE:
            self.kinds.append(self.kind_of_new(size))

    def _take(self, key: int) -> None:
        size, tier, block, _ = self._live.pop(key)
        self.current[tier] -= size
        self.current[_SUM] -= size
        self._events[tier].append(-block - 1)

    def _gone(self, watch: _Watch) -> None:
        known = self._live.get(watch.key)
        if known is not None and known[3] is watch:  # another storage may have the address by now
            self._take(watch.key)

    def _close(self) -> None:
        kept = self._by_phase.setdefault(self.phase, [0, 0, 0, 0])
        for tier in range(4):
            kept[tier] = max(kept[tier], self.highest[tier])
        self.highest = list(self.current)


def _unknown(size: int) -> int:
    return 0
