"""Which logs are read: names, packed ones, standard input, and what is no log."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import autods
from autods.cli.main import main
from autods.diagnosis.logs import find_logs
from autods.errors import InputError

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB\n"
)
BINARY = bytes(range(256)) * 64


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for folder, text in (("node0", "step 1\n"), ("node1", f"step 1\n[rank3]: {OOM}"), ("node2", "step 1\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.log").write_text(text)
    return tmp_path


def names(*paths: Path) -> list[str]:
    return [log.name for log in find_logs(paths)]


def test_logs_of_one_name_are_named_by_folder(nodes: Path) -> None:
    assert names(nodes / "node0", nodes / "node1") == ["node0/train.log", "node1/train.log"]
    assert names(nodes / "node0/train.log", nodes / "node2") == ["node0/train.log", "node2/train.log"]
    assert names(nodes / "node1/train.log") == ["train.log"]
    assert autods.diagnose([nodes / "node0", nodes / "node1"]).places == ("node1/train.log:2",)


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / run / "node0").mkdir(parents=True)
        (tmp_path / run / "node0" / "x.log").write_text("")
    assert names(tmp_path / "a/node0", tmp_path / "b/node0") == ["a/node0/x.log", "b/node0/x.log"]


def test_a_log_given_twice_is_read_once(nodes: Path) -> None:
    assert names(nodes, nodes / "node1", nodes / "node1/train.log") == [f"node{node}/train.log" for node in range(3)]


@pytest.mark.parametrize("content", [b"Killed\n", gzip.compress(b"Killed\n")], ids=["plain", "gzip"])
def test_standard_input_is_read_beside_other_logs(
    nodes: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"[rank5]: {OOM}".encode())))
    assert main(["diagnose", "-", str(nodes / "node0/train.log")]) == 0
    assert "standard input:1" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["diagnose", str(nodes / "node1/train.log"), "-"]) == 0
    assert "train.log:2" in capsys.readouterr().out


def test_packed_logs_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    noise = "".join(f"step {step}, loss 0.{step * 7919 % 997}\n" for step in range(2_000))
    packed = gzip.compress((OOM + noise).encode())
    (tmp_path / "x.log").write_bytes(packed)
    assert autods.diagnose(tmp_path / "x.log").tier == "device"
    (tmp_path / "x.log").write_bytes(gzip.compress(OOM.encode()) + packed[:40])
    cut = autods.diagnose(tmp_path / "x.log")
    assert cut.tier == "device"
    assert "is cut off: the first" in cut.notes[-1]
    (tmp_path / "x.log").write_bytes(packed[:6])
    with pytest.raises(InputError, match="is cut off, so nothing of this packed log"):
        autods.diagnose(tmp_path / "x.log")


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress])
def test_other_packings_are_refused_with_the_way(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "x.log").write_bytes(pack((OOM * 100).encode()))
    with pytest.raises(InputError, match="is not a text log") as error:
        autods.diagnose(tmp_path / "x.log")
    assert "unpack others into autods diagnose -" in str(error.value)


def test_packed_bytes_that_come_one_by_one_are_known(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with open(tmp_path / "pipe", "wb", buffering=0) as pipe:
            for byte in gzip.compress(OOM.encode()):
                pipe.write(bytes([byte]))

    writer = threading.Thread(target=write)
    writer.start()
    assert autods.diagnose(tmp_path / "pipe").tier == "device"
    writer.join()


def test_a_str_that_names_a_file_is_read(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = nodes / "node1/train.log"
    assert autods.diagnose(str(path)) == autods.diagnose(path)
    assert autods.diagnose(str(nodes)).places == ("node1/train.log:2",)
    monkeypatch.chdir(path.parent)
    assert autods.diagnose("train.log").tier == "device"


def test_a_str_of_log_text_stays_text() -> None:
    assert autods.diagnose(OOM.strip()).tier == "device"
    assert autods.diagnose("see /var/log/train.log").kind == "none"


@pytest.mark.parametrize("text", ["/gone/train.log", "train.log", "runs/slurm-7.out.gz"])
def test_a_str_like_a_path_without_its_file_is_refused(text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        autods.diagnose(text)


def test_a_binary_file_is_refused_alone_and_skipped_beside_others(nodes: Path) -> None:
    binary = nodes / "node1" / "model.bin"
    binary.write_bytes(BINARY)
    with pytest.raises(InputError, match="is not a text log"):
        autods.diagnose(binary)
    said = autods.diagnose(nodes / "node1")
    assert said.tier == "device"
    assert said.notes[-1] == "1 of 2 logs are no text and were skipped: model.bin"
    assert autods.diagnose(binary, 137).notes[-1] == "1 of 1 logs are no text and were skipped: model.bin"
