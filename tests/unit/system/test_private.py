"""Files that only we can have written, and folders that only we can enter."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.system import private

PREFIX = f"autods-test-{os.getpid()}-"
STRANGER = 2_000_000_001

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ours" / "file"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"content")
    path.chmod(0o600)
    return path


def test_our_own_file_in_our_own_folder_is_read(file: Path) -> None:
    assert private.find_danger(file) is None
    assert private.read(file) == b"content"


@pytest.mark.parametrize(("mode", "where"), [(0o602, "file"), (0o666, "file"), (0o777, "ours"), (0o703, "ours")])
def test_what_every_user_may_write_is_refused(file: Path, mode: int, where: str) -> None:
    place = file if where == "file" else file.parent
    place.chmod(mode)
    danger = f"every user may write to {place}"
    assert private.find_danger(file) == danger
    with pytest.raises(InputError, match=f"^{danger}, and its content would be executed\n  "):
        private.read(file)


@needs_root
@pytest.mark.parametrize("where", ["file", "ours"])
def test_what_belongs_to_another_user_is_refused(file: Path, where: str) -> None:
    place = file if where == "file" else file.parent
    os.chown(place, STRANGER, -1)
    with pytest.raises(InputError, match=f"^{place} belongs to uid {STRANGER}, and"):
        private.read(file)


@needs_root
def test_what_another_group_may_write_is_refused(file: Path) -> None:
    file.chmod(0o660)
    assert private.find_danger(file) is None  # root's own group
    os.chown(file, -1, STRANGER)
    assert private.find_danger(file) == f"the group {STRANGER} may write to {file}"


def test_a_file_of_ours_is_safe_below_a_sticky_folder(file: Path) -> None:
    file.parent.chmod(0o1777)
    assert private.read(file) == b"content"


def test_a_planted_link_or_fifo_is_not_read(file: Path) -> None:
    link, fifo = file.with_name("link"), file.with_name("fifo")
    link.symlink_to(file)
    os.mkfifo(fifo, 0o600)
    with pytest.raises(OSError, match="symbolic links"):
        private.read(link)
    with pytest.raises(InputError, match="is no regular file"):
        private.read(fifo)


def test_a_file_is_written_in_place_of_a_planted_one(file: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"untouched")
    file.unlink()
    file.symlink_to(tmp_path / "target")
    private.write(file, b"new")
    assert private.read(file) == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (tmp_path / "target").read_bytes() == b"untouched"
    assert os.listdir(file.parent) == ["file"]


def test_a_file_is_not_written_where_others_may_write(file: Path) -> None:
    file.parent.chmod(0o777)
    with pytest.raises(InputError, match=r"every user may write"):
        private.write(file, b"new")
    assert file.read_bytes() == b"content"


def test_a_private_folder_is_ours_alone(tmp_path: Path) -> None:
    folder = private.make_folder("ranks-", str(tmp_path))
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_machine_without_a_folder_for_sockets_is_broken(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match=r"missing: no folder can be made there"):
        private.make_folder("ranks-", str(tmp_path / "missing"))
