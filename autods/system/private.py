"""What other users of this machine cannot touch: files that are safe to execute, and folders that only we can enter."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import EnvironmentBroken, InputError


def find_danger(path: Path) -> str | None:
    """Return how another user can have written this file or folder; None where nobody but this user and root could.

    It and the folder that it is in have to belong to this user or to root, and nobody else may write to them. A folder
    such as /tmp, in which each user can change files of that user alone, is as good.
    """
    path = path.resolve()
    return _describe_danger(path, os.stat(path)) or _describe_danger(path.parent, os.stat(path.parent))


def _describe_danger(path: Path, state: os.stat_result) -> str | None:
    if state.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to uid {state.st_uid}"
    is_sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
    if state.st_mode & stat.S_IWOTH and not is_sticky:
        return f"every user may write to {path}"
    if state.st_mode & stat.S_IWGRP and not is_sticky and not _is_our_own_group(state.st_gid):
        return f"the group {state.st_gid} may write to {path}"
    return None


def _is_our_own_group(number: int) -> bool:
    """Whether this user alone is in the group, as where each user has a group of the same name and a umask of 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def read(path: Path) -> bytes:
    """Return the content of a file that is going to be executed or unpickled.

    Raises InputError where another user can have written it, or where it is no file; OSError where it cannot be read.
    """
    # Both are opened before they are checked, so that nobody can exchange them in between.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as opened:
            state = os.fstat(file)
            danger = _describe_danger(path, state) or _describe_danger(path.parent, os.fstat(folder))
            if danger is None and not stat.S_ISREG(state.st_mode):
                danger = f"{path} is no regular file"
            if danger is not None:
                raise make_error(danger)
            return opened.read()
    finally:
        os.close(folder)


def write(path: Path, data: bytes) -> None:
    """Write a file that is going to be executed or unpickled, into a folder that only this user can enter.

    The folder is made where it is missing. A file that is there is replaced, whoever wrote it. Raises InputError where
    another user can write to the folder, and OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (danger := _describe_danger(path.parent, os.stat(path.parent))) is not None:
        raise make_error(danger)
    file, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with open(file, "wb") as opened:
            opened.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def make_error(danger: str) -> InputError:
    """Return the error about a file that another user can have written, as `find_danger` describes it."""
    return InputError(
        f"{danger}, and its content would be executed",
        hint="remove it, or chmod go-w what is yours; or give another folder, to which nobody else may write",
    )


@contextlib.contextmanager
def writing_for_us_alone() -> Iterator[None]:
    """Let this process make files and folders that other users can neither read nor write, until the block ends."""
    former = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(former)


def make_folder(prefix: str, inside: str | None) -> Path:
    """Make a folder that only this user can enter, with a short path, such as for sockets; in /tmp without `inside`.

    Raises EnvironmentBroken.
    """
    base = inside or "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    except OSError as error:
        raise EnvironmentBroken(
            f"{base}: no folder can be made there ({error.strerror})\n  mend its space or its mode: chmod 1777 {base}"
        ) from None


@contextlib.contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Have this process and those that it starts meanwhile make their temporary files in that folder."""
    former = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = former[0]
        if former[1] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = former[1]


def is_private(state: os.stat_result) -> bool:
    """Whether a folder belongs to this user and is closed to all others."""
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
