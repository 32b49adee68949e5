"""What a simulation has read: modules, what Python opens, and what is mapped."""

from __future__ import annotations

import builtins
import io
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autods.forecast.simulate.files_read import FilesRead, read_stamp


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.json"
    path.write_text("{}")
    return path


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FilesRead:
    """One that has listened since before the test."""
    for module in (builtins, io, os):
        monkeypatch.setattr(module, "open", module.open)  # put back at the end
    listening = FilesRead(str(tmp_path / "scratch"))
    listening.listen()
    return listening


def _open_by_name(data: Path) -> None:
    with open(data):
        pass


READS: dict[str, Callable[[Path], object]] = {
    "open": _open_by_name,
    "pathlib": lambda data: data.read_text(),
    "os.open": lambda data: os.close(os.open(data, os.O_RDONLY)),
    "keywords": lambda data: open(mode="rb", file=bytes(data)).close(),
    "json": lambda data: json.loads(data.read_bytes()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_python_opens_is_read(files: FilesRead, data: Path, read: Callable[[Path], object]) -> None:
    read(data)
    assert files.collect()[str(data)] == read_stamp(str(data))
    assert str(data) not in files.collect()


def test_a_relative_path_counts_where_it_was_opened(
    files: FilesRead, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    _open_by_name(Path("data.json"))
    monkeypatch.chdir("/")
    assert str(data) in files.collect()


def test_a_missing_file_was_looked_for(files: FilesRead, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _open_by_name(tmp_path / "settings.json")
    assert files.collect()[str(tmp_path / "settings.json")] is None


def test_what_is_written_and_the_simulators_own_files_do_not_count(files: FilesRead, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    for path in (tmp_path / "log", tmp_path / "scratch" / "config.json"):
        path.write_text("")
    (tmp_path / "scratch" / "config.json").read_text()
    os.close(os.open(tmp_path / "log", os.O_RDWR))
    assert not [path for path in files.collect() if path.startswith(str(tmp_path))]


def test_modules_and_mapped_files_count(tmp_path: Path, data: Path) -> None:
    descriptor = os.open(data, os.O_RDONLY)
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ):
        os.close(descriptor)
        collected = FilesRead(str(tmp_path / "scratch")).collect()
    assert {str(data), os.__file__, __file__} <= collected.keys()


def test_an_open_is_called_as_it_was(files: FilesRead, data: Path) -> None:
    calls: list[Any] = []
    files._open(lambda *args, **kwargs: calls.append((args, kwargs)), data, "r", 1, encoding="utf-8")
    files._os_open(lambda *args, **kwargs: calls.append((args, kwargs)), path="x", flags=0, dir_fd=None)
    assert calls == [((data, "r", 1), {"encoding": "utf-8"}), ((), {"path": "x", "flags": 0, "dir_fd": None})]
