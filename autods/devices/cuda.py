"""NVIDIA's GPUs: the device, what NVML reports of its cards, and whether this process has begun to use CUDA.

Nothing here starts CUDA. NVML lists all cards in the order of the PCI bus; this module finds those that CUDA shows.
Functions that ask NVML take the `pynvml` module, so that tests can pass a scripted one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .base import Card, CardReading, Device, Finding, Health, Link, describe_shared_cards
from .torch_build import explain_unusable, read_torch_build

# Below this only the driver uses the card; a process with a CUDA context holds more.
_IDLE_BYTES = 64 * 2**20
_LOST, _NOT_SUPPORTED = 15, 3  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_NOT_SUPPORTED
# NVML_ERROR_INVALID_ARGUMENT, _NO_PERMISSION and _NOT_FOUND: what a name that shows no card to this user is answered
# with. A card that is there and does not work has others: lost, without power, an unknown error.
_NO_PERMISSION = 4
_NOT_SHOWN = (2, _NO_PERMISSION, 6)
_NO_LIBRARY = 12  # NVML_ERROR_LIBRARY_NOT_FOUND
_NO_LIBCUDA = (
    "the driver's libcuda.so.1 is not there, though NVML is: no program can use the cards\n"
    "  in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install the driver's library for computing"
)
# From this compute capability on, cards compute in bf16; torch.cuda.is_bf16_supported: it is emulated on older ones.
_COMPUTES_BF16 = (8, 0)


class CudaDevice(Device):
    """NVIDIA's GPUs. The driver is asked through NVML."""

    def complete_environment(self, variables: Mapping[str, str], assigned: str | None) -> dict[str, str]:
        complete = super().complete_environment(variables, assigned)
        if assigned is not None:
            named = complete[VISIBLE]
            complete[VISIBLE] = uuids_to_indices(named)
            if complete[VISIBLE] != named:
                complete[_ORDER] = _NVML_ORDER  # the order that those indices count in
        return complete

    def read_cards(self) -> CardReading:
        seen = read_nvml(os.environ.get(VISIBLE))
        order = explain_order(os.environ.get(_ORDER), os.environ.get(VISIBLE))
        return replace(seen, unusable=seen.unusable or explain_unusable(seen, read_torch_build()) or order)

    def find_numa_nodes(self) -> tuple[int | None, ...]:
        return _read_each_card(os.environ.get(VISIBLE), None, find_numa_node) or ()

    def find_memory_nodes(self) -> frozenset[int]:
        nodes = _read_each_card(None, None, lambda api, card: _query(api, "nvmlDeviceGetNumaNodeId", card)) or ()
        return frozenset(node for node in nodes if node is not None)

    def read_used_bytes(self) -> tuple[int, ...] | None:
        return read_used_bytes(os.environ.get(VISIBLE))

    def examine(self, ranks: int) -> Health:
        return examine_cards(os.environ.get(VISIBLE), ranks)

    def find_throttled(self) -> tuple[str, ...]:
        findings = _read_each_card(os.environ.get(VISIBLE), None, find_throttling) or ()
        return tuple(str(finding) for finding in findings if finding is not None)

    def find_fork_hazard(self) -> str | None:
        """Return why this process must not be forked; NVML is shut down, which has to be before a fork."""
        shut_nvml_down()
        torch = sys.modules.get("torch")
        if (torch is not None and torch.cuda.is_initialized()) or is_cuda_initialized():
            return "CUDA was initialised while importing"
        return None

    def describe_cards(self, cards: Iterable[Card]) -> tuple[str, ...]:
        return describe_card_names(os.environ.get(VISIBLE))

    def judge_precision(self, precision: str, cards: Iterable[Card]) -> Finding | None:
        older = [card.name for card in cards if not card.bf16]
        if precision != "bf16" or not older:
            return None
        return Finding(text=f"{older[0]} only emulates bf16", remedy="--precision fp16, in which it computes by itself")


VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER, _NVML_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"

