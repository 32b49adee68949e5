"""What was asked against what the machine has. Each raises InputError, none adjusts silently."""

from __future__ import annotations

import os
from pathlib import Path

from .checks import check_ranks
from .errors import EnvironmentBroken, InputError
from .hardware import Hardware
from .units import show_bytes
from .values import Device

_OF_A_PROCESS = 2**30  # bytes of private memory that a rank holds before its trial begins, and some to spare


def device_of(device: str, hardware: Hardware) -> Device:
    """Where the ranks run. EnvironmentBroken for cards that cannot be used."""
    if device == "cpu":
        return "cpu"
    if device != "cuda":
        raise InputError(f"there is no device {device!r}", mend="give --device cuda or --device cpu")
    if hardware.unusable is not None:
        raise EnvironmentBroken(hardware.unusable)
    if not hardware.cards:
        raise InputError(
            "no CUDA GPU is visible on this machine",
            mend="use --device cpu --gpu-memory 2GiB to let CPU ranks with a memory budget stand in for GPUs",
        )
    return "cuda"


def check_nodes(nodes: int | None, address: str | None) -> int:
    """How many; several need a cluster."""
    if nodes is not None and nodes < 1:
        raise InputError(f"--nodes {nodes}: at least one node is needed")
    if nodes is not None and nodes > 1 and address is None:
        raise InputError(
            f"--nodes {nodes} needs a Ray cluster",
            mend="give --address auto or HOST:PORT, of `ray start --head`; `ray start --address HOST:PORT` adds nodes",
        )
    return nodes or 1


def ranks_of(gpus: int | None, device: Device, hardware: Hardware, nodes: int) -> int:
    """Of all nodes together; on CUDA all cards, if nothing was asked."""
    if gpus is None:
        if device == "cpu":
            raise InputError("--device cpu needs the number of ranks", mend="give --gpus 2, say")
        return len(hardware.cards) * nodes
    if check_ranks(gpus) % nodes:
        raise InputError(f"--gpus {gpus} are all ranks; they cannot be split evenly over {nodes} nodes")
    if gpus // nodes > len(hardware.cards) and device == "cuda":
        shown = f"this machine shows {len(hardware.cards)} GPUs"
        if nodes > 1:
            shown = (
                f"that is {gpus // nodes} on each of {nodes} nodes, and one of them shows {len(hardware.cards)} GPUs"
            )
        raise InputError(
            f"--gpus {gpus}: {shown}",
            mend=f"give --gpus {len(hardware.cards) * nodes} or fewer (CUDA_VISIBLE_DEVICES is honoured)",
        )
    return gpus


def device_bytes_of(asked: int | None, device: Device, ranks: int, hardware: Hardware) -> int:
    """The memory of a rank's device; on CPU ranks a fair share of what is free, if nothing was asked."""
    if device == "cuda":
        card = min(hardware.cards[:ranks], key=lambda one: one.usable_bytes)
        smallest = card.usable_bytes
        if asked is not None and asked > smallest:
            shared = f", of which other processes hold {show_bytes(card.others_bytes)}" if card.others_bytes else ""
            raise InputError(
                f"--gpu-memory {show_bytes(asked)}: the card has {show_bytes(card.total_bytes)}{shared}",
                mend=f"give {'what is left' if shared else 'its size'} or less; less emulates a smaller card",
            )
        return asked or smallest
    fair = int(hardware.host_free_bytes * 0.8 / ranks)
    if asked is not None and asked * ranks > hardware.host_bytes:
        raise InputError(
            f"{ranks} CPU ranks × {show_bytes(asked)} = {show_bytes(asked * ranks)}: "
            f"this machine has {show_bytes(hardware.host_bytes)}",
            mend=f"give --gpu-memory {fair // 2**20}MiB or less",
        )
    _check_process(asked or fair, hardware.process_bytes)
    return asked or fair


def _check_process(budget_bytes: int, process_bytes: int | None) -> None:
    """A CPU rank is a process: what one may hold bounds its budget."""
    if process_bytes is None or budget_bytes + _OF_A_PROCESS <= process_bytes:
        return
    less = process_bytes - _OF_A_PROCESS
    raise InputError(
        f"a CPU rank with {show_bytes(budget_bytes)} holds up to {show_bytes(_OF_A_PROCESS)} more of torch and"
        f" DeepSpeed, and `ulimit -Hd` lets a process hold {show_bytes(process_bytes)}",
        mend=f"give --gpu-memory {less // 2**20}MiB or less" if less > 0 else "raise it in a shell of root's",
    )


def nvme_folder(path: str | Path | None) -> Path | None:
    """A folder that can be written."""
    if path is None:
        return None
    folder = Path(path).absolute()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError("is not a folder that can be written", where=f"--nvme-path {path}", mend="create it first")
    return folder
