"""What a command leaves behind after a fault: processes, files in /tmp and /dev/shm, sockets.

A case runs alone in new namespaces, with a /tmp and a /dev/shm of its own, so that all that is there afterwards is its.
`python -m tests.support.leftovers NAME`, as the first process of these namespaces, prints the row of a case as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.clusters import short_config
from tests.support.watching import Scene, find_pids, read_command, read_state

ROOT = Path(__file__).parents[2]
AFTER_S = (0.0, 1.0, 2.0, 5.0, 10.0)
_LIMIT_S = 300.0
_CASE = Path("/tmp/case")  # the folder of the case; its results stay
_CACHES = ("torchinductor_",)  # of torch, one for all programs of a user
_LISTEN, _TIME_WAIT = "0A", "06"

Left = Mapping[str, Sequence[str]]  # by kind
Find = Callable[[Scene], list[int]]
Ready = Callable[[Scene], bool]


# ------------------------------------------------------------------------------------------------ who is hit, and when


def driver(scene: Scene) -> list[int]:
    return [scene.driver]


def zygote(scene: Scene) -> list[int]:
    return [scene.zygote().pid]


def agent(scene: Scene) -> list[int]:
    parent = scene.zygote().parent()
    assert parent is not None
    return [parent.pid]


def rank(scene: Scene) -> list[int]:
    return [max(child.pid for child in scene.zygote().children())]


def named(name: str) -> Find:
    """The processes whose executable has this name."""
    return lambda scene: [one.pid for one in psutil.process_iter(["name"]) if one.info["name"] == name]


def guards(scene: Scene) -> list[int]:
    return sorted(find_pids("cleanup.main"))


def simulators(scene: Scene) -> list[int]:
    return sorted(find_pids("autods.forecast.simulate.worker"))


def in_a_trial(scene: Scene) -> bool:
    return (scene.out / "struck.json").exists()


def ray_starts(scene: Scene) -> bool:
    return bool(named("gcs_server")(scene))


def raylet_starts(scene: Scene) -> bool:
    return bool(named("raylet")(scene))


def loads(scene: Scene) -> bool:
    return bool(scene.family())


def simulates(scene: Scene) -> bool:
    return len(simulators(scene)) > 1


def is_idle(scene: Scene) -> bool:
    return (scene.out / "idle").exists()


def never(scene: Scene) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Hit:
    """A signal to some processes; `group` sends it to their process groups."""

    number: signal.Signals
    find: Find
    group: bool = False


KILL, STOP, INT, TERM, HUP = signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGHUP
CTRL_C = Hit(INT, driver, group=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A command, and what happens to it.

    The hits come one after the other when it is `when`; without any the command ends by itself. `meets` is what a rank
    of the first trial meets, by its name in workloads/faulty.py.
    """

    command: str = "fit"
    when: Ready = never
    hits: tuple[Hit, ...] = ()
    meets: str = "hang"
    codes: tuple[int, ...] = ()  # that the command may end with; any, where empty


def hit(when: Ready, *hits: Hit, command: str = "fit", meets: str = "hang", codes: tuple[int, ...] = ()) -> Fault:
    return Fault(command=command, when=when, hits=hits, meets=meets, codes=codes)


