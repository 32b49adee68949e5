"""A scratch project in which one failure is provoked, and the machine's edges: cgroups, small file systems, limits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

PYTHON = Path(os.environ.get("PROVOKE_PYTHON", sys.executable))  # one that has accelerate as well
OPS = Path(os.environ.get("PROVOKE_OPS", Path(tempfile.gettempdir()) / "provoke-ops"))  # DeepSpeed ops that are built
PACKAGES = Path(sys.prefix)
REPOSITORY = Path(__file__).resolve().parents[3]
MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")
LINES_KEPT = 200
SECONDS = 90


class Workbench:
    """Runs commands in a scratch project; what they print is the log, scrubbed of everything this machine is called."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pvk-"))
        self.project = self.root / "project"
        self.project.mkdir()
        (self.root / "tmp").mkdir()
        self.exit_code: int | None = None
        self.output = b""
        self.latest = b""
        self.files: dict[str, bytes] = {}
        self.env = {
            "PATH": f"{PYTHON.parent}:{PACKAGES}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.root),
            "TMPDIR": str(self.root / "tmp"),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCH_EXTENSIONS_DIR": str(OPS),
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "MALLOC_ARENA_MAX": "2",
        }

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    # what the project holds

    def script(self, name: str, text: str) -> str:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return name

    def json(self, name: str, **values: object) -> str:
        (self.project / name).write_text(json.dumps(values, indent=2))
        return name

    # what runs there

    def run(
        self,
        *argv: str | Path,
        env: dict[str, str] | None = None,
        cgroup: Path | None = None,
        small: dict[str, str] | None = None,
        interrupt: tuple[float | str, int] | None = None,
        group: bool = False,
        seconds: float = SECONDS,
    ) -> int:
        """Runs a command to its end and adds its output to the log.

        `small` mounts a tmpfs of a size over a folder, for this process tree only; `interrupt` sends a signal, to the
        command or to its whole group, after so many seconds or once a text is seen."""
        command = [str(each) for each in argv]
        small = {"/dev/shm": "8g"} | (small or {})  # DeepSpeed leaves its buffers there: they go with the mount
        mounts = " && ".join(f"mkdir -p {at} && mount -t tmpfs -o size={size} tmpfs {at}" for at, size in small.items())
        command = ["unshare", "-m", "bash", "-c", f'{mounts} && exec "$@"', "bash", *command]
        if cgroup is not None:
            command = ["bash", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "bash", *command]
        log = self.root / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                cwd=self.project,
                env=self.env | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if interrupt is not None:
                _await(log, interrupt[0], process)
                (os.killpg if group else os.kill)(process.pid, interrupt[1])
            self.exit_code = process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.latest = log.read_bytes()
        self.output += self.latest
        return self.exit_code

    def python(self, *argv: str, **how: object) -> int:
        return self.run(PYTHON, *argv, **how)  # type: ignore[arg-type]

    def shell(self, line: str, **how: object) -> int:
        """A line as people type it: the shell then says `Killed`, or `Bus error`."""
        return self.run("bash", "-c", f"{line}\ncode=$?; exit $code", **how)  # type: ignore[arg-type]

    def torchrun(self, *argv: str, ranks: int = 2, options: Sequence[str] = (), **how: object) -> int:
        rendezvous = () if any("rdzv" in each for each in options) else (f"--master-port={free_port()}",)
        return self.run(
            PYTHON, PACKAGES / "bin/torchrun", f"--nproc-per-node={ranks}", *rendezvous, *options, *argv, **how
        )  # type: ignore[arg-type]

    def deepspeed(self, *argv: str, ranks: int = 2, options: Sequence[str] = (), **how: object) -> int:
        return self.run(
            PYTHON,
            PACKAGES / "bin/deepspeed",
            f"--num_gpus={ranks}",
            f"--master_port={free_port()}",
            *options,
            *argv,
            **how,
        )  # type: ignore[arg-type]

    # what goes into the log

    def say(self, text: str) -> None:
        self.output += text.encode()

    def keep(self, pattern: str, name: str = "{stem}.log") -> None:
        """Makes the run's own files the case, instead of what the launcher printed."""
        for path in sorted(self.project.glob(pattern)):
            parts = path.relative_to(self.project).parts
            named = name.format(stem=path.stem, parent=path.parent.name, name=path.name, path="-".join(parts))
            self.files[named] = path.read_bytes()

    def write_logs(self, stem: Path) -> Path:
        shutil.rmtree(stem, ignore_errors=True)
        if self.files:
            stem.mkdir(parents=True)
            for name, text in self.files.items():
                (stem / name).write_bytes(self.scrub(text))
            return stem
        path = stem.with_name(stem.name + ".log")
        path.write_bytes(self.scrub(self.output))
        return path

    def scrub(self, log: bytes) -> bytes:
        text = log.decode("utf-8", "replace")
        names = [
            (re.escape(str(self.project)), "/home/ana/project"),
            (re.escape(str(self.root)) + r"/tmp\b", "/tmp"),
            (re.escape(str(self.root)), "/home/ana"),
            (re.escape(str(OPS)), "/home/ana/.cache/torch_extensions/py311_cpu"),
            (re.escape(str(PYTHON.parent.parent)), "/home/ana/venv"),
            (re.escape(str(PACKAGES)), "/home/ana/venv"),
            (re.escape(str(REPOSITORY)) + r"\b", "/home/ana/project"),
            (re.escape(sys.base_prefix), "/usr"),
            (re.escape(str(Path.home())) + r"\b", "/home/ana"),
            (r"(?<![\w./-])" + re.escape(socket.gethostname()) + r"(?![\w./-])", "node-1"),
            (r"\b192\.0\.2\.\d+", "10.0.0.4"),
            (r"\b10\.255\.255\.\d+", "10.0.0.2"),
            (r"fd00::2\b|fe80::fc:ff:fe00:1\b", "fd12::4"),
            (r"\bpvk-\w+", "run-7f3a"),
        ]
        for pattern, instead in names:
            text = re.sub(pattern, instead, text)
        lines = text.splitlines(keepends=True) if "\n" in text else [text]
        lines = re.split(r"(?<=\n)", text)
        if len(lines) > LINES_KEPT:
            lines = [*lines[:80], "...\n", *lines[-(LINES_KEPT - 81) :]]
        return "".join(lines).encode()

    def kernel_log(self, since: float, lines: int = 60) -> str:
        """What the kernel has said since then (its clock counts from boot)."""
        said = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout.splitlines()
        recent = [line for line in said if _kernel_time(line) >= since]
        return "\n".join(recent[-lines:]) + "\n"


def _kernel_time(line: str) -> float:
    found = re.match(r"\[\s*([\d.]+)\]", line)
    return float(found[1]) if found else 0.0


def uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def memory_cgroup(name: str, mebibytes: int) -> Iterator[Path]:
    """A memory cgroup (v1) with a hard limit, swap included."""
    folder = MEMORY_CGROUPS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(str(mebibytes << 20))
    with contextlib.suppress(OSError):
        (folder / "memory.memsw.limit_in_bytes").write_text(str(mebibytes << 20))
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 10
        while folder != MEMORY_CGROUPS:
            try:
                folder.rmdir()
                folder = folder.parent
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.2)


def _await(log: Path, sign: float | str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    if not isinstance(sign, str):
        time.sleep(sign)
        return
    while sign.encode() not in log.read_bytes() and process.poll() is None:
        assert time.monotonic() < deadline, f"never said {sign!r}"
        time.sleep(0.05)
