"""The documented lines for several nodes, typed on one machine; and what the cluster that they make refuses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from autods.errors import EnvironmentBroken
from autods.runner.cluster_check import check_cluster
from tests.support.clusters import QUIET

ROOT = Path(__file__).parents[2]
_RAY = {name: value for name, value in QUIET.items() if name != "RAY_AUTH_MODE"}
_SMALL = f"--object-store-memory={80 * 2**20}"


@dataclass(frozen=True)
class Nodes:
    """Two nodes on this machine. Each has a home folder of its own below `folder`, and the programs of `folder`/bin."""

    folder: Path
    port: int

    def type(self, node: str, lines: str) -> subprocess.CompletedProcess[str]:
        """Type documented lines in the shell of a node; the blocks for every node come first."""
        for old, new in {"HOST": "127.0.0.1", "6379": str(self.port), "/tmp/ray-$USER": f"{self.folder}/$NODE"}.items():
            lines = lines.replace(old, new)
        lines = lines.replace("ray start ", f"ray start --num-cpus=2 {_SMALL} ")
        return subprocess.run(
            ["bash", "-c", f"set -e\n{lines}"], env=self.environment(node), cwd=self.folder, capture_output=True,
            text=True, timeout=200, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def environment(self, node: str) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        programs = f"{self.folder}/bin:{Path(sys.executable).parent}:{env['PATH']}"
        env |= {"NODE": node, "HOME": f"{self.folder}/home-{node}", "PATH": programs, "PYTHONPATH": str(ROOT)}
        return env | _RAY | {"RAY_raylet_start_wait_time_s": "120"}

    def token(self, node: str) -> Path:
        return self.folder / f"home-{node}" / ".ray/auth_token"


def documented_blocks() -> dict[str, str]:
    """The commands of the page by their comment: 'On every node', 'On the first node', …"""
    page = (ROOT / "docs" / "nodes.md").read_text()
    blocks = page.split("```")[1].strip().split("\n\n")
    return {block.partition("\n")[0].lstrip("# "): block.partition("\n")[2] for block in blocks}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="ac-", dir="/tmp"))  # short: Ray puts sockets below it
    for name in ("bin", "home-first", "home-other"):
        (folder / name).mkdir(mode=0o700)
    # The two nodes are one machine: `ssh HOST COMMAND` runs the command in the home folder of the first.
    ssh = f'#!/bin/sh\nshift; cd {folder}/home-first && exec "$@"\n'
    autods = f'#!/bin/sh\nexec {sys.executable} -m autods "$@"\n'
    for name, text in {"ssh": ssh, "autods": autods}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    try:
        yield Nodes(folder, port)
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if any(f"{folder}/" in word for word in process.info["cmdline"] or []):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def typed(nodes: Nodes) -> Nodes:
    """The nodes after all documented lines but the fit were typed."""
    every, first, other, _ = documented_blocks().values()
    for node, lines in {"first": first, "other": other}.items():
        done = nodes.type(node, f"{every}\n{lines}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Ray runtime started" in done.stdout + done.stderr
    return nodes


def test_the_documented_lines_make_a_cluster_for_a_fit(typed: Nodes) -> None:
    """The fit asks for more CPUs than there are, and so ends when it has joined and seen both nodes."""
    every, *_, fit = documented_blocks().values()
    shutil.copy(ROOT / "tests/integration/workloads/tiny.py", typed.folder / "model.py")
    assert "fit model.py --gpus 8 --nodes 2 --address auto" in fit
    fit = fit.replace("--gpus 8", "--device cpu --gpu-memory 1MiB --no-forecast --gpus 9000")
    done = typed.type("first", every.partition("\n")[0] + "\n" + fit)
    assert done.returncode == 3, done.stderr
    assert "the ranks need 4500 CPUs on each of 2 nodes, and the Ray cluster has 2 nodes (CPUs: " in done.stderr


def test_the_documented_lines_close_what_they_make(typed: Nodes) -> None:
    for node in ("first", "other"):
        assert typed.token(node).stat().st_mode & 0o777 == 0o600
    assert (typed.folder / "first").stat().st_mode & 0o777 == 0o700


def test_a_cluster_that_does_not_let_us_in_is_one_error(
    typed: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = str(typed.token("first"))
    (tmp_path / "wrong").write_text("f" * 64)
    (tmp_path / "wrong").chmod(0o600)
    rows: Mapping[str, Mapping[str, str]] = {
        "wants a token, and there is none here": {},
        f"refuses the token of {tmp_path}/wrong": {"RAY_AUTH_TOKEN_PATH": f"{tmp_path}/wrong"},
        "refuses the token of RAY_AUTH_TOKEN": {"RAY_AUTH_TOKEN": "0" * 64},
        f"keeps that of {token} back": {"RAY_AUTH_TOKEN_PATH": token, "RAY_AUTH_MODE": "disabled"},
        "RAY_AUTH_MODE is token, and there is no token here": {"RAY_AUTH_MODE": "token"},
    }
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for words, variables in rows.items():
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(EnvironmentBroken) as refused:
                check_cluster("127.0.0.1", typed.port, "--address")
        assert words in str(refused.value)
        assert len(str(refused.value).splitlines()) == 2


def test_a_cluster_of_another_ray_is_one_error(typed: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last in this file: the cluster says from now on that it has another version."""
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(typed.token("first")))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    metadata = json.dumps({"ray_version": "2.9.0", "python_version": "3.10.1"})
    change = (
        "from ray._raylet import GcsClient\n"
        f"client = GcsClient(address='127.0.0.1:{typed.port}')\n"
        f"client.internal_kv_put(b'CLUSTER_METADATA', {metadata.encode()!r}, True, b'cluster')\n"
    )
    subprocess.run([sys.executable, "-c", change], check=True, env={**os.environ, "RAY_AUTH_MODE": "token"})
    with pytest.raises(EnvironmentBroken, match=r"Ray: 2\.9\.0 Python: 3\.10\.1 This process"):
        check_cluster("127.0.0.1", typed.port, "--address")