FAULTS: Mapping[str, Fault] = {
    "fit: a normal end": Fault(meets="none", codes=(0,)),
    "fit: a normal end after strays": Fault(meets="strays", codes=(0, 1, 2)),
    "fit: a normal end after pools and shared memory": Fault(meets="pools", codes=(0, 1, 2)),
    "fit: out of memory": Fault(meets="out of memory", codes=(0, 1)),
    "fit: full disk": Fault(meets="none", command="fit on a full disk", codes=(3,)),
    "fit: driver -9, Ray starts": hit(ray_starts, Hit(KILL, driver)),
    "fit: driver -9, the raylet starts": hit(raylet_starts, Hit(KILL, driver)),
    "fit: driver -9, the zygote loads": hit(loads, Hit(KILL, driver)),
    "fit: driver -9, in a trial": hit(in_a_trial, Hit(KILL, driver)),
    "fit: driver -9, with pools and shared memory": hit(in_a_trial, Hit(KILL, driver), meets="pools and hang"),
    "fit: driver and zygote -9": hit(in_a_trial, Hit(KILL, driver), Hit(KILL, zygote), meets="pools and hang"),
    "fit: zygote and driver -9": hit(in_a_trial, Hit(KILL, zygote), Hit(KILL, driver), meets="pools and hang"),
    "fit: guard and driver -9": hit(in_a_trial, Hit(KILL, guards), Hit(KILL, driver)),
    "fit: zygote stopped, driver -9": hit(in_a_trial, Hit(STOP, zygote), Hit(KILL, driver)),
    "fit: agent stopped, driver -9": hit(in_a_trial, Hit(STOP, agent), Hit(KILL, driver)),
    "fit: raylet stopped, driver -9": hit(in_a_trial, Hit(STOP, named("raylet")), Hit(KILL, driver)),
    "fit: zygote -9": hit(in_a_trial, Hit(KILL, zygote)),
    "fit: agent -9": hit(in_a_trial, Hit(KILL, agent), codes=(3,)),
    "fit: raylet -9": hit(in_a_trial, Hit(KILL, named("raylet")), codes=(3,)),
    "fit: GCS -9": hit(in_a_trial, Hit(KILL, named("gcs_server")), codes=(3,)),
    "fit: one rank -9": hit(in_a_trial, Hit(KILL, rank)),
    "fit: Ctrl-C": hit(in_a_trial, CTRL_C, codes=(130,)),
    "fit: Ctrl-C twice": hit(in_a_trial, CTRL_C, CTRL_C, codes=(130, -INT)),
    "fit: Ctrl-C, Ray starts": hit(ray_starts, CTRL_C, codes=(130,)),
    "fit: Ctrl-C, the zygote loads": hit(loads, CTRL_C, codes=(130,)),
    "fit: SIGTERM": hit(in_a_trial, Hit(TERM, driver), codes=(130,)),
    "fit: SIGHUP": hit(in_a_trial, Hit(HUP, driver, group=True)),
    "fit with a forecast: driver -9": hit(simulates, Hit(KILL, driver), command="fit with a forecast"),
    "idle: driver -9": hit(is_idle, Hit(KILL, driver), command="idle"),
    "idle: driver and zygote -9": hit(is_idle, Hit(KILL, driver), Hit(KILL, zygote), command="idle"),
    "API: find_best_config has returned": hit(is_idle, command="API", meets="none"),
    "plan: a normal end": Fault(command="plan", codes=(0, 1)),
    "plan: driver -9": hit(simulates, Hit(KILL, driver), command="plan"),
    "plan: Ctrl-C": hit(simulates, CTRL_C, command="plan", codes=(130,)),
    "plan: SIGTERM": hit(simulates, Hit(TERM, driver), command="plan", codes=(130,)),
    "plan: SIGHUP": hit(simulates, Hit(HUP, driver), command="plan"),
    "plan: simulators -9": hit(simulates, Hit(KILL, simulators), command="plan"),
    "plan: simulators stopped, driver -9": hit(simulates, Hit(STOP, simulators), Hit(KILL, driver), command="plan"),
    "plan of a script: a normal end": Fault(command="plan of a script", codes=(0, 1)),
    "plan of a script: driver -9": hit(simulates, Hit(KILL, driver), command="plan of a script"),
    "plan of a script: simulators -9": hit(simulates, Hit(KILL, simulators), command="plan of a script"),
    "plan of a script: Ctrl-C": hit(simulates, CTRL_C, command="plan of a script", codes=(130,)),
    "probe: a normal end": Fault(command="probe", meets="none", codes=(0,)),
    "probe: driver -9": hit(in_a_trial, Hit(KILL, driver), command="probe"),
    "probe: driver and zygote -9": hit(in_a_trial, Hit(KILL, driver), Hit(KILL, zygote), command="probe"),
    "probe: Ctrl-C": hit(in_a_trial, CTRL_C, command="probe", codes=(130,)),
}

