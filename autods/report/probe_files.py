"""The two files of a probe: `probe.json` and `probe.csv`."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InputError
from .files import _replace
from .probe_result import PROBE, PROBE_CSV, ProbeReport, to_csv, to_dict


def write(report: ProbeReport, folder: Path) -> None:
    """Write both. Raises InputError naming the file when the folder cannot be written or the disk is full."""
    write_csv(report, folder / PROBE_CSV)
    _replace(folder / PROBE, to_dict(report))


def write_csv(report: ProbeReport, path: Path) -> None:
    """The table, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(to_csv(report), newline="")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InputError(f"cannot be written: {error.strerror}", where=str(path), mend="give another file") from None
