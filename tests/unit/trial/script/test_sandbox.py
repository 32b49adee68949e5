"""What a script writes is kept out of the user's folders, and the script finds it where it wrote it.

In a process of its own: the functions of `os` and `open` stay replaced.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

FRAME = """
import os, shutil, pathlib, tempfile, json
from pathlib import Path
from autods.trial.script.sandbox import Overlay
overlay = Overlay(Path({root!r}), ({free!r},))
overlay.install()
os.chdir({folder!r})
{body}
"""


@pytest.fixture
def play(tmp_path):
    """Run a piece of a script in a folder of files, which has to be the same afterwards."""
    folder = tmp_path / "users"
    (folder / "old").mkdir(parents=True)
    (folder / "data.txt").write_text("one\n")
    (folder / "old" / "best.pt").write_text("weights")

    def play(body: str) -> None:
        before = contents(folder)
        root, free = tmp_path / "written", tmp_path / "free"
        free.mkdir()
        text = FRAME.format(root=str(root), free=str(free), folder=str(folder), body=textwrap.dedent(body))
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert contents(folder) == before

    return play


def contents(folder):
    files = sorted(folder.rglob("*"))
    return [(str(one), one.read_bytes() if one.is_file() else None, one.stat().st_mtime_ns) for one in files]


def test_a_file_that_is_written_is_read_back_and_nowhere_on_the_disk(play):
    play("""
        open("new.txt", "w").write("mine")
        assert open("new.txt").read() == "mine"
        assert os.path.exists("new.txt") and "new.txt" in os.listdir(".") and Path("new.txt").is_file()
        assert {entry.name for entry in os.scandir(".")} == {"new.txt", "data.txt", "old"}
    """)


def test_what_is_only_read_is_found_where_it_is(play):
    play("""
        assert open("data.txt").read() == "one\\n"
        assert Path("old/best.pt").read_text() == "weights"
        assert sorted(os.listdir()) == ["data.txt", "old"]
    """)


def test_appending_goes_on_after_what_stands_there(play):
    play("""
        with open("data.txt", "a") as file:
            file.write("two\\n")
        assert Path("data.txt").read_text() == "one\\ntwo\\n"
    """)


def test_folders_are_made_filled_and_removed_again(play):
    play("""
        os.makedirs("out/logs")
        os.makedirs("out/logs", exist_ok=True)
        Path("out/logs/a.json").write_text(json.dumps([1]))
        Path("out/b").mkdir()
        assert sorted(os.listdir("out")) == ["b", "logs"]
        assert [files for _, _, files in os.walk("out/logs")] == [["a.json"]]
        shutil.rmtree("out")
        assert not os.path.exists("out")
    """)


def test_an_existing_folder_is_still_one_that_exists(play):
    play("""
        try:
            os.mkdir("old")
        except FileExistsError:
            pass
        else:
            raise SystemExit("made again")
        try:
            open("nowhere/a.txt", "w")
        except FileNotFoundError:
            pass
        else:
            raise SystemExit("there is no such folder")
    """)


def test_clearing_an_old_output_folder_removes_nothing(play):
    play("""
        shutil.rmtree("old", ignore_errors=True)
        os.makedirs("old", exist_ok=True)
        os.remove("data.txt")
        Path("old/best.pt").unlink()
    """)


def test_a_file_is_moved_to_its_name_as_careful_writers_do(play):
    play("""
        Path("state.tmp").write_text("1")
        os.replace("state.tmp", "state.json")
        Path("state.tmp").write_text("2")
        os.rename("state.tmp", "state.json")
        assert Path("state.json").read_text() == "2" and not os.path.exists("state.tmp")
        os.replace("data.txt", "old/data.txt")
        assert Path("old/data.txt").read_text() == "one\\n"
    """)


def test_a_free_folder_is_really_written(play, tmp_path):
    play(f"Path({str(tmp_path / 'free' / 'a.txt')!r}).write_text('a')")
    assert (tmp_path / "free" / "a.txt").read_text() == "a"


def test_a_copy_and_a_temporary_file_work(play):
    play("""
        shutil.copy("data.txt", "copy.txt")
        shutil.copytree("old", "older")
        assert Path("copy.txt").read_text() == "one\\n" and Path("older/best.pt").exists()
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
            file.write("x")
        assert Path(file.name).read_text() == "x"
    """)


def test_what_another_rank_wrote_is_there_as_well(play):
    play("""
        if not os.fork():
            Path("prepared.bin").write_bytes(b"data")
            os._exit(0)
        os.wait()
        assert os.path.exists("prepared.bin") and Path("prepared.bin").read_bytes() == b"data"
    """)


def test_a_database_is_the_scripts_own_copy(play):
    play("""
    import functools, sqlite3
    from autods.trial.script.sandbox import _database, _opening
    _opening("connect", functools.partial(_database, overlay), sqlite3)
    new = sqlite3.connect("runs.db")
    new.execute("create table t (x)"), new.execute("insert into t values (7)"), new.commit(), new.close()
    assert sqlite3.connect("runs.db").execute("select x from t").fetchall() == [(7,)]
    assert sqlite3.connect(":memory:").execute("select 1").fetchall() == [(1,)]
    """)