_IDLE = """
import sys, time
from pathlib import Path
from autods.runner.runner import RayRunner
from tests.support.fits import ignore, question
with RayRunner(question(sys.argv[1], Path(sys.argv[2])), ignore) as runner:
    runner.survey()
    (Path(sys.argv[2]) / "idle").touch()
    time.sleep(600)
"""
_API = """
import sys, time
from pathlib import Path
import autods
autods.find_best_config(sys.argv[1], gpus=2, device="cpu", gpu_memory="1GiB", config=sys.argv[3], ladder="ddp",
                        forecast=False, out=sys.argv[2])
(Path(sys.argv[2]) / "idle").touch()
time.sleep(600)
"""


def command_line(command: str, scene: Scene) -> list[str]:
    """The words of a fault's command."""
    python, path, out, short = sys.executable, str(scene.path), str(scene.out), short_config(scene.out.parent)
    autods, cpu = [python, "-m", "autods"], ["--device", "cpu", "--gpus", "2", "--gpu-memory"]
    fit = [*autods, "fit", path, *cpu, "1GiB", "--config", short, "--ladder", "ddp", "--no-forecast", "--out"]
    script = str(ROOT / "tests/integration/scripts/with_stages.py")
    commands = {
        "fit": [*fit, out],
        "fit on a full disk": [*fit, str(scene.out / "small" / "out")],
        "fit with a forecast": [*autods, "fit", path, *cpu, "96MiB", "--config", short, "--out", out],
        "idle": [python, "-c", _IDLE, path, out],
        "API": [python, "-c", _API, path, out, short],
        "plan": [*autods, "plan", path, *cpu, "96MiB"],
        "plan of a script": [*autods, "plan", script, *cpu, "96MiB"],
        "probe": [*autods, "probe", path, *cpu, "1GiB", "--vary", "rung=ddp", "--out", out],
    }
    return commands[command]


# ---------------------------------------------------------------------------------------------------- what is there


@dataclass(frozen=True, slots=True)
class Row:
    """What was left, by the seconds after the end of the command (or after it returned, for an API).

    `problem` is set where the case did not go as meant; `said` is the end of what the command printed.
    """

    name: str
    code: int | None
    left: Mapping[float, Left]
    said: str = ""
    problem: str = ""

    @property
    def is_clean(self) -> bool:
        return not self.problem and not any(self.left[AFTER_S[-1]].values())


@dataclass(slots=True)
class Place:
    """The namespaces, of which this process is the first: it reaps what nobody else does."""

    codes: dict[int, int] = field(default_factory=dict)  # exit codes of reaped processes

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.codes[pid] = os.waitstatus_to_exitcode(status)

    def wait(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + _LIMIT_S
        while not condition():
            self.reap()
            if time.monotonic() > until:
                raise TimeoutError(f"not within {_LIMIT_S:.0f} s")
            time.sleep(0.02)

    def look(self, but: Sequence[int] = ()) -> dict[str, list[str]]:
        """All that is there, by kind, other than the processes `but`."""
        self.reap()
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid(), *but}
        return {
            "processes": [describe(pid) for pid in sorted(pids) if read_state(pid).letter],
            "/dev/shm": sorted(os.listdir("/dev/shm")),
            "/tmp": sorted(name for name in os.listdir("/tmp") if not name.startswith(_CACHES)),
            "scratch": sorted(map(str, _CASE.glob("out/logs/*/scratch"))),
            "TCP": list(tcp_sockets()),
            "unix": list(unix_sockets()),
        }


def describe(pid: int) -> str:
    words = read_command(pid).replace("\0", " ").split()
    return f"{pid} {read_state(pid).letter} {' '.join(words)[:120] or '(zombie)'}"


def tcp_sockets() -> Iterator[str]:
    """TCP sockets of this network namespace, without those that the kernel keeps for a while."""
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for row in (line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]):
                if row[3] != _TIME_WAIT and row[9] != "0":
                    yield f"{kind} port {int(row[1].rpartition(':')[2], 16)}{' listening' * (row[3] == _LISTEN)}"


def unix_sockets() -> Iterator[str]:
    for row in (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]):
        yield f"{row[7] if len(row) > 7 else 'without a name'}"


def subtract(now: Left, before: Left) -> dict[str, list[str]]:
    return {kind: [each for each in items if each not in before[kind]] for kind, items in now.items()}


