"""What the user asked: parsed and checked once, then trusted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .checks import Given, base_of, check_ranks, global_batch_of, size_of, with_precision
from .checks import Precision as Precision
from .errors import InputError
from .hardware import Hardware
from .ladder import Rung, all_rungs, choose
from .profile import GrowLimits as GrowLimits
from .profile import Profile as Profile
from .profile import TimeLimits as TimeLimits
from .profile import TuneLimits as TuneLimits
from .profile import read_profile as read_profile
from .units import show_bytes
from .values import Device, WorkloadSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One fit, as asked and checked. `device_bytes` is the memory of one rank's device."""

    source: WorkloadSource
    gpus: int
    device: Device
    device_bytes: int
    device_bytes_asked: bool  # given by --gpu-memory, so it has to be enforced
    out: Path
    profile: Profile
    ladder: tuple[Rung, ...]
    base: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int | None = None
    nvme_path: Path | None = None
    seed: int = 0
    forecast: bool = True  # use one; trials prove what it says, so that the answer is the same without

    def fingerprint(self) -> str:
        """Equal for equal questions; a journal answers only the question it was made for."""
        said = {
            "workload": self.source.digest,
            "gpus": self.gpus,
            "device": self.device,
            "device_bytes": self.device_bytes if self.device_bytes_asked else "all",
            "base": self.base,
            "global_batch": self.global_batch,
            "nvme_path": str(self.nvme_path),
            "ladder": [repr(rung) for rung in self.ladder],
            "profile": repr(self.profile),
            "seed": self.seed,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def resolve(
    source: WorkloadSource,
    *,
    hardware: Hardware,
    gpus: int | None = None,
    device: str = "cuda",
    gpu_memory: str | int | None = None,
    global_batch: int | None = None,
    precision: str = "auto",
    base_config: Given = None,
    config: str = "default",
    ladder: tuple[str, ...] = (),
    strategies: tuple[Path, ...] = (),
    nvme_path: str | Path | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    forecast: bool = True,
) -> Settings:
    """Check what was asked against what the machine has. Raises InputError, never adjusts silently."""
    profile = read_profile(config)
    rungs = choose(ladder or profile.ladder, all_rungs(strategies))
    kind = _device(device, hardware)
    ranks = _ranks(gpus, kind, hardware)
    base, where = base_of(source.base_config if base_config is None else base_config, world_size=ranks)
    total = global_batch_of(global_batch, base, ranks)
    asked = size_of(gpu_memory, "--gpu-memory")
    settings = Settings(
        source=source,
        gpus=ranks,
        device=kind,
        device_bytes=_device_bytes(asked, kind, ranks, hardware),
        device_bytes_asked=asked is not None or kind == "cpu",
        out=Path(),
        profile=profile,
        ladder=rungs,
        base=with_precision(base, precision, where),
        global_batch=total,
        nvme_path=_nvme(nvme_path),
        seed=seed,
        forecast=forecast,
    )
    name = f"{source.name}-{ranks}x{kind}-{settings.fingerprint()[:6]}"
    return replace(settings, out=(Path(out) if out is not None else Path("autods-out") / name).absolute())


def _device(device: str, hardware: Hardware) -> Device:
    if device == "cpu":
        return "cpu"
    if device != "cuda":
        raise InputError(f"there is no device {device!r}", mend="give --device cuda or --device cpu")
    if not hardware.cards:
        raise InputError(
            "no CUDA GPU is visible on this machine",
            mend="use --device cpu --gpu-memory 2GiB to let CPU ranks with a memory budget stand in for GPUs",
        )
    return "cuda"


def _ranks(gpus: int | None, device: Device, hardware: Hardware) -> int:
    if gpus is None:
        if device == "cpu":
            raise InputError("--device cpu needs the number of ranks", mend="give --gpus 2, say")
        return len(hardware.cards)
    if check_ranks(gpus) > len(hardware.cards) and device == "cuda":
        raise InputError(
            f"--gpus {gpus}: this machine shows {len(hardware.cards)} GPUs",
            mend=f"give --gpus {len(hardware.cards)} or fewer (CUDA_VISIBLE_DEVICES is honoured)",
        )
    return gpus


def _device_bytes(asked: int | None, device: Device, ranks: int, hardware: Hardware) -> int:
    if device == "cuda":
        smallest = min(card.total_bytes for card in hardware.cards[:ranks])
        if asked is not None and asked > smallest:
            raise InputError(
                f"--gpu-memory {show_bytes(asked)}: the card has {show_bytes(smallest)}",
                mend="give its size or less; less emulates a smaller card",
            )
        return asked or smallest
    fair = int(hardware.host_free_bytes * 0.8 / ranks)
    if asked is not None and asked * ranks > hardware.host_bytes:
        raise InputError(
            f"{ranks} CPU ranks × {show_bytes(asked)} = {show_bytes(asked * ranks)}: "
            f"this machine has {show_bytes(hardware.host_bytes)}",
            mend=f"give --gpu-memory {fair // 2**20}MiB or less",
        )
    return asked or fair


def _nvme(path: str | Path | None) -> Path | None:
    if path is None:
        return None
    folder = Path(path).absolute()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError("is not a folder that can be written", where=f"--nvme-path {path}", mend="create it first")
    return folder
