"""Limits of the shell, of the container and of a disk, under which Ray would not start, are named before it starts."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import threading
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken
from autods.system import limits
from autods.system.limits import LIMITS, check_limits, check_space, count_threads, find_lack

UNLIMITED = resource.RLIM_INFINITY


def allow(monkeypatch: pytest.MonkeyPatch, number: int, most: int) -> None:
    """Let the limit of this number be `most`, and all others be none, for a user who is not root."""
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (most if asked == number else UNLIMITED, UNLIMITED))
    monkeypatch.setattr(limits, "find_pids_left", lambda: None)
    monkeypatch.setattr(os, "getuid", lambda: 1000)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.flag)
def test_a_limit_that_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch, limit: limits.Limit) -> None:
    allow(monkeypatch, limit.number, limit.least - limit.unit)
    with pytest.raises(EnvironmentBroken) as broken:
        check_limits()
    shown = limit.least // limit.unit - 1
    assert str(broken.value).startswith(f"`ulimit {limit.flag}` is {shown}: Ray needs ")
    assert f"raise it: ulimit {limit.flag} " in str(broken.value)


def test_usual_limits_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "find_pids_left", lambda: limits.THREADS)
    usual = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_STACK: 8 * 2**20, resource.RLIMIT_NPROC: 10**6}
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (usual.get(asked, UNLIMITED), UNLIMITED))
    check_limits()


def test_root_has_no_limit_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, resource.RLIMIT_NPROC, 1)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    check_limits()


def test_a_container_with_too_few_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, -1, UNLIMITED)
    monkeypatch.setattr(limits, "find_pids_left", lambda: 7)
    with pytest.raises(EnvironmentBroken, match="may start 7 more threads: Ray needs 200\n  raise its pids limit"):
        check_limits()


def test_threads_of_this_user_are_counted() -> None:
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(20)]
    for thread in threads:
        thread.start()
    try:
        assert count_threads() > 20
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_a_disk_without_enough_room_says_how_much_is_needed(tmp_path: Path) -> None:
    check_space(tmp_path, 1, "a trial")
    with pytest.raises(
        EnvironmentBroken, match=r"the disk is full: a trial needs .* TiB, and .* are free\n  free some"
    ):
        check_space(tmp_path, 2**60, "a trial")
    with pytest.raises(Exception, match=r"gone: cannot be written: No such file"):
        check_space(tmp_path / "gone", 1, "a trial")


def test_room_is_reserved_for_a_moment_and_given_back(tmp_path: Path) -> None:
    assert find_lack(tmp_path, 2**24) is None
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_disk_has_is_a_lack(tmp_path: Path) -> None:
    assert str(find_lack(tmp_path, 2**50)).startswith("about 1024.0 TiB of disk are needed and ")


@pytest.mark.parametrize(
    ("number", "lack"),
    [
        (errno.EDQUOT, "about 1.0 MiB of disk are needed and cannot be reserved: Disk quota exceeded"),
        (errno.EOPNOTSUPP, None),
        (errno.EFBIG, None),
    ],
)
def test_a_quota_shows_where_room_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, lack: str | None
) -> None:
    """What statvfs calls free does not have the quota of a user."""

    class Library:
        def fallocate(self, *words: object) -> int:
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(limits, "_LIBC", Library())
    assert find_lack(tmp_path, 2**20) == lack
