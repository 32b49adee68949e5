"""Which errors of files, memory and processes are the machine's fault, and what is said of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken, InputError, describe_broken_machine, keep_alternatives, make_write_error

OUT = Path("/out/report.json")
CANNOT = "/out/report.json: cannot be written: "


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.ENOSPC, "free some space there"),
        (errno.EDQUOT, "free some of your quota"),
        (errno.EROFS, "mount it for writing"),
        (errno.EFBIG, "raise `ulimit -f`"),
        (errno.EIO, "see dmesg"),
    ],
    ids=errno.errorcode.get,
)
def test_a_full_or_broken_disk_is_the_machines_fault(number: int, mend: str) -> None:
    error = make_write_error(OUT, OSError(number, os.strerror(number)))
    assert isinstance(error, EnvironmentBroken)
    assert str(error).startswith(f"{CANNOT}{os.strerror(number)}\n  ")
    assert mend in str(error)
    assert "the same command goes on" in str(error)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG])
def test_a_path_that_was_chosen_badly_is_wrong_input(number: int) -> None:
    error = make_write_error(OUT, OSError(number, os.strerror(number)), hint="give another --out")
    assert isinstance(error, InputError)
    assert str(error) == f"{CANNOT}{os.strerror(number)}\n  give another --out"


NO_FOLDER = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")
MACHINES: dict[str, tuple[BaseException, str]] = {
    "a full disk": (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), "/tmp/x: No space left on device"),
    "open files": (OSError(errno.EMFILE, "Too many open files"), "Too many open files\n  raise `ulimit -n`"),
    "no temporary folder": (NO_FOLDER, "no folder for temporary files can be written\n  free some space in /tmp"),
    "memory": (MemoryError(), "this process has no memory left"),
    "threads": (RuntimeError("can't start new thread"), "no process or thread can be started\n  raise `ulimit -u`"),
    "a fork": (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no process or thread can be start"),
}  # fmt: skip


@pytest.mark.parametrize("case", MACHINES)
def test_what_the_machine_refuses_is_no_bug(case: str) -> None:
    error, text = MACHINES[case]
    assert (describe_broken_machine(error) or "").startswith(text)


@pytest.mark.parametrize("error", [RuntimeError("no"), FileNotFoundError(2, "No such file"), ValueError()], ids=repr)
def test_other_exceptions_are_not_the_machines_fault(error: BaseException) -> None:
    assert describe_broken_machine(error) is None


@pytest.mark.parametrize(
    ("hint", "kept"),
    [
        ("do this; measure it: autods fit", "do this"),
        ("measure it: autods fit", ""),
        ("do this, or that, or autods fit", "do this, or that"),
        ("autods fit, or do this", "do this"),
        ("", ""),
    ],
)
def test_the_alternatives_of_a_hint_are_kept_or_dropped(hint: str, kept: str) -> None:
    assert keep_alternatives(hint, lambda text: "autods fit" not in text) == kept
