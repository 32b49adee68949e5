"""Logs for diagnose: pipes, gzip that was cut off or is a bomb, large files, and what is no log at all."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import pytest

from autods.diagnosis import logs
from autods.errors import InputError
from tests.support.hostile import Case, each

OOM = "step 1\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15 GiB total)\n"
NOISE = "".join(f"step {step}, loss 0.{step * 7919 % 997}\n" for step in range(20_000))
PACKED = gzip.compress((NOISE + OOM + NOISE).encode())


def log(content: str | bytes, message: str, code: int = 0) -> Case:
    return Case("diagnose x.log", code, message, files={"x.log": content})


LOGS = {
    "a pipe": Case("autods diagnose <(cat x.log)", 0, "Out of device memory", "shell", files={"x.log": OOM}),
    "standard input": Case("autods diagnose -", 0, "Out of device memory", "shell", stdin=OOM),
    "standard input by its name": Case("autods diagnose /dev/stdin", 0, "Out of device memory", "shell", stdin=OOM),
    "gzip through a pipe": Case(
        "autods diagnose <(cat x.log)", 0, "Out of device memory", "shell", files={"x.log": gzip.compress(OOM.encode())}
    ),
    "zeros without end": Case("autods diagnose - < /dev/zero", 2, "is not a text log", "shell"),
    "noise without end": Case("autods diagnose <(cat /dev/urandom)", 2, "is not a text log", "shell"),
    "standard input that is closed": Case("autods diagnose - <&-", 2, "standard input is closed", "shell"),
    "/dev/zero": Case("diagnose /dev/zero", 2, "it is a device, not a log"),
    "/dev/null": Case("diagnose /dev/null", 0, "the log is empty"),
    "10 GiB of nothing": Case(
        "diagnose x.log", 2, "is not a text log", files={"x.log": lambda path: make_sparse(path, b"", 10 * 2**30, b"")}
    ),
    "a hole before the end": Case(
        "diagnose x.log",
        0,
        "Out of device memory",
        files={"x.log": lambda path: make_sparse(path, b"", 10 * 2**30, OOM.encode())},
    ),
    "UTF-16": log(OOM.encode("utf-16"), "Out of device memory"),
    "CRLF": log(OOM.replace("\n", "\r\n"), "Out of device memory"),
    "a mark of UTF-8": log("\ufeff" + OOM, "Out of device memory"),
    "NUL within": log(OOM.replace("step", "\0step\0"), "Out of device memory"),
    "letters of several encodings": log(
        "é".encode("latin-1") + OOM.encode() + "日本".encode("shift-jis"), "Out of device"
    ),
    "a program": log(bytes(range(256)) * 4, "is not a text log", 2),
    "gzip that was cut off": log(PACKED[: len(PACKED) * 3 // 4], "is cut off: the first"),
    "gzip that was cut off at its start": log(PACKED[:12], "is cut off, so nothing", 2),
    "gzip that is damaged": log(PACKED[:20] + b"\xff" * 200 + PACKED[220:], "is damaged", 2),
    "gzip of noise behind": log(gzip.compress(OOM.encode()) + b"no more gzip", "is damaged: the first"),
    "gzip of nothing": log(gzip.compress(b""), "the log is empty"),
    "a bomb of zeros": log(gzip.compress(bytes(2**26)), "is not a text log", 2),
    "one line of 20 MB": log("x" * 20_000_000 + "\n" + OOM, "Out of device memory"),
    "brackets of JSON": log('{"message": ' + "[" * 60_000 + "}\n" + OOM, "Out of device memory"),
    "a record of a rank that is a superscript": log('{"rank": "²", "level": "info", "message": "x"}\n' + OOM, "Out of"),
    "a rank of 3,900 digits": log(f"[rank{'9' * 3900}]: {OOM}", "Out of device memory"),
    "an exit code of 3,900 digits": log(f"exitcode: {'9' * 3900}\n{OOM}", ""),
    "a size of 3,900 digits": log(OOM.replace("2.00", "9" * 3900), "Out of device memory"),
    "a folder of pipes": Case("diagnose d", 2, "the folder has no files", files={"d/x": os.mkfifo}),
    "a folder with a link to itself": Case(
        "diagnose d", 0, "Out of device memory", files={"d/x.log": OOM, "d/again": lambda path: path.symlink_to(".")}
    ),
    "/proc": Case("diagnose /proc/self/task /proc/self/net", 2, "/proc/self"),
}


def make_sparse(path: Path, start: bytes, size: int, end: bytes) -> None:
    path.write_bytes(start)
    os.truncate(path, size)
    with path.open("ab") as file:
        file.write(end)


@each(LOGS)
def test_a_log_of_any_kind(meet, case):
    meet(case)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_silent_pipe_is_given_up(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    for name, seconds in (("SILENT_S", 0.05), ("AGAIN_S", 0.1), ("MOST_SILENT_S", 0.2)):
        monkeypatch.setattr(logs, name, seconds)
    found = logs.find_logs([pipe])[0]
    with pytest.raises(InputError, match="nothing came from this pipe"):
        list(logs.read_blocks(found, lines.append))
    assert lines[0].startswith(f"waiting for {pipe}: its other end has sent nothing")
    with open(pipe, "r+b", buffering=0) as writer:
        writer.write(b"step 1\n")
        with pytest.raises(InputError, match="nothing came from this pipe"):
            list(logs.read_blocks(found, lines.append))


def test_a_pipe_is_waited_for(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    heard = threading.Event()
    monkeypatch.setattr(logs, "SILENT_S", 0.01)

    def write() -> None:
        heard.wait(30)
        pipe.write_text(OOM)

    writer = threading.Thread(target=write)
    writer.start()

    def listen(line: str) -> None:
        lines.append(line)
        heard.set()

    found = logs.find_logs([pipe])[0]
    assert b"".join(logs.read_blocks(found, listen)) == OOM.encode()
    writer.join()
    assert lines


def test_a_log_that_vanishes_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(OOM)
    found = logs.find_logs([tmp_path / "x.log"])[0]
    (tmp_path / "x.log").unlink()
    with pytest.raises(InputError, match="No such file"):
        list(logs.read_blocks(found, lambda line: None))
