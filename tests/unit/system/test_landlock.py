"""Under Landlock the kernel refuses writes outside the given folders, whoever makes them.

Each piece runs in a process of its own: it cannot get rid of Landlock again.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from autods.system import landlock

needs_landlock = pytest.mark.skipif(landlock.find_version() < 2, reason="this kernel has no Landlock of Linux 5.19")
FRAME = """
import ctypes, os, shutil, subprocess, threading
from autods.system import landlock
libc = ctypes.CDLL(None, use_errno=True)
os.chdir({folder!r})
assert landlock.confine_writes(["free", "device", "not there"])
{body}
"""


@pytest.fixture
def users(tmp_path: Path) -> Path:
    for name in ("free/inner", "mine"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("free/old", "mine/data", "device"):
        (tmp_path / name).write_text("precious")
    return tmp_path


def run(folder: Path, body: str) -> None:
    text = FRAME.format(folder=str(folder), body=textwrap.dedent(body))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_landlock
def test_writes_of_c_code_are_refused(users: Path) -> None:
    run(
        users,
        """
        assert libc.open(b"mine/data", os.O_WRONLY) == -1 and ctypes.get_errno() == 13
        assert libc.creat(b"mine/new", 0o644) == -1 and libc.creat(b"mine/data", 0o644) == -1
        assert libc.unlink(b"mine/data") == -1 and libc.rename(b"mine/data", b"free/data") == -1
        assert libc.mkdir(b"mine/folder", 0o755) == -1 and libc.symlink(b"data", b"mine/link") == -1
        if landlock.find_version() >= 3:
            assert libc.truncate(b"mine/data", ctypes.c_long(0)) == -1
    """,
    )
    assert [(path.name, path.read_text()) for path in (users / "mine").iterdir()] == [("data", "precious")]


@needs_landlock
def test_writes_of_threads_and_child_processes_are_refused(users: Path) -> None:
    run(
        users,
        """
        failed = []
        thread = threading.Thread(target=lambda: failed.append(libc.creat(b"mine/data", 0o644)))
        thread.start(), thread.join()
        assert failed == [-1]
        assert subprocess.run(["sh", "-c", "echo gone > mine/data; rm -f mine/data; touch mine/new"]).returncode
    """,
    )
    assert [(path.name, path.read_text()) for path in (users / "mine").iterdir()] == [("data", "precious")]


@needs_landlock
def test_free_files_and_folders_are_written_as_before(users: Path) -> None:
    run(
        users,
        """
        open("free/new", "w").write("1"), os.remove("free/old"), open("device", "w").write("used")
        os.mkdir("free/folder"), os.replace("free/new", "free/inner/moved"), shutil.rmtree("free/folder")
        os.truncate("free/inner/moved", 0)
        assert open("mine/data").read() == "precious"
        subprocess.run(["cp", "mine/data", "free/copy"], check=True)
    """,
    )
    assert (users / "free/inner/moved").read_text() == ""
    assert (users / "device").read_text() == "used"
    assert (users / "free/copy").read_text() == "precious"


def test_a_kernel_without_landlock_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version in (0, 1):
        monkeypatch.setattr(landlock, "find_version", lambda version=version: version)
        assert not landlock.confine_writes([])
    (tmp_path / "written").touch()
