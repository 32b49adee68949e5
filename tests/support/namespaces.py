"""Nodes with different addresses and links that can be cut: network namespaces inside a new one.

`python -m tests.support.namespaces NODES CPUS COMMAND…` runs the command on the head of nodes that have IPv6 alone. It
replaces ADDRESS by the address of their Ray cluster, and ends with the command's exit code.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from tests.support.clusters import QUIET
from tests.support.watching import wait_for

HEAD = 1
_PORT = 6379


def why_no_namespaces() -> str | None:
    """Return why this machine does not let us make namespaces; None where it does."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip or unshare is not installed (apt-get install iproute2 util-linux)"
    tried = subprocess.run(
        in_new_namespace(["ip", "link", "add", "probe0", "type", "veth"]), capture_output=True, text=True
    )
    return None if tried.returncode == 0 else f"no network namespace can be made: {tried.stderr.strip()}"


def in_new_namespace(command: Sequence[str]) -> list[str]:
    """Wrap the command so that it runs in new network and mount namespaces, which end with it."""
    prepare = 'mkdir -p /run/netns && mount -t tmpfs none /run/netns && ip link set lo up && exec "$@"'
    return ["unshare", "--net", "--mount", "--", "sh", "-c", prepare, "sh", *command]


class Lab:
    """A Ray cluster of nodes on a bridge, the first one the head. A context manager; use it `in_new_namespace`."""

    def __init__(self, nodes: int, *, cpus: int, ipv6: bool = False) -> None:
        self.nodes, self.cpus = range(1, nodes + 1), cpus
        self.network, self.bits = ("fd00:77::", 64) if ipv6 else ("10.77.0.", 24)
        self.address = f"[{self.node_address(HEAD)}]:{_PORT}" if ipv6 else f"{self.node_address(HEAD)}:{_PORT}"
        self.folder = Path(tempfile.mkdtemp(prefix="ac-", dir="/tmp"))
        self.rays: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Lab:
        try:
            ip("link", "add", "br0", "type", "bridge")
            ip("link", "set", "br0", "up")
            for number in self.nodes:
                self._connect(number)
            for number in self.nodes:
                self._start(number)
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self.nodes:
            pids = subprocess.run(["ip", "netns", "pids", f"n{number}"], capture_output=True, text=True).stdout
            for pid in map(int, pids.split()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
        for ray in self.rays:
            ray.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def at(self, number: int) -> list[str]:
        """The prefix that runs a command on that node."""
        return ["ip", "netns", "exec", f"n{number}"]

    def node_address(self, number: int) -> str:
        return f"{self.network}{number}"

    def node_of(self, pid: int) -> int:
        """The node whose network this process is in."""
        own = os.stat(f"/proc/{pid}/ns/net").st_ino
        return next(number for number in self.nodes if os.stat(f"/run/netns/n{number}").st_ino == own)

    def cut(self, number: int) -> None:
        """Cut the link of that node without any notice."""
        ip("link", "set", f"v{number}", "down")

    def _connect(self, number: int) -> None:
        ip("netns", "add", f"n{number}")
        ip("link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", f"n{number}")
        ip("link", "set", f"v{number}", "master", "br0", "up")
        # An IPv6 address could be used only after a second of detection of duplicates.
        detection = ("nodad",) if self.bits == 64 else ()
        place = f"{self.node_address(number)}/{self.bits}"
        ip("-n", f"n{number}", "addr", "add", place, "dev", "eth0", *detection)
        for link in ("lo", "eth0"):
            ip("-n", f"n{number}", "link", "set", link, "up")

    def _start(self, number: int) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        place = ["--head", f"--port={_PORT}", f"--temp-dir={self.folder / 'ray'}"]
        place += ["--include-dashboard=false", "--no-monitor"]
        if number != HEAD:
            place = [f"--address={self.address}"]
        common = [f"--node-ip-address={self.node_address(number)}", f"--num-cpus={self.cpus}", "--block"]
        common += [f"--object-store-memory={80 * 2**20}", "--include-log-monitor=false"]
        with open(self.folder / f"n{number}.txt", "wb") as said:
            command = [*self.at(number), ray, "start", *place, *common]
            started = subprocess.Popen(
                command, env={**os.environ, **QUIET}, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        self.rays.append(started)
        # One after the other: they choose their sockets in one folder.
        said_at = self.folder / f"n{number}.txt"
        wait_for(lambda: "Ray runtime started" in said_at.read_text() or started.poll() is not None, 120)
        assert started.poll() is None, said_at.read_text()

    def _wait(self) -> None:
        """Wait until the head knows all nodes."""
        count = (
            "import time\n"
            "from autods.runner.placement import RayCluster\n"
            "from autods.runner.ray_connect import session\n"
            f"with session(cpus=1, address='{self.address}') as ray:\n"
            f"    while len(RayCluster(ray).nodes()) < {len(self.nodes)}: time.sleep(0.1)\n"
        )
        command = [*self.at(HEAD), sys.executable, "-c", count]
        subprocess.run(command, env={**os.environ, **QUIET}, check=True, timeout=120, stdout=subprocess.DEVNULL)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def main(nodes: str, cpus: str, *command: str) -> int:
    with Lab(int(nodes), cpus=int(cpus), ipv6=True) as lab:
        words = [word.replace("ADDRESS", lab.address) for word in command]
        return subprocess.run([*lab.at(HEAD), *words], env={**os.environ, **QUIET}, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
