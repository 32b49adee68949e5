"""An NVML that answers as it is told, for tests of what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


@dataclass
class FakeCard:
    """total_bytes: what CUDA says, reserved_bytes: beside it, the driver's. slices: MIG devices; None: no MIG mode.

    capability: None where the driver does not answer. shares_memory: that of the host, whose size NVML does not tell.
    knows_health: it answers the questions of the last fields. fault: NVML's error in place of its handle.
    """

    name: str = "A Card"
    uuid: str = "GPU-a"
    total_bytes: int = 16 * GIB
    reserved_bytes: int = GIB // 2
    used_bytes: int = 0
    pids: tuple[int, ...] = ()
    held_bytes: dict[int, int] = field(default_factory=dict)  # by pid; not every driver tells it
    slices: list[FakeCard | None] | None = None
    knows_mig: bool = True
    lost: bool = False
    fault: int | None = None
    shares_memory: bool = False
    capability: tuple[int, int] | None = (9, 0)
    knows_health: bool = True
    uncorrected: int = 0  # errors since the driver was loaded
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)  # corrected, uncorrected, pending, failed
    retires: int = 0  # a page at the next reset, on cards before A100
    reasons: int = 1  # idle
    watts: tuple[int, int] = (700, 700)  # enforced, by default
    lanes: tuple[int, int] = (16, 16)  # now, at most
    busy: int = 0  # percent
    persistent: int = 1  # the driver stays loaded
    address: str | None = None  # on the PCI bus
    memory_node: int | None = None  # the NUMA node that its memory is


class NVMLError(Exception):
    def __init__(self, said: str, value: int | None = None) -> None:
        super().__init__(said)
        self.value = value


@dataclass
class FakeNvml:
    """`sys.modules["pynvml"]`, or the `nvml` argument. new: the driver knows the second version of the memory call."""

    cards: Sequence[FakeCard] = ()
    problem: NVMLError | None = None
    new: bool = True
    driver: str | bytes = "580.95.05"
    cuda: int | None = 13000  # None where there is no libcuda.so.1
    open: int = 0
    asked: list[str] = field(default_factory=list)
    links: str = "NVLink"  # between all cards
    old_names: bool = False  # of a driver before 535

    NVMLError: Any = NVMLError
    NVML_ERROR_DRIVER_NOT_LOADED: int = 9
    NVML_ERROR_LIBRARY_NOT_FOUND: int = 12
    nvmlMemory_v2: int = 0x02000028

    def nvmlInit(self) -> None:
        if self.problem is not None:
            raise self.problem
        self.open += 1

    def nvmlShutdown(self) -> None:
        if not self.open:
            raise NVMLError("Uninitialized", 1)
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        if not 0 <= index < len(self.cards):
            raise NVMLError("Invalid Argument", 2)
        if self.cards[index].lost:
            raise NVMLError("GPU is lost", 15)
        if (fault := self.cards[index].fault) is not None:
            raise NVMLError(f"error {fault}", fault)
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:
        slices = [one for card in self.cards for one in card.slices or () if one is not None]
        for card in (*self.cards, *slices):
            if card.uuid == uuid:
                return card
        raise NVMLError("Not Found", 6)

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        if not card.knows_mig:
            raise NVMLError("Not Supported", 3)
        return [int(card.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, place: int) -> FakeCard:
        found = card.slices[place] if card.slices is not None and place < len(card.slices) else None
        if found is None:
            raise NVMLError("Not Found", 6)
        return found

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> SimpleNamespace:
        if card.shares_memory:
            raise NVMLError("Not Supported", 3)
        free = card.total_bytes - card.used_bytes
        whole = card.total_bytes + card.reserved_bytes
        if version is None:
            return SimpleNamespace(total=whole, free=free, used=whole - free)
        if not self.new:
            raise NVMLError("Function Not Found", 13)
        return SimpleNamespace(total=whole, reserved=card.reserved_bytes, free=free, used=card.used_bytes)

    def nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=card.held_bytes.get(pid)) for pid in card.pids]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: FakeCard) -> list[SimpleNamespace]:
        raise NVMLError("Not Supported", 3)

    def nvmlDeviceGetPciInfo(self, card: FakeCard) -> SimpleNamespace:
        if card.address is None:
            raise NVMLError("Not Supported", 3)
        return SimpleNamespace(busId=card.address.encode())

    def nvmlDeviceGetNumaNodeId(self, card: FakeCard) -> int:
        if card.memory_node is None:
            raise NVMLError("Not Supported", 3)
        return card.memory_node

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetIndex(self, card: FakeCard) -> int:
        for number, one in enumerate(self.cards):
            if one is card:
                return number
            if card in (one.slices or ()):
                return (one.slices or []).index(card)
        raise NVMLError("Not Found", 6)

    def nvmlDeviceGetName(self, card: FakeCard) -> str | bytes:
        return card.name

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        if card.capability is None:
            raise NVMLError("Not Supported", 3)
        return card.capability

    def nvmlDeviceGetTotalEccErrors(self, card: FakeCard, kind: int, counter: int) -> int:
        return self._tell(card, {(1, 0): card.uncorrected}[kind, counter])

    def nvmlDeviceGetRemappedRows(self, card: FakeCard) -> tuple[int, int, int, int]:
        return self._tell(card, card.remapped)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, card: FakeCard) -> int:
        return self._tell(card, card.retires)

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: FakeCard) -> int:
        if self.old_names:
            raise NVMLError("Function Not Found", 13)
        return self._tell(card, card.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: FakeCard) -> int:
        return self._tell(card, card.reasons)

    def nvmlDeviceGetEnforcedPowerLimit(self, card: FakeCard) -> int:
        return self._tell(card, 1000 * card.watts[0])

    def nvmlDeviceGetPowerManagementDefaultLimit(self, card: FakeCard) -> int:
        return self._tell(card, 1000 * card.watts[1])

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: FakeCard) -> int:
        return self._tell(card, card.lanes[0])

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: FakeCard) -> int:
        return self._tell(card, card.lanes[1])

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> SimpleNamespace:
        return self._tell(card, SimpleNamespace(gpu=card.busy, memory=0))

    def nvmlDeviceGetPersistenceMode(self, card: FakeCard) -> int:
        return self._tell(card, card.persistent)

    def nvmlDeviceGetP2PStatus(self, card: FakeCard, other: FakeCard, capability: int) -> int:
        """0: OK; 5: not supported. capability: 0 to read the other's memory, 2 NVLink."""
        reached = {"NVLink": (0, 2), "PCIe": (0,), "host memory": ()}[self.links]
        return self._tell(card, 0 if capability in reached else 5)

    def _tell(self, card: FakeCard, value: Any) -> Any:
        if not card.knows_health:
            raise NVMLError("Not Supported", 3)
        return value

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        if self.cuda is None:
            raise NVMLError("NVML Shared Library Not Found", 12)
        return self.cuda


def four() -> FakeNvml:
    """Cards of 16 GiB with UUIDs GPU-a, GPU-b, …"""
    return FakeNvml([FakeCard(uuid=f"GPU-{letter}") for letter in "abcd"])
