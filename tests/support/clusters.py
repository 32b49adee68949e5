"""A Ray cluster of several raylets on this machine, all on loopback and in one folder, gone at the end.

It runs in a separate process, since the test may be in another cluster already: `python -m tests.support.clusters
FOLDER CPUS,CPUS,…` writes the address to FOLDER/address and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from autods.system.host import data_folder
from tests.support.watching import wait_for

QUIET = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",  # a second of a processor for each CPU
    "RAY_enable_metrics_collection": "0",
}


@contextlib.contextmanager
def cluster(*cpus: int) -> Iterator[str]:
    """Start a cluster of nodes with these numbers of CPUs; yield its address.

    Meanwhile its token is in the environment. One of the home folder may be open to others, and is refused.
    """
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with patch.dict(os.environ, token), _start_cluster(*cpus) as address:
        yield address


@contextlib.contextmanager
def _start_cluster(*cpus: int) -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="ac-", dir="/tmp"))  # short: Ray puts sockets below it
    with open(folder / "said.txt", "wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.clusters", str(folder), ",".join(map(str, cpus))],
            cwd=Path(__file__).parents[2],
            env={
                **os.environ,
                **QUIET,
                "RAY_TMPDIR": str(folder),
            },  # where Ray notes the address; in /tmp/ray it may not
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
        )
    try:
        address = folder / "address"
        wait_for(lambda: address.exists() or process.poll() is not None, 120)
        assert process.poll() is None, (folder / "said.txt").read_text()
        yield address.read_text()
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        shutil.rmtree(folder, ignore_errors=True)


def begin_fit(workload: Path, out: Path, *asked: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start `autods fit` on CPU ranks without a forecast; its output goes to `said.txt` in the fit's folder.

    inside: a prefix that runs it elsewhere, for example in a network namespace.
    """
    out.mkdir(parents=True, exist_ok=True)
    common = ("--device", "cpu", "--no-forecast", "--out", str(out))
    with open(out / "said.txt", "wb") as file:
        return subprocess.Popen(
            [*inside, sys.executable, "-m", "autods", "fit", str(workload), *common, *asked],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def short_config(folder: Path) -> str:
    """The quick config with one trial of growth, none of tuning, no certificate."""
    text = (data_folder("configs") / "quick.toml").read_text()
    shorter = {"most_trials = 3\n": "most_trials = 1\n", "\ntrials = 2\n": "\ntrials = 0\n"}
    for old, new in (shorter | {"most_trials = 4\n": "most_trials = 0\n"}).items():
        assert old in text
        text = text.replace(old, new)
    (folder / "short.toml").write_text(text)
    return str(folder / "short.toml")


def read_records(out: Path) -> list[dict[str, Any]]:
    """The journal's records of the finished trials, in their order."""
    lines = map(json.loads, (out / "journal.jsonl").read_text().splitlines())
    return [line["record"] for line in lines if line["kind"] == "finished"]


def read_outcomes(out: Path) -> list[dict[str, Any]]:
    """Outcomes of the finished trials, in their order."""
    return [record["outcome"] for record in read_records(out)]


def find_raylet(pid: int) -> psutil.Process:
    """The raylet of the node that this process belongs to."""
    return next(one for one in psutil.Process(pid).parents() if one.name() == "raylet")


def _hold(folder: Path, cpus: Sequence[int]) -> None:
    """Start the cluster, write its address, and stay until our standard input is closed."""
    from ray._private import node, services
    from ray.cluster_utils import Cluster

    common = {
        "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
        "include_log_monitor": False,
        "object_store_memory": 80 * 2**20,
    }
    services.get_node = _patient(services.get_node)
    node.Node.start_api_server = lambda self, **asked: None  # no test asks it, and its start takes seconds
    first, *others = cpus
    head = {"num_cpus": first, "temp_dir": str(folder / "ray"), "no_monitor": True, **common}
    ours = Cluster(initialize_head=True, head_node_args=head)
    for count in others:
        ours.add_node(num_cpus=count, **common)
    while len(_alive(ours)) < len(cpus):
        time.sleep(0.05)
    (folder / "address.tmp").write_text(ours.address)
    os.replace(folder / "address.tmp", folder / "address")
    sys.stdin.read()
    ours.shutdown()


def _patient(get_node: Callable[..., object]) -> Callable[..., object]:
    """Wait longer than Ray's 30 s for a raylet: a busy machine needs more."""

    def got(*asked: object) -> object:
        began = time.monotonic()
        while True:
            try:
                return get_node(*asked)
            except RuntimeError:
                if time.monotonic() - began > 100:
                    raise
                time.sleep(0.1)

    return got


def _alive(ours: object) -> list[object]:
    return [node for node in ours.global_state.node_table() if node["Alive"]]  # type: ignore[attr-defined]


if __name__ == "__main__":
    _hold(Path(sys.argv[1]), [int(part) for part in sys.argv[2].split(",")])
