"""Faults provoked, and what they leave behind: the processes of a fit are found by their command line in /proc."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from autods.runner.runner import RayRunner
from autods.types import Knobs, Outcome, Trial
from tests.support.fits import TORCH_ADAM

FAULTY = Path(__file__).parents[1] / "integration" / "workloads" / "faulty.py"
PHASES = ("build", "init", "forward", "backward", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of a fault. gone_ms: from the fault to the end of the last rank and stray; left: should be empty."""

    outcome: Outcome | None
    gone_ms: float
    left: list[str]


@dataclass(slots=True)
class Scene:
    """A fit whose workload is a copy in a folder of its own, so that its processes can be told from all others."""

    out: Path
    path: Path
    processes: set[Process] = field(default_factory=set)
    driver: int = 0  # pid of the last one that was started
    sockets: dict[int, int] = field(default_factory=dict)  # inode → port, of the listening ones of ranks

    @classmethod
    def at(cls, folder: Path) -> Scene:
        return cls(folder / "out", Path(shutil.copy(FAULTY, folder / f"{folder.name}.py")))

    def choose(self, fault: str, phase: str, **more: int) -> None:
        """The fault of every trial from now on."""
        self.out.mkdir(exist_ok=True)
        (self.out / "struck.json").unlink(missing_ok=True)
        (self.out / "fault.json").write_text(json.dumps({"fault": fault, "phase": phase, **more}))

    def struck(self) -> dict:
        """What the rank noted when it met the fault; waits for it."""
        wait_for((self.out / "struck.json").exists, 150)
        note = json.loads((self.out / "struck.json").read_text())
        self.processes |= {Process(*one) for one in (*note["ranks"], *note["children"])}
        return note

    def family(self) -> set[int]:
        """The zygote and all that it and its ranks forked: they share its command line."""
        return {pid for pid in pids_of("autods.runner.zygote") if f'"{self.path}"' in command_of(pid)}

    def simulators(self) -> set[int]:
        """The prepared process of the forecast and its engines."""
        return {pid for pid in pids_of("autods.forecast.simulator.worker") if f'"{self.path}"' in command_of(pid)}

    def zygote(self) -> psutil.Process:
        family = self.family()
        return next(psutil.Process(pid) for pid in family if state_of(pid).parent not in family)

    def note_ranks(self) -> set[int]:
        """Pids of the ranks, remembered with the ports they listen on."""
        ranks = {child.pid for child in self.zygote().children()}
        self.processes |= {Process.now(pid) for pid in ranks}
        for pid in ranks:
            own = sockets_of(pid)
            self.sockets |= {inode: port for inode, port in listening().items() if inode in own}
        return ranks

    def left(self, *, zygote: bool) -> list[str]:
        """What should not be there now. zygote: whether one may live (with no child and no listening port)."""
        remaining = {one.pid for one in self.processes if one.remains()}
        left = [f"process {pid}" for pid in sorted(remaining)]
        family = self.family() - remaining
        if zygote and family:
            owner = self.zygote()
            left += [f"child {child.pid} of the zygote" for child in owner.children()]
            left += [f"child {child.pid} of the actor" for child in owner.parent().children() if child != owner]
            left += [f"port {link.laddr}" for link in owner.net_connections("inet") if link.status == "LISTEN"]
            family -= {owner.pid}
        left += [f"process {pid} of the fit" for pid in sorted(family)]
        left += [f"port {port}" for inode, port in listening().items() if inode in self.sockets]
        left += [f"/dev/shm/{name}" for name in shared_by({one.pid for one in self.processes})]
        left += [str(path) for path in (self.out / "logs").glob("*/scratch")]
        return left


@dataclass(frozen=True, slots=True)
class Process:
    """A process and when it began: its pid will be another's some day."""

    pid: int
    began: int  # ticks of the kernel's clock

    @classmethod
    def now(cls, pid: int) -> Process:
        """The one that has this pid."""
        return cls(pid, state_of(pid).began)

    def remains(self) -> bool:
        """Whether it lives, or is a zombie that someone else than init should have reaped."""
        state = state_of(self.pid)
        return state.began == self.began and (state.letter, state.parent) not in (("", 0), ("Z", 1))


def shared_by(pids: set[int]) -> list[str]:
    """Files in shared memory that bear the pid of one of these, as those of torch and OpenMP do. Others are others'."""
    names = {str(pid) for pid in pids}
    return sorted(name for name in os.listdir("/dev/shm") if names & set(re.findall(r"\d+", name)))


