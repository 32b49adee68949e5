"""Files that a user names for results: checked before the work, and written whole, through links."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.files import OutputFile, check_outputs, exists_now, write_whole

PAGE = (b"<!doctype html",)


def page(path: Path | str, option: str = "--html") -> OutputFile:
    return OutputFile(option, path, PAGE)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def hard_link(folder: Path) -> None:
    (folder / "a").touch()
    os.link(folder / "a", folder / "b")


SAME: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "one name": (lambda folder: None, "x", "x"),
    "a dot": (lambda folder: None, "x", "./x"),
    "two dots": (lambda folder: (folder / "d").mkdir(), "x", "d/../x"),
    "a link": (lambda folder: (folder / "l").symlink_to("x"), "x", "l"),
    "a linked folder": (lambda folder: (folder / "l").symlink_to("."), "x", "l/x"),
    "a hard link": (hard_link, "a", "b"),
}


@pytest.mark.parametrize(("make", "first", "second"), SAME.values(), ids=list(SAME))
def test_two_outputs_that_are_one_file_are_refused(
    tmp_path: Path, make: Callable[[Path], object], first: str, second: str
) -> None:
    make(tmp_path)
    with pytest.raises(InputError, match="--timeline and --html are one file"):
        check_outputs([page(first), page(second, "--timeline")])


def test_an_output_among_the_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="are one file"):
        check_outputs([page("journal.jsonl")], [tmp_path / "journal.jsonl"])
    check_outputs([page("mine.html")], [tmp_path / "journal.jsonl"])


def test_the_file_that_is_printed_to_is_no_other_output(tmp_path: Path) -> None:
    files = "OutputFile('--html', 'x', (b'<',)), OutputFile('--csv', 'y', (b'<',))"
    code = f"from autods.files import *; check_outputs([{files}])"
    with open("x", "w") as file:
        ended = subprocess.run([sys.executable, "-c", code], stdout=file, stderr=subprocess.PIPE, text=True)
    assert "x: --html and standard output are one file" in ended.stderr


@pytest.mark.parametrize("text", ["import torch\n", "{}", '{"kind": "header"}\n', "<p>", "\0"])
@pytest.mark.parametrize("linked", [False, True])
def test_what_an_output_would_destroy_is_refused(tmp_path: Path, text: str, linked: bool) -> None:
    (tmp_path / "x").write_text(text)
    (tmp_path / "l").symlink_to("x")
    with pytest.raises(InputError, match="something else, which would be lost"):
        check_outputs([page("l" if linked else "x")])
    assert (tmp_path / "x").read_text() == text


@pytest.mark.parametrize("text", ["", "<!doctype html>", "<!DOCTYPE HTML>\n<p>"])
def test_an_earlier_page_is_written_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    check_outputs([page("x")])
    assert os.listdir(tmp_path) == ["x"]


PLACES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (lambda path: None, "gone/x.html", "No such file or directory\n  make its folder first: mkdir -p"),
    "a file as folder": (lambda path: path.touch(), "x/y.html", "cannot be written: Not a directory"),
    "a folder": (lambda path: path.mkdir(), "x", "cannot be written: is a folder"),
    "a new folder": (lambda path: None, "x/", "it is the name of a folder"),
    "a pipe": (os.mkfifo, "x", "is a pipe"),
    "a device": (lambda path: path.symlink_to("/dev/null"), "x", "is a device"),
    "a link to itself": (lambda path: path.symlink_to("x"), "x", "Too many levels of symbolic links"),
    "a link into no folder": (lambda path: path.symlink_to("gone/y"), "x", "make its folder first"),
    "standard output": (lambda path: None, "-", "standard output shows the result"),
    "nothing": (lambda path: None, "", "--html is empty"),
}


@pytest.mark.parametrize(("make", "name", "said"), PLACES.values(), ids=list(PLACES))
def test_a_place_that_takes_no_file_is_refused(
    tmp_path: Path, make: Callable[[Path], object], name: str, said: str
) -> None:
    make(tmp_path / "x")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(InputError) as refused:
        check_outputs([page(name)])
    assert said in str(refused.value)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_what_is_read_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch(mode=0o444)
    (tmp_path / "locked").mkdir(mode=0o555)
    for name in ("x", "locked/x"):
        with pytest.raises(InputError, match="cannot be written"):
            check_outputs([page(name)])


def test_a_read_only_file_system_is_the_machines_fault() -> None:
    with pytest.raises((EnvironmentBroken, InputError), match="cannot be written"):
        check_outputs([page("/sys/x.html")])


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "d").mkdir()
    if exists:
        (tmp_path / "d/x").write_text("<!doctype html>old")
        (tmp_path / "d/x").chmod(0o640)
    (tmp_path / "l").symlink_to("d/x")
    check_outputs([page("l")])
    write_whole(Path("l"), "<!doctype html>new")
    assert os.readlink("l") == "d/x"
    assert (tmp_path / "d/x").read_text() == "<!doctype html>new"
    assert os.listdir("d") == ["x"]
    assert not exists or (tmp_path / "d/x").stat().st_mode & 0o777 == 0o640


def test_the_longest_name_can_be_written() -> None:
    name = "x" * 255
    check_outputs([page(name)])
    write_whole(Path(name), "text")
    assert os.listdir() == [name]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "x").write_text("old")
    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(Path("x"), "new")
    assert os.listdir() == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_the_folder_of_a_missing_file_is_opened_before_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    original = os.open

    def note(path: str, flags: int, *more: int) -> int:
        opened.append(os.fspath(path))
        return original(path, flags, *more)

    monkeypatch.setattr(os, "open", note)
    assert not exists_now(tmp_path / "stop")
    assert opened == [str(tmp_path)]
    (tmp_path / "stop").write_bytes(b"")
    assert exists_now(str(tmp_path / "stop"))
    assert not exists_now(tmp_path / "no folder" / "stop")
    assert not exists_now("")
