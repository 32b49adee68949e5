"""How processes ended: what launchers, shells and schedulers say of it, and what each signal means by itself."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from ..types import Action, Tier
from .values import Kind


@dataclass(frozen=True, slots=True)
class Exit:
    """One process's end as a log tells it. code: negative for a signal, as subprocess says it. root: named as first."""

    code: int
    rank: int | None = None
    root: bool = False
    line: str = ""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an exit code says when nothing else does."""

    kind: Kind
    action: Action
    confidence: float
    said: str
    advice: str
    tier: Tier | None = None


_KILLED = (
    "who sent the SIGKILL is not shown. The kernel's OOM killer is the usual one: dmesg -T | grep -i 'killed process', "
    "or the oom_kill line of the cgroup's memory.events, confirms it; launchers also kill the siblings of a failed rank"
)
_CRASH = "native code crashed: python -X faulthandler shows where; suspect the extension that was built last"
MEANINGS: dict[int, Meaning] = {
    -signal.SIGKILL: Meaning("unknown", "retry", 0.4, "killed by SIGKILL", _KILLED),
    -signal.SIGBUS: Meaning(
        "out_of_memory", "fix_environment", 0.7, "killed by SIGBUS",
        "usually a full /dev/shm: df -h /dev/shm; docker run --shm-size=16g; no rung helps", "shm",
    ),
    -signal.SIGSEGV: Meaning("unknown", "retry", 0.4, "killed by SIGSEGV", _CRASH),
    -signal.SIGABRT: Meaning("unknown", "retry", 0.4, "ended by SIGABRT", "a library aborted: its reason is in the lines before"),
    -signal.SIGTERM: Meaning(
        "infrastructure", "retry", 0.5, "ended by SIGTERM",
        "it was asked to end (a scheduler, a launcher, a person): start again from the last checkpoint",
    ),
    -signal.SIGINT: Meaning("infrastructure", "nothing", 0.6, "ended by SIGINT", "somebody pressed Ctrl-C"),
    -signal.SIGHUP: Meaning("infrastructure", "retry", 0.6, "ended by SIGHUP", "the terminal went away: run it under tmux or nohup"),
    -signal.SIGILL: Meaning("toolchain", "fix_environment", 0.6, "killed by SIGILL", "a binary was built for another CPU: build its ops on this machine"),
    -signal.SIGFPE: Meaning("unknown", "retry", 0.4, "killed by SIGFPE", _CRASH),
    -signal.SIGXCPU: Meaning("infrastructure", "retry", 0.7, "CPU time limit", "ask for more CPU time (ulimit -t)"),
    -signal.SIGXFSZ: Meaning("out_of_memory", "fix_environment", 0.7, "file size limit", "a file grew beyond ulimit -f", "nvme"),
    124: Meaning("infrastructure", "retry", 0.6, "ended by timeout(1)", "the time limit was reached: give it more time"),
    125: Meaning("infrastructure", "fix_environment", 0.6, "the container did not start", "the container runtime refused: its message says why"),
    126: Meaning("toolchain", "fix_environment", 0.6, "the command cannot be executed", "check that the program may be executed"),
    127: Meaning("toolchain", "fix_environment", 0.6, "the command was not found", "activate the environment that has it"),
}  # fmt: skip
_OTHER = Meaning(
    "unknown",
    "retry",
    0.3,
    "it failed",
    "the log does not say why: look into the log of each rank, and run it once more",
)
_NAMES = {
    "killed": 9, "out of memory": 9, "segmentation fault": 11, "bus error": 7, "aborted": 6, "abort": 6, "terminated": 15, "illegal instruction": 4,
    "floating point exception": 8, "hangup": 1, "interrupt": 2, "quit": 3, "sigkill": 9, "sigsegv": 11, "sigbus": 7,
    "sigabrt": 6, "sigterm": 15, "sigill": 4, "sigfpe": 8, "sighup": 1, "sigint": 2,
}  # fmt: skip
_NAME = "|".join(_NAMES)
_REPORTS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # deepspeed: the command is that of the host's last rank, whoever failed; if that is 0 there is only one.
        r"'--local_rank=(?P<rank>0)'.*exits with return code = (?P<code>-?\d+)",
        r"exits with return code = (?P<code>-?\d+)",
        r"\(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)",  # torchrun
        r"^\s*exitcode\s*: (?P<code>-?\d+) ",  # torchrun's summary
        r"Signal (?P<code9>\d+) \(SIG\w+\) received by PID",
        r"process (?P<rank>\d+) terminated with signal (?P<name>SIG\w+)",  # torch.multiprocessing
        r"process (?P<rank>\d+) terminated with exit code (?P<code>\d+)",
        r"died with <Signals\.(?P<name>SIG\w+)",  # subprocess
        r"returned non-zero exit status (?P<code>\d+)",
        r"process rank (?P<rank>\d+) .*exited on signal (?P<code9>\d+)",  # mpirun
        r"exited on signal (?P<code9>\d+)",
        r"(?:was|been) sent (?P<name>SIGKILL|SIGSEGV|SIGABRT)",  # gunicorn, systemd
        r"rank (?P<rank>\d+)\)? (?:was )?(?:terminated|killed) (?:with|by|on) signal (?P<code9>\d+)",  # jsrun and others
        r"^signal (?P<code9>\d+) \(\w+[\w ]*\)\.$",  # the rest of mpirun's sentence
        r"(?:rank|task|process|PID)s? (?P<rank>\d+)\b.{0,80}exited (?:with|on) (?:exit |non-zero )?(?:code|status):? (?P<code>-?\d+)",
        r"task (?P<rank>\d+): (?P<name>" + _NAME + r")\b",  # srun
        r"tasks [\d,-]+: (?P<name>" + _NAME + r")\b",
        r"task (?P<rank>\d+): Exited with exit code (?P<code>\d+)",
        r"tasks [\d,-]+: Exited with exit code (?P<code>\d+)",
        r"Process name: .*,\s?(?P<rank>\d+)\]",
        r"\[rank: (?P<rank>\d+)\] Child process with PID \d+ terminated with code (?P<code>-?\d+)",  # Lightning
        r"(?:exit ?code|exited with code|exit status|ExitCode|return code|terminated with code)\W{0,4}(?P<code>-?\d+)",
        r"^(?:.*: line \d+: *|\w*sh: )?(?:\[\d+\]\+? +)?(?:\d+ +)?(?P<name>"
        + _NAME
        + r")(?: \(core dumped\))?(?: {2,}.*| *(?:/\S*|\w*sh |\./\S*|nohup |env |exec )?(?:python|sh|bash|torchrun|deepspeed|accelerate|srun|mpirun).*)?$",  # a shell
    )
)
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\)", re.IGNORECASE)
_MPI_RANK = re.compile(r"noticed that process rank (\d+) with PID \d+ on node .* exited on$")
_ROOT_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")


class Exits:
    """Collects what lines say of ends."""

    def __init__(self) -> None:
        self.found: list[Exit] = []
        self._in_root = 0
        self._root_rank: int | None = None
        self._mpi_rank: int | None = None  # of mpirun's sentence that goes on in the next line
        self._listed: int | None = None  # the rank of the entry of torchrun's summary that is being read

    @property
    def root_rank(self) -> int | None:
        """The rank that torchrun saw fail first."""
        return self._root_rank

    @property
    def first(self) -> Exit | None:
        """The end to go by: torchrun's root cause, else the first that no launcher caused by its own clean-up."""
        failed = [end for end in self.found if end.code != 0]
        own = [end for end in failed if end.code not in (-15, 143)] or failed
        return next((end for end in own if end.root), own[0] if own else None)

    def read(self, text: str) -> bool:
        """Whether the line tells of an end."""
        if _ROOT_CAUSE.search(text):
            self._in_root = 8
            return True
        if found := _ROOT_RANK.match(text):
            self._listed = int(found[1])
        if found_mpi := _MPI_RANK.search(text.rstrip()):
            self._mpi_rank = int(found_mpi[1])
        if self._in_root:
            self._in_root -= 1
            if found and self._root_rank is None:
                self._root_rank = int(found[1])
                return True
        for pattern in _REPORTS:
            if found := pattern.search(text):
                said = found.groupdict()
                rank = int(said["rank"]) if said.get("rank") else self._root_rank if self._in_root else None
                if rank is None and text.lstrip().startswith(("exitcode", "traceback :")):
                    rank = self._listed
                if rank is None and text.startswith("signal "):
                    rank, self._mpi_rank = self._mpi_rank, None
                self.found.append(Exit(_code(said), rank, bool(self._in_root), text.strip()[:300]))
                return True
        return False


def _code(said: dict[str, str | None]) -> int:
    if name := said.get("name"):
        return -_NAMES[name.lower()] if name.lower() in _NAMES else 1
    if number := said.get("code9"):
        return -int(number)
    return normal(int(said.get("code") or 1))


def normal(code: int) -> int:
    """137 as a shell says it is −9 as subprocess does; 255 − n of a signal is left alone."""
    return 128 - code if 128 < code <= 128 + 64 else code


def meaning_of(code: int) -> Meaning:
    """What an exit code other than 0 says by itself."""
    return MEANINGS.get(normal(code), _OTHER)
