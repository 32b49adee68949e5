"""What a command prints where the reader left, the disk is full, or nobody reads at the moment."""

from __future__ import annotations

import os
import threading
import time
from io import BufferedWriter, TextIOWrapper
from pathlib import Path

import pytest

from autods.cli.streams import Output, find_loss


def stream(place: int | str | Path) -> TextIOWrapper:
    return TextIOWrapper(BufferedWriter(Output(place, "w")), encoding="utf-8", write_through=True)


def test_what_can_be_written_is_written_whole(tmp_path: Path) -> None:
    with stream(tmp_path / "file") as output:
        print("é" * 100_000, file=output)
        assert find_loss(output) is None
    assert (tmp_path / "file").read_text(encoding="utf-8") == "é" * 100_000 + "\n"


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
