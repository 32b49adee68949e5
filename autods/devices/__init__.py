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
    "read_cards",
]
