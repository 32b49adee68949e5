"""A script finds what it wrote, and the user's files stay as they are.

Each piece of a script runs in a process of its own: the functions of `os` and `open` stay replaced.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import textwrap

import pytest

FRAME = """
import os, shutil, pathlib, tempfile, json
from pathlib import Path
from autods.rank.script.overlay import Overlay
short = {short!r}
overlay = Overlay(Path({root!r}), ({free!r}, short))
overlay.install()
os.chdir({folder!r})
{body}
"""


@pytest.fixture
def run(tmp_path):
    """Run a piece of a script in a folder of files, which must be unchanged afterwards."""
    folder = tmp_path / "users"
    (folder / "old").mkdir(parents=True)
    (folder / "data.txt").write_text("one\n")
    (folder / "old" / "best.pt").write_text("weights")

    short = tempfile.mkdtemp()  # for sockets

    def run(body: str) -> None:
        before = contents(folder)
        root, free = tmp_path / "written", tmp_path / "free"
        free.mkdir()
        text = FRAME.format(root=str(root), free=str(free), short=short, folder=str(folder), body=textwrap.dedent(body))
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert contents(folder) == before

    yield run
    shutil.rmtree(short)


def contents(folder):
    files = sorted(folder.rglob("*"))
    return [(str(file), file.read_bytes() if file.is_file() else None, file.stat().st_mtime_ns) for file in files]


def test_a_written_file_is_read_back_and_not_on_the_disk(run):
    run("""
        open("new.txt", "w").write("mine")
        assert open("new.txt").read() == "mine"
        assert os.path.exists("new.txt") and "new.txt" in os.listdir(".") and Path("new.txt").is_file()
        assert {entry.name for entry in os.scandir(".")} == {"new.txt", "data.txt", "old"}
    """)


def test_files_that_are_only_read_are_found(run):
    run("""
        assert open("data.txt").read() == "one\\n"
        assert Path("old/best.pt").read_text() == "weights"
        assert sorted(os.listdir()) == ["data.txt", "old"]
    """)


def test_appending_keeps_the_content_of_the_file(run):
    run("""
        with open("data.txt", "a") as file:
            file.write("two\\n")
        assert Path("data.txt").read_text() == "one\\ntwo\\n"
    """)


def test_folders_can_be_made_filled_and_removed(run):
    run("""
        os.makedirs("out/logs")
        os.makedirs("out/logs", exist_ok=True)
        Path("out/logs/a.json").write_text(json.dumps([1]))
        Path("out/b").mkdir()
        assert sorted(os.listdir("out")) == ["b", "logs"]
        assert [files for _, _, files in os.walk("out/logs")] == [["a.json"]]
        shutil.rmtree("out")
        assert not os.path.exists("out")
    """)


def test_existing_and_missing_folders_raise_as_usual(run):
    run("""
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


def test_an_exclusive_file_is_made_once_and_not_on_the_disk(run):
    run("""
        os.close(os.open("lock", os.O_CREAT | os.O_EXCL))
        for make in (lambda: open("lock", "x"), lambda: os.open("lock", os.O_CREAT | os.O_EXCL)):
            try:
                make()
            except FileExistsError:
                continue
            raise SystemExit("made again")
    """)


def test_clearing_an_old_output_folder_removes_nothing(run):
    run("""
        shutil.rmtree("old", ignore_errors=True)
        os.makedirs("old", exist_ok=True)
        os.remove("data.txt")
        Path("old/best.pt").unlink()
    """)


def test_a_temporary_file_can_be_moved_to_its_name(run):
    run("""
        Path("state.tmp").write_text("1")
        os.replace("state.tmp", "state.json")
        Path("state.tmp").write_text("2")
        os.rename("state.tmp", "state.json")
        assert Path("state.json").read_text() == "2" and not os.path.exists("state.tmp")
        os.replace("data.txt", "old/data.txt")
        assert Path("old/data.txt").read_text() == "one\\n"
    """)