def listening() -> dict[int, int]:
    """Of all TCP sockets of this machine on which somebody listens: inode → port."""
    found = {}
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = (line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:])
            found |= {int(row[9]): int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return found


def sockets_of(pid: int) -> set[int]:
    """Inodes of the sockets that a process has open."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {int(link[8:-1]) for link in links if link.startswith("socket:[")}


def pids_of(module: str) -> set[int]:
    """Processes that run this module."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return {pid for pid in pids if module in command_of(pid)}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def a_trial(rung: str = "zero1") -> Trial:
    return Trial(rung=rung, knobs=Knobs(checkpointing=False, settings=TORCH_ADAM), purpose="walk")


def meet(runner: RayRunner, scene: Scene, fault: str, phase: str, *, rung: str = "zero1", **more: int) -> Seen:
    """Run a trial in which a rank meets the fault."""
    scene.choose(fault, phase, **more)
    outcome = runner.run(a_trial(rung), id=1).outcome
    gone_ms = 1000 * (runner.results[0].gone_at_s - scene.struck()["at_s"])
    return Seen(outcome=outcome, gone_ms=gone_ms, left=scene.left(zygote=True))


def kill_during(
    runner: RayRunner, scene: Scene, phase: str, victim: Callable[[psutil.Process], psutil.Process]
) -> tuple[Seen, BaseException | None]:
    """SIGKILL to the zygote, or to what `victim` makes of it, while the ranks are in that phase: one in which they wait
    for the one that hangs, for else the node may be told of another."""
    scene.choose("hang", phase)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, a_trial(), id=1)
        scene.struck()
        wait_for(lambda: phase_of(runner) == phase, 60)
        ranks = scene.note_ranks()
        process = victim(scene.zygote())
        began = time.monotonic()
        process.kill()
        gone_ms = 1000 * (wait_gone(ranks, 60) - began)
        error = running.exception(60)
    outcome = None if error else running.result().outcome
    return Seen(outcome=outcome, gone_ms=gone_ms, left=[] if error else scene.left(zygote=True)), error


def phase_of(runner: RayRunner) -> str:
    """What its node knows of the slowest rank."""
    agent = runner.workers.nodes[0].agent
    return runner.workers.ray.get(agent.progress.remote()).phase


def start_fit(scene: Scene, *more: str, forecast: bool = False) -> subprocess.Popen[bytes]:
    """`autods fit` in a session of its own; what it says goes to `said.txt` in the fit's folder."""
    scene.out.mkdir(exist_ok=True)
    asked = ["--device", "cpu", "--gpus", "2", "--gpu-memory", "1GiB", "--config", "quick", "--out", str(scene.out)]
    asked += [] if forecast else ["--no-forecast"]
    with open(scene.out / "said.txt", "wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "autods", "fit", str(scene.path), *asked, *more],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )


def end_fit(scene: Scene, phase: str, number: signal.Signals, *, group: bool = False) -> tuple[int, Seen]:
    """Start a fit, send it the signal while its ranks are in that phase; its exit code, and what was seen.

    group: to all of its process group, as a terminal's Ctrl-C is.
    """
    scene.choose("hang", phase)
    driver = start_fit(scene)
    scene.driver = driver.pid
    try:
        scene.struck()
        ranks = scene.note_ranks()
        processes = {Process.now(one.pid) for one in psutil.Process(driver.pid).children(recursive=True)}
        began = time.monotonic()
        (os.killpg if group else os.kill)(driver.pid, number)
        gone_ms = 1000 * (wait_gone(ranks, 60) - began)
        code = driver.wait(60)
    finally:
        driver.kill()
        driver.wait()
    scene.processes |= processes  # Ray's too
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not scene.left(zygote=False), 60)
    return code, Seen(outcome=None, gone_ms=gone_ms, left=scene.left(zygote=False))


def wait_gone(pids: Iterable[int], limit_s: float) -> float:
    """When (monotonic) the last of them had ended: a zombie has."""
    waiting = set(pids)
    wait_for(lambda: not {pid for pid in waiting if lives(pid)}, limit_s)
    return time.monotonic()


def lives(pid: int) -> bool:
    """Whether it still runs: a zombie does not."""
    return state_of(pid).letter not in ("", "Z", "X")


class State(NamedTuple):
    """Of a process: as `ps` shows it, its parent, when it began. ("", 0, -1) when it is gone."""

    letter: str
    parent: int
    began: int


def state_of(pid: int) -> State:
    """Read from /proc."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return State("", 0, -1)
    return State(said[0], int(said[1]), int(said[19]))


def wait_for(what: Callable[[], object], limit_s: float) -> None:
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(0.002)
