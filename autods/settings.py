"""What the user asked: parsed and checked once, then trusted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .base_config import check_base_config, read_base_config
from .ds_config import get
from .errors import InputError
from .hardware import Hardware
from .ladder import Rung, all_rungs, choose
from .profile import GrowLimits as GrowLimits
from .profile import Profile as Profile
from .profile import TimeLimits as TimeLimits
from .profile import TuneLimits as TuneLimits
from .profile import read_profile as read_profile
from .units import parse_bytes, show_bytes
from .values import Device, WorkloadSource

Precision = Literal["auto", "bf16", "fp16", "fp32"]


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
    base_config: str | Path | Mapping[str, Any] | None = None,
    config: str = "default",
    ladder: tuple[str, ...] = (),
    strategies: tuple[Path, ...] = (),
    nvme_path: str | Path | None = None,
    out: str | Path | None = None,
    seed: int = 0,
) -> Settings:
    """Check what was asked against what the machine has. Raises InputError, never adjusts silently."""
    profile = read_profile(config)
    rungs = choose(ladder or profile.ladder, all_rungs(strategies))
    base_config = source.base_config if base_config is None else base_config
    where = str(base_config) if isinstance(base_config, (str, Path)) else "base config"
    base = read_base_config(Path(base_config)) if isinstance(base_config, (str, Path)) else _plain(base_config, where)
    kind = _device(device, hardware)
    ranks = _ranks(gpus, kind, hardware)
    check_base_config(base, world_size=ranks, where=where)
    total = global_batch if global_batch is not None else _users_global_batch(base)
    _check_global_batch(total, ranks)
    asked = _bytes(gpu_memory)
    settings = Settings(
        source=source,
        gpus=ranks,
        device=kind,
        device_bytes=_device_bytes(asked, kind, ranks, hardware),
        device_bytes_asked=asked is not None or kind == "cpu",
        out=Path(),
        profile=profile,
        ladder=rungs,
        base=_with_precision(base, precision, where),
        global_batch=total,
        nvme_path=_nvme(nvme_path),
        seed=seed,
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
    if gpus < 1:
        raise InputError(f"--gpus {gpus}: at least one rank is needed", mend="give --gpus 1 or more")
    if device == "cuda" and gpus > len(hardware.cards):
        raise InputError(
            f"--gpus {gpus}: this machine shows {len(hardware.cards)} GPUs",
            mend=f"give --gpus {len(hardware.cards)} or fewer (CUDA_VISIBLE_DEVICES is honoured)",
        )
    return gpus


def _plain(base: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """A copy as JSON keeps it: what is tried is what `ds_config.json` will say."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(base or {})))
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be written as JSON: {error}", where=where) from None
    return copy


def _bytes(gpu_memory: str | int | None) -> int | None:
    if gpu_memory is None:
        return None
    try:
        return parse_bytes(str(gpu_memory))
    except ValueError as error:
        raise InputError(f"--gpu-memory {error}") from None


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


def _users_global_batch(base: Mapping[str, Any]) -> int | None:
    total = base.get("train_batch_size")
    return total if isinstance(total, int) else None


def _check_global_batch(total: int | None, ranks: int) -> None:
    if total is not None and (total < 1 or total % ranks):
        near = max(ranks, total // ranks * ranks)
        raise InputError(
            f"--global-batch {total} cannot be split over {ranks} ranks: "
            "global batch = micro batch × accumulation × ranks",
            mend=f"give a multiple of {ranks}, such as {near} or {near + ranks}",
        )


def _with_precision(base: Mapping[str, Any], precision: str, where: str) -> dict[str, Any]:
    """The base config with a precision in it: the user's own, else the one asked for, else bf16."""
    if precision not in ("auto", "bf16", "fp16", "fp32"):
        raise InputError(f"there is no precision {precision!r}", mend="give --precision bf16, fp16 or fp32")
    users = next((key for key in ("bf16", "fp16") if get(base, f"{key}.enabled") is True), None)
    if precision == "auto":
        return dict(base) if users or "bf16" in base or "fp16" in base else {**base, "bf16": {"enabled": True}}
    if users and users != precision:
        raise InputError(
            f"--precision {precision}, but {users} is enabled there", where=where, mend="drop one of the two"
        )
    return dict(base) if users or precision == "fp32" else {**base, precision: {"enabled": True}}


def _nvme(path: str | Path | None) -> Path | None:
    if path is None:
        return None
    folder = Path(path).absolute()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError("is not a folder that can be written", where=f"--nvme-path {path}", mend="create it first")
    return folder
