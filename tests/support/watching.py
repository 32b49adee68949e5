"""Provoke faults in a fit, and find what they leave behind: its processes are known by their command line in /proc."""

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
class FaultResult:
    """The result of a fault. gone_ms: until the last rank and its children had ended. left: expected empty."""

    outcome: Outcome | None
    gone_ms: float
    left: list[str]


@dataclass(slots=True)
class Scene:
    """A fit whose workload is a copy with a name of its own, so that its processes can be found."""

    out: Path
    path: Path
    processes: set[Process] = field(default_factory=set)
    driver: int = 0  # pid of the last one that was started
    sockets: dict[int, int] = field(default_factory=dict)  # inode → port, of the listening ones of ranks

    @classmethod
    def at(cls, folder: Path) -> Scene:
        return cls(folder / "out", Path(shutil.copy(FAULTY, folder / f"{folder.name}.py")))

    def choose_fault(self, fault: str, phase: str, **more: int) -> None:
        """Let every trial from now on meet this fault."""
        self.out.mkdir(exist_ok=True)
        (self.out / "struck.json").unlink(missing_ok=True)
        (self.out / "fault.json").write_text(json.dumps({"fault": fault, "phase": phase, **more}))

    def wait_for_fault(self) -> dict:
        """Wait until a rank meets the fault; return what it noted."""
        wait_for((self.out / "struck.json").exists, 150)
        note = json.loads((self.out / "struck.json").read_text())
        self.processes |= {Process(*one) for one in (*note["ranks"], *note["children"])}
        return note

    def family(self) -> set[int]:
        """Pids of the zygote, its ranks and their children: they share its command line."""
        return {pid for pid in find_pids("autods.runner.zygote") if f'"{self.path}"' in read_command(pid)}

    def simulators(self) -> set[int]:
        """Pids of the forecast's worker and its engines."""
        return {pid for pid in find_pids("autods.forecast.simulate.worker") if f'"{self.path}"' in read_command(pid)}

    def zygote(self) -> psutil.Process:
        family = self.family()
        return next(psutil.Process(pid) for pid in family if read_state(pid).parent not in family)

    def note_ranks(self) -> set[int]:
        """Return the pids of the ranks; remember them and their listening ports for `find_leftovers`."""
        ranks = {child.pid for child in self.zygote().children()}
        self.processes |= {Process.now(pid) for pid in ranks}
        for pid in ranks:
            own = find_sockets(pid)
            self.sockets |= {inode: port for inode, port in listening().items() if inode in own}
        return ranks

    def find_leftovers(self, *, zygote: bool) -> list[str]:
        """List what should be gone. zygote: whether one may be alive, without children and listening ports."""
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
        left += [f"/dev/shm/{name}" for name in find_shared_memory({one.pid for one in self.processes})]
        left += [str(path) for path in (self.out / "logs").glob("*/scratch")]
        return left


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified by its pid and its start: pids are used again."""

    pid: int
    began: int  # ticks of the kernel's clock

    @classmethod
    def now(cls, pid: int) -> Process:
        """The process that has this pid now."""
        return cls(pid, read_state(pid).began)

    def remains(self) -> bool:
        """Whether it is alive, or a zombie that its parent (other than init) should have reaped."""
        state = read_state(self.pid)
        return state.began == self.began and (state.letter, state.parent) not in (("", 0), ("Z", 1))


def find_shared_memory(pids: set[int]) -> list[str]:
    """Files in shared memory whose name has one of these pids, as those of torch and OpenMP do."""
    names = {str(pid) for pid in pids}
    return sorted(name for name in os.listdir("/dev/shm") if names & set(re.findall(r"\d+", name)))


def listening() -> dict[int, int]:
    """The port of every listening TCP socket of this machine, by its inode."""
    found = {}
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = (line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:])
            found |= {int(row[9]): int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return found


def find_sockets(pid: int) -> set[int]:
    """Inodes of a process's open sockets."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {int(link[8:-1]) for link in links if link.startswith("socket:[")}