CUDA = CudaDevice(
    name="cuda",
    backend="nccl",
    has_cards=True,
    card_noun="CUDA GPU",
    ray_resource="GPU",
    shares_host_memory=False,
    has_caching_allocator=True,
    # torch 2.9 and later read the second where the first is not set.
    allocator_variables=("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    constants="cuda",
    meter="autods.rank.memory:CudaMeter",
    # NVML of driver 580 starts one, and a process forked from it uses CUDA and NCCL as any other (H200, torch 2.11).
    driver_threads=r"cuda[0-9a-f]{11}",
    # Neither torch nor DeepSpeed may initialise CUDA before the fork. DeepSpeed counts the cards to find its
    # accelerator, and torch cannot count a MIG slice without CUDA. Older releases of DeepSpeed ask the card for its
    # capability, too.
    variables={"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "DS_ACCELERATOR": "cuda", "DS_IGNORE_CUDA_DETECTION": "1"},
    default_variables={
        _ORDER: _NVML_ORDER,  # CUDA's default puts the fastest GPU first
        "NCCL_DEBUG": "WARN",  # else NCCL does not report why it failed, for example that memory ran out
    },
    visible_variable=VISIBLE,
    reduced_bytes=256 * 2**20,  # nccl-tests: the bandwidth of NVLink levels out above 128 MiB
    cache_folders=(".cache", ".triton", ".nv"),
    hang_advice="where it waits for the GPU, look for NCCL's reason with NCCL_DEBUG=INFO",
)


def read_nvml(visible: str | None, nvml: Any = None) -> CardReading:
    """Return the cards that CUDA_VISIBLE_DEVICES (`visible`) shows, in its order; None shows all.

    As in CUDA, the first unknown name ends the list, and a process gets one MIG slice: the named one, else the first.
    Without a driver there are no cards and no problem.
    """
    with _open(nvml) as (api, problem):
        if api is None:
            return CardReading(unusable=problem)
        try:
            cards = tuple(_read_card(api, handle) for handle in _visible_handles(api, visible))
        except api.NVMLError as error:
            return CardReading(unusable=_explain_nvml(error))
        version: int | None = None
        try:
            version = api.nvmlSystemGetCudaDriverVersion_v2()  # 13020
        except api.NVMLError as error:
            if cards and error.value == _NO_LIBRARY:
                problem = _NO_LIBCUDA
        return CardReading(
            cards=cards,
            unusable=problem,
            driver=_text(_query(api, "nvmlSystemGetDriverVersion")),
            cuda=None if version is None else f"{int(version) // 1000}.{int(version) % 1000 // 10}",
        )


def uuids_to_indices(visible: str, nvml: Any = None) -> str:
    """Return CUDA_VISIBLE_DEVICES with numbers in place of UUIDs; unchanged for MIG slices, which have no number.

    DeepSpeed 0.19.8 parses each name as a number when ZeRO-1 and ZeRO-2 ask for the card's free memory.
    """
    if not any(name.strip().startswith("GPU-") for name in visible.split(",")):
        return visible
    cards = read_nvml(visible, nvml).cards
    if not cards or any(card.slice for card in cards):
        return visible
    return ",".join(str(card.index) for card in cards)


def describe_card_names(visible: str | None, nvml: Any = None) -> tuple[str, ...]:
    """Return warnings about names in CUDA_VISIBLE_DEVICES that DeepSpeed cannot read."""
    visible = visible or ""
    if any(name.strip().startswith("MIG-") for name in visible.split(",")):
        return ("CUDA_VISIBLE_DEVICES names a MIG slice, which DeepSpeed's ZeRO-1 and -2 cannot read: they will fail",)
    numbers = uuids_to_indices(visible, nvml)
    if numbers == visible:
        return ()
    return (
        f"CUDA_VISIBLE_DEVICES names cards by UUID, which DeepSpeed's ZeRO-1 and -2 cannot read: trials run with "
        f"CUDA_VISIBLE_DEVICES={numbers} CUDA_DEVICE_ORDER=PCI_BUS_ID; set both for your own runs as well",
    )


def explain_order(order: str | None, visible: str | None, nvml: Any = None) -> str | None:
    """Return why cards cannot be told apart by their numbers, with what helps; None where they can.

    CUDA numbers them in the `order` of CUDA_DEVICE_ORDER, and NVML in that of the PCI bus.
    """
    has_numbers = visible is None or any(name.strip().isdigit() for name in visible.split(","))
    if order != "FASTEST_FIRST" or not has_numbers or len({card.name for card in read_nvml(None, nvml).cards}) < 2:
        return None
    return (
        f"{_ORDER}={order} numbers cards that differ in another order than the driver does\n"
        f"  set {_ORDER}={_NVML_ORDER}, or name them by UUID: {VISIBLE}, with the UUIDs of nvidia-smi -L"
    )


def find_numa_node(api: Any, handle: Any, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node to which the card is attached; None where the kernel does not tell, and for a MIG slice."""
    address = _text(getattr(_query(api, "nvmlDeviceGetPciInfo", handle), "busId", None)) or ""
    with contextlib.suppress(OSError, ValueError):  # NVML has '00000000:3B:00.0', the kernel '0000:3b:00.0'
        node = int((devices / address.lower()[-12:] / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def read_used_bytes(visible: str | None, nvml: Any = None) -> tuple[int, ...] | None:
    """Return the used bytes of each card that CUDA shows, by all processes; None where NVML fails."""
    return _read_each_card(visible, nvml, lambda api, card: _memory(api, card)[2])


def read_process_bytes(visible: str | None, pid: int, nvml: Any = None) -> tuple[int | None, ...] | None:
    """Return the bytes that a process holds on each card that CUDA shows; None where NVML does not tell.

    In a container NVML may list no processes, or pids of another namespace.
    """

    def read(api: Any, card: Any) -> int | None:
        processes = _query(api, "nvmlDeviceGetComputeRunningProcesses", card) or ()
        return next((process.usedGpuMemory for process in processes if process.pid == pid), None)

    return _read_each_card(visible, nvml, read)


# Bits of nvml.h, nvmlClocksEventReason…: the card is slower than its clocks and its power limit allow. Reaching the
# power limit itself (4) is usual under large matmuls.
_SLOWED = {0x20: "too hot", 0x40: "too hot, by hardware", 0x80: "power brake", 0x08: "hardware slowdown"}
_UNCORRECTED, _SINCE_LOADED = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
_CAPPED = 0.9  # of the power that the maker allows by default
_BUSY = 10  # percent; an idle card has 0
_BY_READ, _BY_NVLINK, _OK = 0, 2, 0  # NVML_P2P_CAPS_INDEX_READ and _NVLINK, NVML_P2P_STATUS_OK


def examine_cards(visible: str | None, ranks: int, nvml: Any = None) -> Health:
    """Return the health of the first `ranks` cards that CUDA shows, on which none of them runs yet.

    A card that is missing, or whose memory has errors that only a reset mends, is fatal: NVIDIA's "GPU Memory Error
    Management" asks for a reset where rows are to be remapped, and for another card where that failed.
    """
    with _open(nvml) as (api, _):
        if api is None:
            return Health()
        try:
            handles = list(_visible_handles(api, visible))[:ranks]
            cards = [_read_card(api, handle) for handle in handles]
            findings = [finding for handle in handles for finding in _examine_card(api, handle)]
        except api.NVMLError as error:
            return Health(findings=(Finding(text=f"a card is gone: {error}", remedy=_LOST_REMEDY, is_fatal=True),))
        if len(handles) < ranks:
            text = f"{ranks} ranks need a card each, and {len(handles)} are there"
            findings.append(Finding(text=text, remedy=_LOST_REMEDY, is_fatal=True))
        findings += (Finding(text=text, remedy="end them") for text in describe_shared_cards(cards))
        links = {
            (cards[first].index, cards[second].index): _find_link(api, handles[first], handles[second])
            for second in range(len(cards))
            for first in range(second)
            if not cards[first].slice
        }
        return Health(findings=tuple(findings), links=links)


_LOST_REMEDY = "see nvidia-smi, and dmesg | grep -i xid; then reset the card or restart the machine"


def _examine_card(api: Any, handle: Any) -> Iterator[Finding]:
    name = _name_card(api, handle)
    _, _, pending, failed = _query(api, "nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    if failed:
        text = f"{name}: rows of its memory are broken and could not be replaced"
        yield Finding(text=text, remedy="replace the card, or leave it out: CUDA_VISIBLE_DEVICES", is_fatal=True)
    elif pending or _query(api, "nvmlDeviceGetRetiredPagesPendingStatus", handle):
        text = f"{name}: broken memory is replaced at the next reset, and may fail until then"
        yield Finding(text=text, remedy=f"nvidia-smi --gpu-reset -i {api.nvmlDeviceGetIndex(handle)}", is_fatal=True)
    elif errors := _query(api, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_LOADED):
        text = f"{name}: {errors} errors of its memory could not be corrected since the driver was loaded"
        yield Finding(text=text, remedy="nvidia-smi -q -d ECC,ROW_REMAPPER shows them; a reset clears the count")
    if (throttled := find_throttling(api, handle)) is not None:
        yield throttled
    names = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit")
    limit, usual = (_query(api, each, handle) or 0 for each in names)  # milliwatts
    if 0 < limit < _CAPPED * usual:
        text = f"{name}: its power is limited to {limit // 1000} of {usual // 1000} W"
        yield Finding(text=text, remedy=f"nvidia-smi -i {api.nvmlDeviceGetIndex(handle)} -pl {usual // 1000}")
    width, most = (_query(api, f"nvmlDeviceGet{each}PcieLinkWidth", handle) or 0 for each in ("Curr", "Max"))
    if 0 < width < most:  # 0: not told, as in a MIG slice. The generation falls on an idle card, the width does not
        yield Finding(text=f"{name}: its PCIe link has {width} of {most} lanes", remedy="seat the card or riser anew")
    rates = _query(api, "nvmlDeviceGetUtilizationRates", handle)
    # NVML's manual: a card whose driver was just loaded scrubs its memory, and counts as busy. Without persistence
    # mode, our own question loads the driver of a card that nobody uses.
    is_just_loaded = _query(api, "nvmlDeviceGetPersistenceMode", handle) == 0 and _memory(api, handle)[2] < _IDLE_BYTES
    if rates is not None and rates.gpu >= _BUSY and not is_just_loaded:
        text = f"{name}: something else keeps it busy, {rates.gpu} % of the time"
        yield Finding(text=text, remedy="nvidia-smi pmon -c 1 shows what")


def find_throttling(api: Any, handle: Any) -> Finding | None:
    """Return a finding for a card that runs slower now than its limits allow; None for one that does not."""
    reasons = _query(api, "nvmlDeviceGetCurrentClocksEventReasons", handle)  # drivers before 535 have the old name
    reasons = _query(api, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) if reasons is None else reasons
    slowed = [reason for bit, reason in _SLOWED.items() if (reasons or 0) & bit]
    if not slowed:
        return None
    text = f"{_name_card(api, handle)} is throttled: {slowed[0]}"
    return Finding(text=text, remedy="see nvidia-smi -q -d PERFORMANCE, the fans and the power supply")


def _find_link(api: Any, first: Any, second: Any) -> Link:
    if _query(api, "nvmlDeviceGetP2PStatus", first, second, _BY_NVLINK) == _OK:
        return "NVLink"
    # Where the driver does not tell, nothing is said about it.
    return "PCIe" if _query(api, "nvmlDeviceGetP2PStatus", first, second, _BY_READ) in (_OK, None) else "host memory"


def _name_card(api: Any, handle: Any) -> str:
    return f"card {api.nvmlDeviceGetIndex(handle)} ({_text(api.nvmlDeviceGetName(handle))})"


def _read_each_card(visible: str | None, nvml: Any, read: Callable[[Any, Any], Any]) -> tuple[Any, ...] | None:
    """Return `read(NVML, handle)` of each card that CUDA shows; None where NVML fails."""
    with _open(nvml) as (api, _):
        if api is None:
            return None
        try:
            return tuple(read(api, handle) for handle in _visible_handles(api, visible))
        except api.NVMLError:
            return None


@contextlib.contextmanager
def _open(nvml: Any) -> Iterator[tuple[Any, str | None]]:
    """Yield NVML, or None with the problem, if there is one."""
    if nvml is None:
        nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        absent = ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")
        known = [getattr(nvml, name, None) for name in absent]
        value = getattr(error, "value", None)
        yield None, None if value is None or value in known else _explain_nvml(error)
        return
    try:
        yield nvml, None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _visible_handles(api: Any, visible: str | None) -> Iterator[Any]:
    """Return handles as CUDA enumerates them: one MIG slice at most, and an unnamed one only without whole cards.

    A card that is named twice hides all.

    Source: NVIDIA's MIG user guide, "CUDA device enumeration".
    """
    names = map(str, range(api.nvmlDeviceGetCount())) if visible is None else visible.split(",")
    whole: dict[int, Any] = {}
    slices: list[Any] = []
    for name in (part.strip() for part in names):
        try:
            handle = api.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else _find_by_uuid(api, name)
        except api.NVMLError as error:
            if error.value not in _NOT_SHOWN:
                raise
            if visible is None:  # NVML counts cards of others, too, where this user may not use them
                continue
            break
        if name.startswith("MIG-"):
            return iter([handle])
        if (_query(api, "nvmlDeviceGetMigMode", handle) or [0])[0]:
            places = range(_query(api, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
            parts = (_query(api, "nvmlDeviceGetMigDeviceHandleByIndex", handle, place) for place in places)
            slices += [part for part in parts if part is not None]  # places may be empty
        elif (number := api.nvmlDeviceGetIndex(handle)) in whole:
            return iter(())
        else:
            whole[number] = handle
    return iter(whole.values() or slices[:1])


def _find_by_uuid(api: Any, name: str) -> Any:
    """Return the handle of a UUID, or of its beginning where no other card has the same, as CUDA takes it."""
    try:
        return api.nvmlDeviceGetHandleByUUID(name)
    except api.NVMLError:
        cards = [api.nvmlDeviceGetHandleByIndex(index) for index in range(api.nvmlDeviceGetCount())]
        named = [card for card in cards if (_text(api.nvmlDeviceGetUUID(card)) or "").startswith(name or "-")]
        if len(named) != 1:
            raise
        return named[0]


def _read_card(api: Any, handle: Any) -> Card:
    total, free, used = _memory(api, handle)
    uuid = _text(_query(api, "nvmlDeviceGetUUID", handle))
    # In a container NVML may list no processes, or pids of another namespace.
    lists = (_query(api, f"nvmlDeviceGet{kind}RunningProcesses", handle) for kind in ("Compute", "Graphics"))
    major_minor = _query(api, "nvmlDeviceGetCudaComputeCapability", handle)
    capability = None if major_minor is None else (int(major_minor[0]), int(major_minor[1]))
    pids = [int(process.pid) for processes in lists for process in processes or ()]
    return Card(
        index=api.nvmlDeviceGetIndex(handle),
        name=_text(api.nvmlDeviceGetName(handle)) or "",
        total_bytes=total,
        free_bytes=free,
        others_bytes=used if used >= _IDLE_BYTES else 0,
        pids=tuple(dict.fromkeys(pids)),
        uuid=uuid,
        slice=uuid is not None and uuid.startswith("MIG-"),
        bf16=(capability or _COMPUTES_BF16) >= _COMPUTES_BF16,
        capability=capability,
    )


def _memory(api: Any, handle: Any) -> tuple[int, int, int]:
    """Return total, free and used bytes as CUDA counts them.

    The first version of the NVML call adds the driver's reserve to total and used: 0.5 GiB of an 80 GiB card.
    """
    with contextlib.suppress(AttributeError, api.NVMLError):  # an old binding; a driver older than R510
        memory = api.nvmlDeviceGetMemoryInfo(handle, version=api.nvmlMemory_v2)
        return int(memory.total) - int(memory.reserved), int(memory.free), int(memory.used)
    memory = api.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.free), int(memory.total) - int(memory.free)


def _query(api: Any, name: str, *arguments: Any) -> Any:
    """Call a function of NVML; None where the binding, the driver or the card does not know it."""
    with contextlib.suppress(AttributeError, api.NVMLError):
        return getattr(api, name)(*arguments)
    return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _explain_nvml(error: Exception) -> str:
    value = getattr(error, "value", None)
    if value == _NOT_SUPPORTED:  # no other question that every card has to answer
        return (
            "NVML tells no memory size: the card shares the host's memory, as GB10 (DGX Spark) and Jetson do\n"
            "  autods does not support such cards; `autods plan` forecasts for others (--on)"
        )
    if value == _LOST:
        return f"NVML: {error}\n  {_LOST_REMEDY}; CUDA_VISIBLE_DEVICES leaves it out until then"
    return f"NVML: {error}\n  see what nvidia-smi says; after an update of the driver the machine has to be restarted"


_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_MOST_NVML_USERS = 64
FindLibrary = Callable[[str], Any]


def find_loaded_library(name: str) -> Any:
    """Return the shared library if this process has loaded it; else None."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def is_cuda_initialized(find: FindLibrary = find_loaded_library) -> bool:
    """Whether cuInit was called in this process. torch knows its calls only; other packages call it, too."""
    cuda = find("libcuda.so.1")
    return cuda is not None and cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def shut_nvml_down(find: FindLibrary = find_loaded_library) -> None:
    """Shut NVML down completely. DeepSpeed and torch open it when they are imported, and keep it open.

    A forked rank closes the descriptors that it inherits, and NVML would go on using their numbers. So NVML must not
    be open at the fork; the meter of a CUDA rank opens it again.
    """
    nvml = find("libnvidia-ml.so.1")
    if nvml is not None:
        for _ in range(_MOST_NVML_USERS):
            if nvml.nvmlShutdown() != 0:  # it was not open
                return
