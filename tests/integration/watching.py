"""Faults provoked, and what they leave behind: the processes of a fit are found by their command line in /proc."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from autods.cluster.runner import RayRunner
from autods.outcomes import Outcome
from autods.values import Knobs, Trial

FAULTY = Path(__file__).parent / "workloads" / "faulty.py"
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
    shared: set[str] = field(default_factory=lambda: set(os.listdir("/dev/shm")))
    ports: set[int] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)

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
        wait_for((self.out / "struck.json").exists, 60)
        note = json.loads((self.out / "struck.json").read_text())
        self.pids |= {note["pid"], *note["children"]}
        return note

    def family(self) -> set[int]:
        """The zygote and all that it and its ranks forked: they share its command line."""
        return {pid for pid in pids_of("autods.cluster.zygote") if f'"{self.path}"' in command_of(pid)}

    def simulators(self) -> set[int]:
        """The prepared process of the forecast and its engines."""
        return {pid for pid in pids_of("autods.forecast.simulator.worker") if f'"{self.path}"' in command_of(pid)}

    def zygote(self) -> psutil.Process:
        family = self.family()
        return next(process for process in map(psutil.Process, family) if process.ppid() not in family)

    def note_ranks(self) -> set[int]:
        """Pids of the ranks, remembered with the ports they listen on."""
        ranks = {child.pid for child in self.zygote().children()}
        self.pids |= ranks
        for pid in ranks:
            connections = psutil.Process(pid).net_connections("inet")
            self.ports |= {link.laddr.port for link in connections if link.status == psutil.CONN_LISTEN}
        return ranks

    def left(self, *, zygote: bool) -> list[str]:
        """What should not be there now. zygote: whether one may live (with no child and no listening port)."""
        left = [f"process {pid}" for pid in sorted(self.pids) if remains(pid)]
        family = self.family() - self.pids
        if zygote and family:
            owner = self.zygote()
            left += [f"child {child.pid} of the zygote" for child in owner.children()]
            left += [f"child {child.pid} of the actor" for child in owner.parent().children() if child != owner]
            left += [f"port {link.laddr}" for link in owner.net_connections("inet") if link.status == "LISTEN"]
            family -= {owner.pid}
        left += [f"process {pid} of the fit" for pid in sorted(family)]
        if self.ports:
            listening = {link.laddr.port for link in psutil.net_connections("inet") if link.status == "LISTEN"}
            left += [f"port {port}" for port in sorted(self.ports & listening)]
        left += [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - self.shared)]
        left += [str(path) for path in (self.out / "logs").glob("*/scratch")]
        return left


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
    return Trial(rung=rung, knobs=Knobs(checkpointing=False), purpose="walk", native_optimizer=False)


def meet(runner: RayRunner, scene: Scene, fault: str, phase: str, *, rung: str = "zero1", **more: int) -> Seen:
    """Run a trial in which a rank meets the fault."""
    scene.choose(fault, phase, **more)
    outcome = runner.run(a_trial(rung), id=1).outcome
    gone_ms = 1000 * (runner.report["gone_at_s"] - scene.struck()["at_s"])
    return Seen(outcome=outcome, gone_ms=gone_ms, left=scene.left(zygote=True))


def kill_during(
    runner: RayRunner, scene: Scene, phase: str, victim: Callable[[psutil.Process], psutil.Process]
) -> tuple[Seen, BaseException | None]:
    """SIGKILL to the zygote, or to what `victim` makes of it, while the ranks are in that phase."""
    scene.choose("hang", phase)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, a_trial(), id=1)
        scene.struck()
        time.sleep(0.5)  # the zygote tells the node of a new phase within 0.2 s
        ranks = scene.note_ranks()
        process = victim(scene.zygote())
        began = time.monotonic()
        process.kill()
        gone_ms = 1000 * (wait_gone(ranks, 10) - began)
        error = running.exception(60)
    outcome = None if error else running.result().outcome
    return Seen(outcome=outcome, gone_ms=gone_ms, left=[] if error else scene.left(zygote=True)), error


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
    try:
        scene.struck()
        ranks = scene.note_ranks()
        processes = {process.pid for process in psutil.Process(driver.pid).children(recursive=True)}
        began = time.monotonic()
        (os.killpg if group else os.kill)(driver.pid, number)
        gone_ms = 1000 * (wait_gone(ranks, 10) - began)
        code = driver.wait(30)
    finally:
        driver.kill()
        driver.wait()
    scene.pids |= processes  # Ray's too
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not scene.left(zygote=False), 20)
    return code, Seen(outcome=None, gone_ms=gone_ms, left=scene.left(zygote=False))


def wait_gone(pids: Iterable[int], limit_s: float) -> float:
    """When (monotonic) the last of them had ended: a zombie has."""
    waiting = set(pids)
    wait_for(lambda: not {pid for pid in waiting if lives(pid)}, limit_s)
    return time.monotonic()


def lives(pid: int) -> bool:
    """Whether it still runs: a zombie does not."""
    return _state(pid)[0] not in ("", "Z")


def remains(pid: int) -> bool:
    """Whether it lives, or is a zombie that someone else than init should have reaped."""
    return _state(pid) not in (("", 0), ("Z", 1))


def _state(pid: int) -> tuple[str, int]:
    """Its state and its parent; ("", 0) when it is gone."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return state, int(parent)


def wait_for(what: Callable[[], object], limit_s: float) -> None:
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(0.002)
