"""What NVML says of the cards: how much programs may have, who else is on them, which driver. Starts no CUDA.

NVML counts all cards in the order of the PCI bus; what CUDA shows of them is worked out here. Every function takes the
`pynvml` module, so that a scripted one can stand in for it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..units import format_bytes

# Less than any process with a CUDA context holds: the driver's own, a few MiB.
_NOBODY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU, or MIG slice, that CUDA shows. `index` is NVML's, of a slice its place on the card.

    total_bytes: what programs may have, as CUDA says it: without what the driver keeps for itself. others_bytes: held
    by processes that were there before us; pids: of those that this user may see.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    others_bytes: int = 0
    pids: tuple[int, ...] = ()
    uuid: str | None = None
    slice: bool = False

    @property
    def usable_bytes(self) -> int:
        """What is left for a rank."""
        return self.total_bytes - self.others_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """One look. driver: its version; cuda: the newest CUDA that it runs, (13, 0) say; problem: why NVML cannot tell."""

    cards: tuple[Card, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    problem: str | None = None


def read_nvml(visible: str | None, nvml: Any = None) -> NvmlReading:
    """The cards that CUDA_VISIBLE_DEVICES leaves, in its order; all when it is None.

    As for CUDA, the first name that no card has ends the list, and of a card in MIG mode a process gets one slice: the
    one that is named, else the first. Without a driver nothing is seen, and nothing is wrong.
    """
    with _open(nvml) as (api, problem):
        if api is None:
            return NvmlReading(problem=problem)
        try:
            cards = tuple(_card(api, handle) for handle in _shown(api, visible))
        except api.NVMLError as error:
            return NvmlReading(problem=f"NVML: {error}")
        return NvmlReading(cards=cards, driver=_driver(api), cuda=_cuda(api))


def describe_shared_cards(cards: Iterable[Card]) -> tuple[str, ...]:
    """Sentences about cards that are not ours alone."""
    return tuple(
        f"card {card.index} ({card.name}): other processes{_who(card.pids)} hold "
        f"{format_bytes(card.others_bytes)} of its {format_bytes(card.total_bytes)}, "
        f"{format_bytes(card.usable_bytes)} are left for a rank"
        for card in cards
        if card.others_bytes
    )


def _who(pids: tuple[int, ...]) -> str:
    return f" (pid {', '.join(map(str, pids))})" if pids else ""


def uuids_to_indices(visible: str, nvml: Any = None) -> str:
    """CUDA_VISIBLE_DEVICES with the numbers of cards in place of their UUIDs, where that can be said.

    DeepSpeed 0.19.8 takes each name for a number when ZeRO-1 and -2 ask how much of the card is free. A MIG slice has
    no number.
    """
    if not any(name.strip().startswith("GPU-") for name in visible.split(",")):
        return visible
    cards = read_nvml(visible, nvml).cards
    if not cards or any(card.slice for card in cards):
        return visible
    return ",".join(str(card.index) for card in cards)


def describe_card_names(visible: str | None, nvml: Any = None) -> tuple[str, ...]:
    """What a person should know of the names that they gave to cards."""
    names = [] if visible is None else [name.strip() for name in visible.split(",")]
    if any(name.startswith("MIG-") for name in names):
        return ("CUDA_VISIBLE_DEVICES names a MIG slice, which DeepSpeed's ZeRO-1 and -2 cannot read: they will fail",)
    numbers = uuids_to_indices(visible, nvml) if visible is not None else None
    if numbers == visible:
        return ()
    return (
        f"CUDA_VISIBLE_DEVICES names cards by UUID, which DeepSpeed's ZeRO-1 and -2 cannot read: trials run with "
        f"CUDA_VISIBLE_DEVICES={numbers} CUDA_DEVICE_ORDER=PCI_BUS_ID, and so has to be what comes after",
    )


def read_used_bytes(visible: str | None, nvml: Any = None) -> tuple[int, ...] | None:
    """What is held of each card that CUDA shows, by whomever; None where NVML does not tell."""
    with _open(nvml) as (api, _):
        if api is None:
            return None
        try:
            return tuple(_memory(api, handle)[2] for handle in _shown(api, visible))
        except api.NVMLError:
            return None


@contextlib.contextmanager
def _open(nvml: Any) -> Iterator[tuple[Any, str | None]]:
    """NVML for a moment, or None with what is wrong, if anything is."""
    if nvml is None:
        nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        absent = ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")
        known = [getattr(nvml, name, None) for name in absent]
        value = getattr(error, "value", None)
        yield None, None if value is None or value in known else f"NVML: {error}"
        return
    try:
        yield nvml, None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _shown(api: Any, visible: str | None) -> Iterator[Any]:
    """Handles, as CUDA enumerates: a process has one MIG slice at most, and beside whole cards none that is not named.

    Source: NVIDIA's MIG user guide, "CUDA device enumeration".
    """
    names = map(str, range(api.nvmlDeviceGetCount())) if visible is None else visible.split(",")
    whole: list[Any] = []
    slices: list[Any] = []
    for name in (part.strip() for part in names):
        find = api.nvmlDeviceGetHandleByIndex if name.isdigit() else api.nvmlDeviceGetHandleByUUID
        try:
            handle = find(int(name) if name.isdigit() else name)
        except api.NVMLError:
            break
        if name.startswith("MIG-"):
            return iter([handle])
        parts = _slices(api, handle)
        if parts is None:
            whole.append(handle)
        else:
            slices += parts
    return iter(whole or slices[:1])


def _slices(api: Any, handle: Any) -> list[Any] | None:
    """The MIG slices of a card; None where it is not in MIG mode."""
    try:
        if not api.nvmlDeviceGetMigMode(handle)[0]:
            return None
        most = api.nvmlDeviceGetMaxMigDeviceCount(handle)
    except api.NVMLError:  # a card that knows no MIG
        return None
    found = []
    for place in range(most):
        with contextlib.suppress(api.NVMLError):  # places may be empty
            found.append(api.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
    return found


def _card(api: Any, handle: Any) -> Card:
    total, free, used = _memory(api, handle)
    uuid = _uuid(api, handle)
    return Card(
        index=api.nvmlDeviceGetIndex(handle),
        name=_text(api.nvmlDeviceGetName(handle)),
        total_bytes=total,
        free_bytes=free,
        others_bytes=used if used >= _NOBODY_BYTES else 0,
        pids=_pids(api, handle),
        uuid=uuid,
        slice=uuid is not None and uuid.startswith("MIG-"),
    )


def _memory(api: Any, handle: Any) -> tuple[int, int, int]:
    """Total, free and used bytes of what CUDA counts.

    The first version of the call adds the driver's reserve to the total and to what is used: 0.5 GiB of an 80 GiB card.
    """
    version = getattr(api, "nvmlMemory_v2", None)
    if version is not None:
        with contextlib.suppress(api.NVMLError):  # a driver older than R510
            memory = api.nvmlDeviceGetMemoryInfo(handle, version=version)
            return int(memory.total) - int(memory.reserved), int(memory.free), int(memory.used)
    memory = api.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.free), int(memory.total) - int(memory.free)


def _pids(api: Any, handle: Any) -> tuple[int, ...]:
    """Of processes with a context there; in a container NVML may know none, or other numbers."""
    found: list[int] = []
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        ask = getattr(api, name, None)
        if ask is not None:
            with contextlib.suppress(api.NVMLError):
                found += [int(one.pid) for one in ask(handle)]
    return tuple(dict.fromkeys(found))


def _uuid(api: Any, handle: Any) -> str | None:
    ask = getattr(api, "nvmlDeviceGetUUID", None)
    if ask is None:
        return None
    with contextlib.suppress(api.NVMLError):
        return _text(ask(handle))
    return None


def _driver(api: Any) -> str | None:
    with contextlib.suppress(api.NVMLError, AttributeError):
        return _text(api.nvmlSystemGetDriverVersion())
    return None


def _cuda(api: Any) -> tuple[int, int] | None:
    with contextlib.suppress(api.NVMLError, AttributeError):
        said = int(api.nvmlSystemGetCudaDriverVersion_v2())  # 13020
        return said // 1000, said % 1000 // 10
    return None


def _text(said: str | bytes) -> str:
    return said.decode() if isinstance(said, bytes) else str(said)
