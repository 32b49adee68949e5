"""What a simulation has read: modules, what Python opens, and what is mapped."""

from __future__ import annotations

import builtins
import bz2
import importlib.metadata
import importlib.util
import inspect
import io
import json
import mmap
import os
import pickle
import runpy
import sqlite3
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from autods.forecast.simulate import files_read
from autods.forecast.simulate.files_read import FilesRead, read_change_ns, read_stamp


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.json"
    path.write_text("12")
    return path


@pytest.fixture
def files(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FilesRead]:
    """One that has listened since before the test."""
    modules = [module for name, module in sys.modules.items() if name not in ("posix", files_read.__name__)]
    replaced = (builtins.open, os.open, os.mkdir, os.stat, os.access, os.listdir, os.scandir)
    for module in modules:  # put back at the end
        for name, value in tuple(getattr(module, "__dict__", {}).items()):
            if any(value is function for function in replaced):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    listening = FilesRead(str(tmp_path / "scratch"))
    listening.listen()
    yield listening
    monkeypatch.undo()


def _add(path: Path, text: str = "") -> None:
    """Write as another process does: what this one makes itself is no input."""
    with open(path, "a") as opened:
        opened.write(text)


def _open_by_name(data: Path) -> None:
    with open(data):
        pass


def _import_by_path(source: Path) -> None:
    spec = importlib.util.spec_from_file_location("hidden", source)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _open_below(data: Path) -> None:
    folder = os.open(data.parent, os.O_RDONLY)
    os.close(os.open(data.name, os.O_RDONLY, dir_fd=folder))
    os.close(folder)


READS: dict[str, Callable[[Path], object]] = {
    "open": _open_by_name,
    "pathlib": lambda data: data.read_text(),
    "os.open": lambda data: os.close(os.open(data, os.O_RDONLY)),
    "keywords": lambda data: open(mode="rb", file=bytes(data)).close(),
    "json": lambda data: json.loads(data.read_bytes()),
    "in a folder": _open_below,
    "numpy": lambda data: numpy.loadtxt(data),
    "bz2": lambda data: bz2.open(data).close(),
    "tokenize": lambda data: tokenize.open(data).close(),
    "runpy": lambda data: runpy.run_path(str(data)),
    "sqlite": lambda data: sqlite3.connect(data).close(),
    "exists": lambda data: data.exists(),
    "size": lambda data: os.path.getsize(data),
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


def test_a_module_counts_that_is_in_no_list_of_modules(files: FilesRead, tmp_path: Path) -> None:
    _add(source := tmp_path / "hidden.py", "LAYERS = 2")
    for _ in range(2):  # then by its bytecode
        _import_by_path(source)
    collected = files.collect()
    assert collected[str(source)] == read_stamp(str(source))
    assert not [path for path in collected if path.endswith(".pyc")]


def test_a_module_that_was_not_found_may_come(
    files: FilesRead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("autods_test_optional") is None
    looked_for = {path: stamp for path, stamp in files.collect().items() if path.startswith(f"{tmp_path}/autods_test")}
    assert set(looked_for.values()) == {None}
    _add(tmp_path / "autods_test_optional.py")
    assert [path for path in looked_for if read_stamp(path) is not None] == [f"{tmp_path}/autods_test_optional.py"]


LISTS: dict[str, Callable[[Path], object]] = {
    "listdir": lambda folder: os.listdir(folder),  # the one that is wrapped
    "glob": lambda folder: list(folder.glob("*.json")),
    "walk": lambda folder: list(os.walk(folder)),
    "iterdir": lambda folder: list(folder.iterdir()),
}


@pytest.mark.parametrize("list_names", LISTS.values(), ids=LISTS)
def test_a_listed_folder_counts_by_its_names(
    files: FilesRead, data: Path, list_names: Callable[[Path], object]
) -> None:
    list_names(data.parent)
    listed = f"{data.parent}/"
    stamp = files.collect()[listed]
    _add(data, "other content")
    assert read_stamp(listed) == stamp
    _add(data.with_name("more.json"))
    assert read_stamp(listed) != stamp


def test_a_result_beside_the_model_is_no_installed_package(files: FilesRead, tmp_path: Path) -> None:
    list(importlib.metadata.distributions(path=[str(tmp_path)]))
    collected = files.collect()
    stamp = collected[f"{tmp_path}/*-info"]
    assert f"{tmp_path}/" not in collected
    _add(tmp_path / "plan.html")
    assert read_stamp(f"{tmp_path}/*-info") == stamp
    (tmp_path / "apex-1.dist-info").mkdir()
    assert read_stamp(f"{tmp_path}/*-info") != stamp


def test_a_file_counts_as_it_was_before_it_was_read(files: FilesRead, data: Path) -> None:
    before = read_stamp(str(data))
    _open_by_name(data)
    _add(data, "changed since")
    assert files.collect()[str(data)] == before


def test_what_a_process_makes_itself_is_no_input(files: FilesRead, tmp_path: Path) -> None:
    made = Path(tempfile.mkdtemp(dir=tmp_path))
    for path in (made / "shards", tmp_path / "log"):
        path.write_text("1")
        path.read_text()
    with tempfile.NamedTemporaryFile(dir=tmp_path) as temporary:
        Path(temporary.name).read_bytes()
    assert not [path for path in files.collect() if path.startswith(f"{tmp_path}/")]


def test_a_replaced_file_with_the_same_size_and_time_is_another(data: Path) -> None:
    stamp, state = read_stamp(str(data)), data.stat()
    (other := data.with_name("other")).write_text("34")
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.replace(data)
    assert read_stamp(str(data)) != stamp
    assert read_change_ns(read_stamp(str(data))) >= state.st_ctime_ns


def test_a_module_in_an_archive_counts_by_the_archive(tmp_path: Path) -> None:
    (archive := tmp_path / "modules.zip").write_bytes(b"PK")
    assert read_stamp(str(archive / "module.py")) == read_stamp(str(archive)) is not None


def test_an_open_file_counts(tmp_path: Path, data: Path) -> None:
    with open(data), open(tmp_path / "log", "a") as log:
        collected = FilesRead(str(tmp_path / "scratch")).collect()
    assert str(data) in collected
    assert log.name not in collected


def test_libraries_see_the_functions_that_they_know(files: FilesRead) -> None:
    assert pickle.loads(pickle.dumps(open)) is open is io.open
    assert os.open in os.supports_dir_fd
    assert {os.scandir, os.listdir} <= os.supports_fd
    assert str(inspect.signature(open)).startswith("(file, mode='r'")
    with pytest.raises(TypeError, match="mode"):
        open("x", 3)  # type: ignore[call-overload]


def test_a_missing_file_was_looked_for(files: FilesRead, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _open_by_name(tmp_path / "settings.json")
    assert files.collect()[str(tmp_path / "settings.json")] is None


def test_what_is_written_and_the_simulators_own_files_do_not_count(files: FilesRead, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    for path in (tmp_path / "log", tmp_path / "scratch" / "config.json"):
        _add(path)
    (tmp_path / "scratch" / "config.json").read_text()
    os.close(os.open(tmp_path / "log", os.O_RDWR))
    assert not [path for path in files.collect() if path.startswith(str(tmp_path))]


def test_an_ignored_file_does_not_count(data: Path, tmp_path: Path) -> None:
    with open(data):
        assert str(data) not in FilesRead(str(tmp_path / "scratch"), str(data)).collect()


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
