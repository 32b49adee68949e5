"""What a process has after `prepare_process`, and what it prints where the reader left or the disk is full.

Each process is a Python that imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from io import BufferedWriter, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from autods.cli.startup import Output, find_loss

ROOT = Path(__file__).parents[3]
PROGRAM = f"""
import json, os, signal, sys, warnings
sys.path.insert(1, {str(ROOT)!r})
from autods.cli.startup import prepare_process
prepare_process()
warnings.warn("nothing", UserWarning)
child = os.spawnv(os.P_NOWAIT, "/bin/sh", ["sh", "-c", "exit 7"])
json.dump({{
    "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "child": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
    "umask": os.umask(0),
    "encoding": sys.getfilesystemencoding(),
    "optimize": sys.flags.optimize,
    "warnings": os.environ.get("PYTHONWARNINGS"),
    "open": [os.fstat(number).st_mode > 0 for number in (0, 1, 2)],
    "path": sys.path,
}}, open(sys.argv[1], "w"))
"""


def start(folder: Path, prepare: Callable[[], object] | None = None, **env: str) -> dict[str, Any]:
    """What the program finds, when it starts as `prepare` and the variables leave it."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "found.json"]
    subprocess.run(command, cwd=folder, preexec_fn=prepare, env={**os.environ, **env}, check=True, timeout=60)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_signals_of_the_caller_are_reset(tmp_path: Path) -> None:
    def prepare() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])

    found = start(tmp_path, prepare)
    assert (found["blocked"], found["child"]) == ([], 7)


def test_closed_descriptors_are_open_afterwards(tmp_path: Path) -> None:
    found = start(tmp_path, lambda: [os.close(number) for number in (0, 1, 2)])
    assert found["open"] == [True, True, True]


@pytest.mark.parametrize(("given", "kept"), [(0o777, 0o077), (0o027, 0o027), (0, 0)])
def test_files_stay_readable_for_their_owner(tmp_path: Path, given: int, kept: int) -> None:
    assert start(tmp_path, lambda: os.umask(given))["umask"] == kept


def test_python_begins_again_where_text_would_not_survive(tmp_path: Path) -> None:
    found = start(tmp_path, LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONOPTIMIZE="2")
    assert (found["encoding"], found["optimize"]) == ("utf-8", 0)


def test_warnings_are_no_errors_here_or_in_children(tmp_path: Path) -> None:
    assert (
        start(tmp_path, PYTHONWARNINGS="error,ignore::DeprecationWarning")["warnings"] == "ignore::DeprecationWarning"
    )


def test_the_current_folder_is_no_place_for_imports(tmp_path: Path) -> None:
    assert str(tmp_path) not in start(tmp_path)["path"]


def stream(place: int | str | Path) -> TextIOWrapper:
    return TextIOWrapper(BufferedWriter(Output(place, "w")), encoding="utf-8", write_through=True)


def test_what_can_be_written_is_written_whole(tmp_path: Path) -> None:
    with stream(tmp_path / "file") as output:
        print("é" * 100_000, file=output)
        assert find_loss(output) is None
    assert (tmp_path / "file").read_text(encoding="utf-8") == "é" * 100_000 + "\n"


def test_signs_stay_apart_where_the_output_is_ascii() -> None:
    code = "from autods.cli.startup import open_standard_streams as o; o(); print('✓ ✗ ≥3 4×2 λ')"
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True, timeout=60)
    assert output == "+ x >=3 4x2 ?\n"


def test_a_reader_that_left_is_no_loss() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with stream(writer) as output:
        for _ in range(3):
            print("a line", file=output)
        assert find_loss(output) is None
        assert os.readlink(f"/proc/self/fd/{writer}") == os.devnull  # for libraries in C and child processes


def test_a_terminal_that_was_closed_is_no_loss() -> None:
    terminal, writer = os.openpty()
    with stream(writer) as output:
        os.close(terminal)
        print("a line", file=output)
        assert find_loss(output) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_a_loss() -> None:
    with stream("/dev/full") as output:
        print("a line", file=output)
        assert find_loss(output) == "No space left on device"


def test_a_stream_of_another_kind_may_be_lost_too(tmp_path: Path) -> None:
    assert find_loss(None) is None
    with open(tmp_path / "file", "w") as file:
        assert find_loss(file) is None


def test_a_slow_reader_of_a_non_blocking_pipe_gets_all() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    read: list[bytes] = []

    def read_slowly() -> None:
        while part := os.read(reader, 20_000):
            read.append(part)
            time.sleep(0.01)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    with stream(writer) as output:
        print("x" * 200_000, file=output)  # more than a pipe holds
        assert find_loss(output) is None
    thread.join()
    os.close(reader)
    assert b"".join(read) == b"x" * 200_000 + b"\n"