def test_a_free_folder_is_written_on_the_disk(run, tmp_path):
    run(f"Path({str(tmp_path / 'free' / 'a.txt')!r}).write_text('a')")
    assert (tmp_path / "free" / "a.txt").read_text() == "a"


def test_copies_and_temporary_files_work(run):
    run("""
        shutil.copy("data.txt", "copy.txt")
        shutil.copytree("old", "older")
        assert Path("copy.txt").read_text() == "one\\n" and Path("older/best.pt").exists()
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
            file.write("x")
        assert Path(file.name).read_text() == "x"
    """)


def test_a_file_of_another_rank_is_found(run):
    run("""
        if not os.fork():
            Path("prepared.bin").write_bytes(b"data")
            os._exit(0)
        os.wait()
        assert os.path.exists("prepared.bin") and Path("prepared.bin").read_bytes() == b"data"
    """)


def test_a_database_is_a_copy_of_the_script(run):
    run("""
    import sqlite3
    new = sqlite3.connect("runs.db")
    new.execute("create table t (x)"), new.execute("insert into t values (7)"), new.commit(), new.close()
    assert sqlite3.connect("runs.db").execute("select x from t").fetchall() == [(7,)]
    assert sqlite3.connect(":memory:").execute("select 1").fetchall() == [(1,)]
    """)


def test_other_ways_to_open_a_file_write_no_file_either(run):
    """The standard library has names of its own for `open`, and opens files by a class."""
    run("""
    import bz2, io, tarfile
    with tarfile.open("best.tar", "w") as tar:
        tar.add("data.txt")
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
    tarfile.open("best.tar").extract("data.txt", "old", **safely)
    assert Path("old/data.txt").read_text() == "one\\n"
    bz2.open("data.bz2", "wt").write("two")
    with io.FileIO("data.txt", mode="a") as raw:
        raw.write(b"three")
    assert io.FileIO("data.txt").read() == b"one\\nthree" and bz2.open("data.bz2", "rt").read() == "two"
    """)


def test_files_are_of_the_class_that_opens_them(run):
    run("""
    import io
    class Own(io.FileIO): pass
    raw = open("data.txt", "rb", buffering=0)
    assert isinstance(raw, io.FileIO) and isinstance(raw, io.RawIOBase) and not isinstance(raw, Own)
    assert isinstance(Own("data.txt"), io.FileIO) and isinstance(io.FileIO("data.txt"), io.RawIOBase)
    """)


def test_a_tokenizer_is_saved_and_not_on_the_disk(run):
    pytest.importorskip("tokenizers")
    run("""
    from tokenizers import Tokenizer, models
    os.makedirs("out")
    Tokenizer(models.BPE()).save("out/tokenizer.json"), Tokenizer(models.BPE()).save("tokenizer.json")
    assert json.loads(Path("out/tokenizer.json").read_text())["model"]["type"] == "BPE"
    """)


def test_a_folder_that_has_a_copy_can_be_entered(run):
    run("""
        here = os.getcwd()
        os.makedirs("made/inner")
        os.chdir("made")
        assert os.listdir(".") == ["inner"]
        os.chdir(here)
        assert open("data.txt").read() == "one\\n"
        assert os.listdir("made") == ["inner"]
    """)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_process_that_is_started_has_the_overlay(run, method):
    run(f"""
        import multiprocessing, subprocess, sys
        overlay.follow_children(Path(short, "python"))
        tempfile.tempdir = short
        os.mkdir("made")
        with multiprocessing.get_context({method!r}).Pool(1) as pool:
            assert pool.apply(os.listdir, ("made",)) == []
            pool.apply(shutil.copy, ("data.txt", "made/copy.txt"))
            assert pool.apply(Path.read_text, (Path("made/copy.txt"),)) == "one\\n"
        assert Path("made/copy.txt").read_text() == "one\\n"
        subprocess.run([sys.executable, "-c", "open('made/more.txt', 'w').write('two')"], check=True)
        assert Path("made/more.txt").read_text() == "two"
        seen = subprocess.run([sys.executable, "-c", "import sys; print(sys.path)"], stdout=-1, check=True).stdout
        assert os.fsencode(short) not in seen
    """)
