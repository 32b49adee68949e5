"""Whether a Ray cluster lets this process join, tried by another process first.

Ray's core aborts a process whose token a cluster refuses, and waits for minutes for a head that is none. So a child
(`cluster_rehearsal`) takes `STEPS` up to a real connection, each within a time limit, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import AutodsError, EnvironmentBroken, InputError

START_HINT = "start one as docs/nodes.md says; `ray start --head` prints its address"
SAME_HINT = "every node needs the same Ray and Python; `ray status --address HOST:PORT` says more"
_LEAVE_S = 5.0
_REHEARSAL = "autods.runner.cluster_rehearsal"


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the child: its limit, and the error when it takes longer."""

    limit_s: float
    problem: str
    error: type[AutodsError]
    hint: str


STEPS = MappingProxyType(
    {
        "start": Step(60, "Python took longer than 60 s to start", EnvironmentBroken, "is the machine busy?"),
        "resolve": Step(10, "the host was not found within 10 s", InputError, "give HOST as an IP address"),
        "connect": Step(15, "no Ray cluster answers within 15 s", InputError, START_HINT),
        "load": Step(120, "Ray was not imported within 120 s", EnvironmentBroken, "is the machine busy?"),
        "ask": Step(10, "the Ray cluster there does not answer", EnvironmentBroken, SAME_HINT),
        "join": Step(20, "the Ray cluster there was not joined within 20 s", EnvironmentBroken, SAME_HINT),
    }
)


class ClusterCheck:
    """A running check. A context manager that leaves no process behind; `wait` has the verdict."""

    def __init__(self, host: str, port: int, origin: str) -> None:
        self.origin, self.log = origin, tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", _REHEARSAL, host, str(port), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},  # as we import
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> ClusterCheck:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()

    def wait(self) -> None:
        """Return when the cluster was joined and left.

        Raises InputError where the address is at fault, EnvironmentBroken where a node is.
        """
        step = STEPS["start"]
        while line := self._read_line(step):
            if line.startswith("{"):
                self._finish(json.loads(line))
                return
            step = STEPS[line]
        raise make_error(
            EnvironmentBroken, f"the Ray cluster there cannot be joined: {self._read_abort()}", self.origin, SAME_HINT
        )

    def _read_line(self, step: Step) -> str:
        """Return the child's next line; '' when it has ended. Raises the step's error at its limit."""
        assert self.process.stdout is not None
        line, until = b"", time.monotonic() + step.limit_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise make_error(step.error, step.problem, self.origin, step.hint)
            if not (byte := os.read(self.process.stdout.fileno(), 1)):
                return ""
            line += byte
        return line.decode().strip()

    def _finish(self, verdict: Mapping[str, str]) -> None:
        if verdict:
            kind = InputError if verdict["kind"] == InputError.kind else EnvironmentBroken
            raise make_error(kind, verdict["problem"], self.origin, verdict["hint"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_LEAVE_S)

    def _read_abort(self) -> str:
        """Why Ray's core aborted the child, by its last words."""
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        words = re.findall(r"Check failed: .*", text) or [line for line in text.splitlines() if line.strip()]
        return words[-1] if words else f"the process that tried it ended with exit code {self.process.wait()}"


def make_error(kind: type[AutodsError], problem: str, origin: str, hint: str) -> AutodsError:
    """The error in two lines, which begin with the option or variable that names the cluster."""
    if kind is InputError:
        return InputError(problem, place=origin, hint=hint)
    return kind(f"{origin}: {problem}\n  {hint}")


def parse_address(text: str, origin: str) -> tuple[str, int]:
    """Return the host and the port of 'HOST:PORT' or '[IPv6]:PORT'. Raises InputError, which names `origin`."""
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_plain = text.isascii() and text.isprintable() and not re.search(r"[\s/@{}]", text) and port.isdigit()
    if not host.strip("[]") or not is_plain or (":" in host and not is_bracketed):
        raise InputError("is neither auto nor HOST:PORT", place=origin, hint="give HOST:PORT of `ray start --head`")
    if not 0 < int(port[:6]) < 2**16:
        raise InputError("a port is a number from 1 to 65535", place=origin, hint="`ray start --head` prints its port")
    return host[1:-1] if is_bracketed else host, int(port)


def format_address(host: str, port: int) -> str:
    """'HOST:PORT', with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
