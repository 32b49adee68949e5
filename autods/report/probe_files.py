"""The two files of a probe: `probe.json` and `probe.csv`."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InputError
from .files import as_json, write_whole
from .probe_result import PROBE, PROBE_CSV, ProbeReport, to_csv, to_dict


def write(report: ProbeReport, folder: Path) -> None:
    """Write both. Raises InputError naming the file when the folder cannot be written or the disk is full."""
    write_csv(report, folder / PROBE_CSV)
    write_whole(folder / PROBE, as_json(to_dict(report)))


def write_csv(report: ProbeReport, path: Path) -> None:
    """The table, whole or not at all. Raises InputError as `write`."""
    write_whole(path, to_csv(report))


def check_writable(path: Path) -> None:
    """Raises InputError now, and not after an hour of trials."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise _unwritable(path, "is a folder" if path.is_dir() else "its folder is read-only")


def _unwritable(path: Path, why: str | None) -> InputError:
    return InputError(f"cannot be written: {why}", where=str(path), mend="give another file")
