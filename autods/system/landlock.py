"""Landlock: the kernel refuses the writes of this process, and of all that it starts, outside some folders.

No privilege is needed. The kernel's own page is Documentation/userspace-api/landlock.rst; glibc has no functions for
these calls. Landlock knows no rule for the mode, the owner and the times of a file: changing them stays possible. The
files that a process has open already stay open.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on x86-64, arm64, ppc64 and s390x
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
# Linux 5.19. Version 1 refuses every move of a file from one folder to another, also where writes are allowed: caches
# are filled by such moves.
_LEAST_VERSION = 2
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
# Each write with the first version that can refuse it (LANDLOCK_ACCESS_FS_* of linux/landlock.h).
_WRITES = {
    _WRITE_FILE: 1,
    1 << 4: 1,  # REMOVE_DIR
    1 << 5: 1,  # REMOVE_FILE
    1 << 6: 1,  # MAKE_CHAR
    1 << 7: 1,  # MAKE_DIR
    1 << 8: 1,  # MAKE_REG
    1 << 9: 1,  # MAKE_SOCK
    1 << 10: 1,  # MAKE_FIFO
    1 << 11: 1,  # MAKE_BLOCK
    1 << 12: 1,  # MAKE_SYM
    1 << 13: 2,  # REFER: link or move to another folder
    _TRUNCATE: 3,  # `truncate` by path; to open a file for writing is refused by every version
}


class _PathBeneath(ctypes.Structure):
    """`struct landlock_path_beneath_attr`: rights on a file, or on everything below a folder."""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def find_version() -> int:
    """Return the version of Landlock that this kernel offers; 0 where it has none, or a container forbids it."""
    return max(0, int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))))


def confine_writes(writable: Iterable[str]) -> bool:
    """Let the kernel refuse all writes of this thread but those to `writable`: files, and folders with all below them.

    It cannot be undone. Threads and processes that this thread starts from now on inherit it, and none of them gains
    privileges by a setuid program. Paths that do not exist are left out: nobody can make them later. Returns False,
    and changes nothing, where the kernel cannot do this.
    """
    version = find_version()
    if version < _LEAST_VERSION:
        return False
    rights = sum(right for right, since in _WRITES.items() if since <= version)
    handled = ctypes.c_uint64(rights)  # the first field of `struct landlock_ruleset_attr`; the kernel takes it alone
    size = ctypes.c_size_t(ctypes.sizeof(handled))
    ruleset = int(_LIBC.syscall(_CREATE_RULESET, ctypes.byref(handled), size, ctypes.c_uint32(0)))
    if ruleset < 0:
        return False
    try:
        return all(_allow(ruleset, path, rights) for path in writable) and _restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> bool:
    """Add a rule. Return False where the kernel refuses it for a path that exists."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        is_folder = stat.S_ISDIR(os.fstat(place).st_mode)
        rule = _PathBeneath(rights if is_folder else rights & (_WRITE_FILE | _TRUNCATE), place)
        return bool(_LIBC.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0)) == 0)
    finally:
        os.close(place)


def _restrict(ruleset: int) -> bool:
    none = ctypes.c_ulong(0)
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), none, none, none) != 0:  # what the next call asks for
        return False
    return bool(_LIBC.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)) == 0)
