"""The devices that ranks run on, by name. A further one is a module beside these and a row here."""

from __future__ import annotations

from ..errors import InputError
from .base import Card, CardReading, Device, Finding, Health, Link, describe_shared_cards
from .cpu import CPU
from .cuda import CUDA

DEVICES: dict[str, Device] = {device.name: device for device in (CUDA, CPU)}


def find_device(name: str) -> Device:
    """Return the device of this name. Raises InputError for another word."""
    if (device := DEVICES.get(name)) is None:
        options = " or ".join(f"--device {known}" for known in DEVICES)
        raise InputError(f"there is no device {name!r}", hint=f"give {options}")
    return device


def read_cards() -> CardReading:
    """Return the cards that this process sees: those of the first device that shows any, or that fails to."""
    readings = (device.read_cards() for device in DEVICES.values())
    return max(readings, key=lambda reading: (bool(reading.cards or reading.unusable), reading.driver is not None))


def find_memory_nodes() -> frozenset[int]:
    """Return the NUMA nodes that the kernel has made of the memory of this machine's cards, as on GH200 and GB200."""
    return frozenset[int]().union(*(device.find_memory_nodes() for device in DEVICES.values()))


__all__ = [
    "CPU",
    "CUDA",
    "DEVICES",
    "Card",
    "CardReading",
    "Device",
    "Finding",
    "Health",
    "Link",
    "describe_shared_cards",
    "find_device",
    "find_memory_nodes",
    "read_cards",
]
