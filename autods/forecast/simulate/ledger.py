"""The bytes of every tensor by tier, from allocation to end: current, peaks by phase, and the trace of events."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ...types import Tier
from ..attention import FAMILIES, UNKNOWN_FAMILY
from ..values import ForecastPhase, Trace
from .unknown_values import Choices
from .work_log import WorkLog

DEVICE, HOST, PINNED, _SUM = 0, 1, 2, 3
_POOLED_STREAMS = 32  # c10/cuda/CUDAStream.cpp, kStreamsPerPoolBits = 5
_TIERS: tuple[Tier, Tier, Tier] = ("device", "host", "pinned")


class _Watch(weakref.ref[Any]):
    """A weak reference that knows its storage. It is cheaper than weakref.finalize, which keeps a registry."""

    __slots__ = ("key",)
    key: int


class _Tape:
    """The trace of one tier so far; `blocks` are its allocations, and `values.Trace` explains the rest."""

    __slots__ = ("blocks", "events", "marks")

    def __init__(self) -> None:
        self.blocks = 0
        self.events = array("q")
        self.marks: list[tuple[int, ForecastPhase]] = []


class Ledger:
    """Live bytes and allocation events of one rank. With `one_memory` (CPU ranks) every tier counts as the device."""

    def __init__(self, *, one_memory: bool) -> None:
        self.one_memory = one_memory
        self.work = WorkLog()
        self.work.is_pinned = self.is_pinned
        self.device_bytes = 0
        self.outside_bytes = 0  # of the device, held beside torch's allocator
        self.capability = self.family = UNKNOWN_FAMILY
        self.families = set(FAMILIES)  # those on which every call of attention takes the same kernel
        self.choices = Choices()
        self.assumed: dict[str, None] = {}
        self.is_upper_bound = False
        self.nvme: dict[str, int] = {}
        self._live: dict[int, tuple[int, int, int, _Watch | None]] = {}  # storage → bytes, tier, block, watch
        self._held_keys = itertools.count(1)
        self._mapped: dict[int, _Watch] = {}  # storages in the pages of a file
        self._maps = False
        self.current = [0, 0, 0, 0]
        self.highest = [0, 0, 0, 0]  # of the current phase
        self.phase: ForecastPhase = "build"
        self._by_phase: dict[ForecastPhase, list[int]] = {}
        self._tapes = [_Tape() for _ in _TIERS]
        self._emptied: list[int] = []  # events of the device before each empty_cache()
        self._copied: list[tuple[int, int]] = []  # events of the device before each collective, bytes that it copies
        self._locked: set[int] = set()  # pinned blocks that do not come from torch's allocator
        self._kinds = bytearray()  # of the device's blocks, see `attribution`
        self._stream_of = array("B")  # of the device's blocks
        self._issued = array("q")  # work issued before each event of the device
        self._pools: dict[int, int] = {0: 0}  # streams in the order of their first allocation
        self._uses: dict[int, set[int]] = {}  # living block → other streams that use it
        self._unfinished: dict[int, deque[tuple[int, int]]] = {}  # stream → its marks, with the blocks freed there
        self._left: Counter[int] = Counter()  # freed block → streams that have not passed its marks
        self._held: dict[int, int] = {}  # freed block → events before it came back
        self._users: dict[int, tuple[int, ...]] = {}  # freed block → the streams that it waited for
        self.kind_of_new: Callable[[ForecastPhase, int], int] = lambda phase, size: 0

    def begin(self, phase: ForecastPhase) -> None:
        """Begin a phase; the peaks of the former phase are kept."""
        self._close()
        self.phase = phase
        for tape in self._tapes:
            if not tape.marks or tape.marks[-1][1] != phase:
                tape.marks.append((len(tape.events), phase))

    def enter(self, tensor: Any, tier: int | None = None) -> None:
        """Enter the tensor's storage if it is new or has changed its size; without a tier, its device decides."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is None and key not in self._mapped:
            self.enter_new(tensor, size, tensor.device, tier)
        elif known is None:
            return
        elif known[0] != size:
            self._remove(key)
            self._add(key, size, known[1], known[3])

    def enter_new(self, tensor: Any, size: int, device: Any, tier: int | None = None) -> None:
        """Enter a storage of `size` bytes that is known to be new."""
        if device.type == "meta":
            return
        if self.one_memory:
            tier = DEVICE
        elif tier is None:
            tier = HOST if tensor.is_cpu else DEVICE
        storage = tensor.untyped_storage()
        watch = _Watch(storage, self._on_gone)
        watch.key = key = storage._cdata
        if self._maps and tier == HOST:
            self._mapped[key] = watch
        else:
            self._add(key, size, tier, watch)

    @contextlib.contextmanager
    def map_files(self) -> Iterator[None]:
        """New tensors of the host lie in the pages of a file, which the kernel takes back: they count for nothing.

        On CPU ranks they count. The limit of a rank's memory holds private mappings, too.
        """
        self._maps = True
        try:
            yield
        finally:
            self._maps = False

    def empty_cache(self, *args: Any) -> None:
        """Note that torch's allocator returns its cached memory here."""
        self._emptied.append(len(self._tapes[DEVICE].events))

    def copy(self, size: int) -> None:
        """Note that a collective allocates so many bytes until it ends; they are no tensor and no live bytes."""
        if size:
            self._copied.append((len(self._tapes[DEVICE].events), size))

    def borrow(self, sizes: Collection[int], tier: int = DEVICE) -> None:
        """Note that a kernel takes so many bytes of the tier, all at once, until it ends. They are no tensors."""
        for give_back in [self.hold(size, tier) for size in sizes]:
            give_back()

    def hold(self, size: int, tier: int = DEVICE) -> Callable[[], None]:
        """Note that a library takes so many bytes of the tier, until what is returned is called. They are no tensor."""
        key = -next(self._held_keys)  # no storage has a negative address

        def give_back() -> None:
            summed = self.current[_SUM]
            self._remove(key)
            self.current[_SUM] = summed

        current, highest = self.current[_SUM], self.highest[_SUM]
        self._add(key, size, tier, None)
        self.current[_SUM], self.highest[_SUM] = current, highest
        return give_back

    def lock(self, tensor: Any) -> None:
        """Note that a pinned tensor does not come from torch's allocator, which would round its size."""
        if (block := self._find_block(tensor, PINNED)) is not None:
            self._locked.add(block)

    def use_on(self, tensor: Any, stream: Any) -> None:
        """Note that a stream uses the tensor's memory, as `torch.Tensor.record_stream` does, without a kernel."""
        self.work.call_without_kernel(1)
        block = self._find_block(tensor, DEVICE)
        if block is not None and self._number_pool(stream.stream_id) != self._stream_of[block]:
            self._uses.setdefault(block, set()).add(stream.stream_id)

    def is_pinned(self, tensor: Any) -> bool:
        return self._find_block(tensor, PINNED) is not None

    def label(self, tensor: Any, kind: int) -> None:
        """Set the kind of a living tensor of the device."""
        if (block := self._find_block(tensor, DEVICE)) is not None:
            self._kinds[block] = kind

    def assume(self, sentence: str, *, at_most: bool = False) -> None:
        """Note a sentence for the user, once. With `at_most` what was assumed takes more than what will be."""
        self.assumed[sentence] = None
        self.is_upper_bound |= at_most

    def peaks(self) -> dict[ForecastPhase, dict[Tier, int]]:
        """Phase → tier → peak bytes."""
        self._close()
        return {phase: dict(zip(_TIERS, tops, strict=False)) for phase, tops in self._by_phase.items()}

    def summed_peaks(self) -> dict[ForecastPhase, int]:
        """Phase → peak bytes of the tensors of all tiers together."""
        self._close()
        return {phase: tops[_SUM] for phase, tops in self._by_phase.items()}

    def trace(self, tier: int) -> Trace:
        tape, on_device = self._tapes[tier], tier == DEVICE
        return Trace(
            events=array("q", tape.events),
            marks=tuple(tape.marks),
            emptied=tuple(self._emptied) if on_device else (),
            copied=tuple(self._copied) if on_device else (),
            unrounded=frozenset(self._locked) if tier == PINNED else frozenset(),
            streams=array("B", self._stream_of) if on_device and any(self._stream_of) else (),
            users=dict(self._users) if on_device else {},
            held={**self._held, **dict.fromkeys(self._left, len(tape.events))} if on_device else {},
            issued=array("q", self._issued) if on_device else (),
            kinds=bytes(self._kinds) if on_device else (),
        )

    def _find_block(self, tensor: Any, tier: int) -> int | None:
        """Return the block of a living tensor; None if it lies on another tier."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return None if known is None or known[1] != tier else known[2]

    def _add(self, key: int, size: int, tier: int, watch: _Watch | None) -> None:
        tape = self._tapes[tier]
        if tier == DEVICE:
            if self._left:
                self._pass_marks()
            self.work.order.launch(self.work.current)  # a kernel fills it
            self._stream_of.append(self._number_pool(self.work.current))
            self._issued.append(self.work.issued)
        self._live[key] = (size, tier, tape.blocks, watch)
        tape.blocks += 1
        tape.events.append(size)
        for counter in (tier, _SUM):
            current = self.current[counter] = self.current[counter] + size
            if current > self.highest[counter]:
                self.highest[counter] = current
        if tier == DEVICE:
            self._kinds.append(self.kind_of_new(self.phase, size))

    def _remove(self, key: int) -> None:
        size, tier, block, _ = self._live.pop(key)
        self.current[tier] -= size
        self.current[_SUM] -= size
        self._tapes[tier].events.append(~block)
        if tier != DEVICE:
            return
        self._issued.append(self.work.issued)
        if (uses := self._uses.pop(block, None)) is not None:
            for stream in uses:
                self._unfinished.setdefault(stream, deque()).append((self.work.order.launched(stream), block))
            self._left[block] = len(uses)
            self._users[block] = tuple(uses)

    def _number_pool(self, stream: int) -> int:
        """Return the stream's number in the trace. torch makes 32 streams, and then gives out the first again."""
        return self._pools.setdefault(stream, (len(self._pools) - 1) % _POOLED_STREAMS + 1)

    def _pass_marks(self) -> None:
        """Note which freed blocks are done with on all of their streams; torch asks at each allocation."""
        for stream, marks in self._unfinished.items():
            passed = self.work.order.passed(stream) if marks else 0
            while marks and marks[0][0] <= passed:
                block = marks.popleft()[1]
                self._left[block] -= 1
                if not self._left[block]:
                    del self._left[block]
                    self._held[block] = len(self._tapes[DEVICE].events)

    def _on_gone(self, watch: _Watch) -> None:
        known = self._live.get(watch.key)
        if known is not None and known[3] is watch:  # another storage may have the address by now
            self._remove(watch.key)
        elif self._mapped.get(watch.key) is watch:
            del self._mapped[watch.key]

    def _close(self) -> None:
        """Keep the peaks of the current phase."""
        kept = self._by_phase.setdefault(self.phase, [0, 0, 0, 0])
        for tier in range(4):
            kept[tier] = max(kept[tier], self.highest[tier])
        self.highest = list(self.current)