def find_pids(module: str) -> set[int]:
    """Pids of the processes that run this module."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return {pid for pid in pids if module in read_command(pid)}


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def a_trial(rung: str = "zero1") -> Trial:
    return Trial(rung=rung, knobs=Knobs(checkpointing=False, settings=TORCH_ADAM), purpose="walk")


def run_with_fault(
    runner: RayRunner, scene: Scene, fault: str, phase: str, *, rung: str = "zero1", **more: int
) -> FaultResult:
    """Run a trial in which one rank meets the fault."""
    scene.choose_fault(fault, phase, **more)
    outcome = runner.run(a_trial(rung), id=1).outcome
    gone_ms = 1000 * (runner.results[0].gone_at_s - scene.wait_for_fault()["at_s"])
    return FaultResult(outcome=outcome, gone_ms=gone_ms, left=scene.find_leftovers(zygote=True))


def kill_in_phase(
    runner: RayRunner, scene: Scene, phase: str, victim: Callable[[psutil.Process], psutil.Process]
) -> tuple[FaultResult, BaseException | None]:
    """Send SIGKILL to the zygote, or to the process that `victim` derives from it, while the ranks are in that phase.

    One rank hangs in it, so that the others wait there.
    """
    scene.choose_fault("hang", phase)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, a_trial(), id=1)
        scene.wait_for_fault()
        wait_for(lambda: read_phase(runner) == phase, 60)
        ranks = scene.note_ranks()
        process = victim(scene.zygote())
        began = time.monotonic()
        process.kill()
        gone_ms = 1000 * (wait_until_gone(ranks, 60) - began)
        error = running.exception(60)
    outcome = None if error else running.result().outcome
    return FaultResult(outcome=outcome, gone_ms=gone_ms, left=[] if error else scene.find_leftovers(zygote=True)), error


def read_phase(runner: RayRunner) -> str:
    """The phase of the slowest rank, as the first node's agent knows it."""
    agent = runner.workers.nodes[0].agent
    return runner.workers.ray.get(agent.progress.remote()).phase


def start_fit(scene: Scene, *more: str, forecast: bool = False) -> subprocess.Popen[bytes]:
    """Start `autods fit` in a new session; its output goes to `said.txt` in the fit's folder."""
    scene.out.mkdir(exist_ok=True)
    arguments = ["--device", "cpu", "--gpus", "2", "--gpu-memory", "1GiB", "--config", "quick", "--out", str(scene.out)]
    arguments += [] if forecast else ["--no-forecast"]
    with open(scene.out / "said.txt", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "autods", "fit", str(scene.path), *arguments, *more],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def end_fit_in_phase(
    scene: Scene, phase: str, number: signal.Signals, *, group: bool = False
) -> tuple[int, FaultResult]:
    """Start a fit and signal it while its ranks are in that phase; return its exit code and what was left.

    group: signal its whole process group, as a terminal's Ctrl-C does.
    """
    scene.choose_fault("hang", phase)
    driver = start_fit(scene)
    scene.driver = driver.pid
    try:
        scene.wait_for_fault()
        ranks = scene.note_ranks()
        processes = {Process.now(one.pid) for one in psutil.Process(driver.pid).children(recursive=True)}
        began = time.monotonic()
        (os.killpg if group else os.kill)(driver.pid, number)
        gone_ms = 1000 * (wait_until_gone(ranks, 60) - began)
        code = driver.wait(60)
    finally:
        driver.kill()
        driver.wait()
    scene.processes |= processes  # Ray's too
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not scene.find_leftovers(zygote=False), 60)
    return code, FaultResult(outcome=None, gone_ms=gone_ms, left=scene.find_leftovers(zygote=False))


def wait_until_gone(pids: Iterable[int], limit_s: float) -> float:
    """Wait until all of them have ended; return the time (monotonic). A zombie has ended."""
    waiting = set(pids)
    wait_for(lambda: not {pid for pid in waiting if is_running(pid)}, limit_s, every_s=0.002)
    return time.monotonic()


def is_running(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return read_state(pid).letter not in ("", "Z", "X")


class State(NamedTuple):
    """A process's state letter as in `ps`, its parent and its start in ticks; ("", 0, -1) when it is gone."""

    letter: str
    parent: int
    began: int


def read_state(pid: int) -> State:
    """Read from /proc."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return State("", 0, -1)
    return State(said[0], int(said[1]), int(said[19]))


def wait_for(condition: Callable[[], object], limit_s: float, *, every_s: float = 0.05) -> None:
    """Ask again and again until it holds. A condition that reads all of /proc would keep a processor busy."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(every_s)