# -------------------------------------------------------------------------------------------------------- one case


def observe(name: str) -> Row:
    """Run a case and look what it left. Call it in namespaces that end with this process."""
    fault, place = FAULTS[name], Place()
    _CASE.mkdir()
    scene = Scene.at(_CASE)
    small = scene.out / "small"
    small.mkdir(parents=True)
    if fault.meets != "none":
        scene.choose_fault(fault.meets, "forward")
    if fault.command == "fit on a full disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(small)], check=True)
    before = place.look()
    with open(_CASE / "said.txt", "wb") as said:
        process = subprocess.Popen(
            command_line(fault.command, scene),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    scene.driver = process.pid
    problem, but = "", (process.pid,) if fault.command == "API" else ()
    try:
        if fault.when is not never:
            place.wait(lambda: fault.when(scene) or process.pid in place.codes)
            for each in fault.hits:
                strike(each, scene)
        if fault.hits:
            (scene.out / "fault.json").unlink(missing_ok=True)  # the rest of the command meets none
        if not but:
            place.wait(lambda: process.pid in place.codes)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    ended_s, left = time.monotonic(), {}
    for after_s in AFTER_S:
        while time.monotonic() < ended_s + after_s:
            place.reap()
            time.sleep(0.02)
        left[after_s] = subtract(place.look(but), before)
    process.returncode = code = place.codes.get(process.pid)
    if fault.codes and code not in fault.codes:
        problem = problem or f"exit code {code}"
    return Row(name, code, left, (_CASE / "said.txt").read_text(errors="replace")[-1500:], problem)


def strike(each: Hit, scene: Scene) -> None:
    for pid in each.find(scene):
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if each.group else os.kill)(pid, each.number)


# --------------------------------------------------------------------------------------------------- the namespaces


def why_not() -> str | None:
    """Return why this machine does not let us look into namespaces; None where it does."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "ip or unshare is not installed (apt-get install iproute2 util-linux)"
    tried = subprocess.run([*in_namespaces(), "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces can be made: {tried.stderr.strip()}"


def in_namespaces() -> list[str]:
    """The prefix that runs a command as the first process of new namespaces.

    The repository stays at its path, and nothing in it can be changed.
    """
    prepare = (
        'mount --bind "$0" /mnt && mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && mkdir -p "$0" && '
        'mount --bind /mnt "$0" && mount -o remount,ro,bind "$0" && ip link set lo up && cd "$0" && exec "$@"'
    )
    spaces = ["--mount", "--net", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
    return ["unshare", *spaces, "--", "sh", "-c", prepare, str(ROOT)]


def run_in_namespaces(script: str, inside: str) -> int | None:
    """Run the script with this process's arguments in namespaces, and return its exit code; None within them.

    `inside` is the variable that tells it where it is. There its signals have their usual effect.
    """
    if os.environ.get(inside) is None:
        if reason := why_not():
            print(reason)
            return 2
        python = Path(sys.prefix).resolve() / "bin" / "python"  # not a link in the old /tmp
        env = {**os.environ, inside: "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([*in_namespaces(), str(python), script, *sys.argv[1:]], env=env).returncode
    for number in (INT, HUP):  # the background of a script ignores them
        signal.signal(number, signal.SIG_DFL)
    return None


def start(name: str) -> subprocess.Popen[str]:
    """Start a case in namespaces of its own."""
    python = Path(sys.prefix).resolve() / "bin" / "python"  # not a link in the old /tmp
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*in_namespaces(), str(python), "-m", "tests.support.leftovers", name]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def finish(name: str, process: subprocess.Popen[str]) -> Row:
    """Wait for a case that was started."""
    line, _ = process.communicate()
    if not line:
        return Row(name, None, {after_s: {} for after_s in AFTER_S}, problem="it was not observed")
    data = json.loads(line)
    data["left"] = {float(after_s): left for after_s, left in data["left"].items()}
    return Row(**data)


def main(name: str) -> None:
    for number in (INT, HUP):  # the background of a script ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    row = observe(name)
    print(json.dumps({key: getattr(row, key) for key in Row.__slots__}), file=lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
