"""A machine that need not be here, for a probe that only forecasts."""

from __future__ import annotations

from dataclasses import replace

from ..catalogue import ASKED, HERE, Machine, machines_named
from ..checks import size_of
from ..errors import InputError
from ..hardware import Card, Hardware

_NO_LIMIT = 2**62


def machine_asked(
    here: Hardware,
    *,
    device: str,
    gpu_memory: str | int | None,
    host_memory: str | int | None,
    on: str | None,
) -> Machine:
    """The machine that was named or described; else this one's cards. Raises InputError."""
    asked, host = size_of(gpu_memory, "--gpu-memory"), size_of(host_memory, "--host-memory")
    if on is not None:
        if asked is not None or device == "cpu":
            raise InputError(
                "--on names a card, so --gpu-memory and --device cpu say nothing", mend="drop one of the two"
            )
        named = machines_named(on)
        if len(named) > 1:
            raise InputError(
                "--on names several machines", mend="a probe forecasts for one; `autods plan` compares them"
            )
        return replace(named[0], host_bytes=host or named[0].host_bytes)
    if asked is not None:
        return Machine(name=ASKED, title="as asked", device_bytes=asked, host_bytes=host)
    if not here.cards or device == "cpu":
        raise InputError("say which device to forecast for", mend="give --gpu-memory 80GiB, or --on a100-80gb")
    smallest = min(card.total_bytes for card in here.cards)
    return Machine(
        name=HERE, title=here.cards[0].name, device_bytes=smallest, gpus=len(here.cards), host_bytes=here.host_bytes
    )


def hardware_of(machine: Machine, ranks: int, here: Hardware) -> Hardware:
    """The machine as `settings.resolve` looks at one: with as many cards as there are ranks."""
    cards = tuple(
        Card(index=index, name=machine.title, total_bytes=machine.device_bytes, free_bytes=machine.device_bytes)
        for index in range(ranks)
    )
    host = machine.host_bytes or _NO_LIMIT
    return replace(
        here, cards=cards, unusable=None, host_bytes=max(host, ranks * machine.device_bytes), host_free_bytes=host
    )
