"""`autods doctor`: run all checks of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..events import Listener, Note
from ..report.results.doctor import Check, Checkup
from ..requests import DoctorRequest
from ..system.host import Hardware, cache_folder, read_hardware
from . import machine, toolchain
from .disk import check_nvme


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """What to check: `nvme_path` is measured, `ray` starts Ray, and `fix` builds the ops that are missing."""

    hardware: Hardware
    nvme_path: Path | None = None
    ray: bool = False
    fix: bool = False


def resolve_doctor(request: DoctorRequest) -> DoctorSettings:
    """Read this machine."""
    path = None if request.nvme_path is None else Path(request.nvme_path).absolute()
    return DoctorSettings(hardware=read_hardware(), nvme_path=path, ray=request.ray, fix=request.fix)


def examine(settings: DoctorSettings, listen: Listener) -> Checkup:
    """Run every check, in the order in which they are shown."""
    return Checkup(checks=tuple(_run_checks(settings, listen)))


def _run_checks(settings: DoctorSettings, listen: Listener) -> Iterator[Check]:
    hardware = settings.hardware
    yield from machine.check_cards(hardware)
    yield from toolchain.check_versions()
    yield from toolchain.check_compiler()
    if settings.ray:
        from ..runner.ray_connect import measure_start

        listen(Note(text="starting Ray, as a fit does"))
        yield from toolchain.check_ray(measure_start)
    listen(Note(text="asking DeepSpeed about its ops"))
    yield from toolchain.check_ops(
        has_cards=bool(hardware.cards), build=settings.fix, note=lambda text: listen(Note(text=text))
    )
    yield from machine.check_memory(hardware)
    yield from machine.check_limits()
    yield from machine.check_folders(
        {"results": Path("autods-out"), "temporary files": Path("/tmp"), "caches": cache_folder()}
    )
    if settings.nvme_path is not None:
        listen(Note(text=f"writing and reading a file in {settings.nvme_path}"))
        yield from check_nvme(settings.nvme_path)
    yield from machine.check_environment(os.environ)
    yield from machine.check_kernel()
