"""Exit codes: how launchers, shells and schedulers report them, and what each one means by itself."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from ..types import Action, Tier
from .values import Kind


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one process as a log reports it.

    `code` is negative for a signal, as in `subprocess`. `root` is true if the launcher names this process as the first
    that failed.
    """

    code: int
    rank: int | None = None
    root: bool = False
    line: str = ""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The diagnosis that an exit code allows when there is no other evidence."""

    kind: Kind
    action: Action
    confidence: float
    summary: str
    advice: str
    tier: Tier | None = None


_KILLED = (
    "the log does not show who sent the SIGKILL. Usually it is the kernel's OOM killer: dmesg -T | grep -i 'killed process', "
    "or the oom_kill line of the cgroup's memory.events, confirms it. Launchers also kill the siblings of a failed rank"
)
_CRASH = "native code crashed: python -X faulthandler shows where; suspect the extension that was built last"
MEANINGS: dict[int, Meaning] = {
    -signal.SIGKILL: Meaning("unknown", "retry", 0.4, "killed by SIGKILL", _KILLED),
    -signal.SIGBUS: Meaning(
        "out_of_memory", "fix_environment", 0.7, "killed by SIGBUS",
        "usually a full /dev/shm: df -h /dev/shm; docker run --shm-size=16g; no rung helps", "shm",
    ),
    -signal.SIGSEGV: Meaning("unknown", "retry", 0.4, "killed by SIGSEGV", _CRASH),
    -signal.SIGABRT: Meaning("unknown", "retry", 0.4, "ended by SIGABRT", "a library aborted: the reason is in the lines before"),
    -signal.SIGTERM: Meaning(
        "infrastructure", "retry", 0.5, "ended by SIGTERM",
        "a scheduler, a launcher or a person ended the run: start again from the last checkpoint",
    ),
    -signal.SIGINT: Meaning("infrastructure", "nothing", 0.6, "ended by SIGINT", "the run was interrupted with Ctrl-C"),
    -signal.SIGHUP: Meaning("infrastructure", "retry", 0.6, "ended by SIGHUP", "the terminal was closed: run under tmux or nohup"),
    -signal.SIGILL: Meaning("toolchain", "fix_environment", 0.6, "killed by SIGILL", "a binary was built for another CPU: build the ops on this machine"),
    -signal.SIGFPE: Meaning("unknown", "retry", 0.4, "killed by SIGFPE", _CRASH),
    -signal.SIGXCPU: Meaning("infrastructure", "retry", 0.7, "CPU time limit", "ask for more CPU time (ulimit -t)"),
    -signal.SIGXFSZ: Meaning("out_of_memory", "fix_environment", 0.7, "file size limit", "a file grew beyond ulimit -f", "nvme"),
    124: Meaning("infrastructure", "retry", 0.6, "ended by timeout(1)", "the time limit was reached: allow more time"),
    125: Meaning("infrastructure", "fix_environment", 0.6, "the container did not start", "the container runtime refused to start it: its message says why"),
    126: Meaning("toolchain", "fix_environment", 0.6, "the command cannot be executed", "check that the program may be executed"),
    127: Meaning("toolchain", "fix_environment", 0.6, "the command was not found", "activate the environment that has it"),
}  # fmt: skip
_OTHER = Meaning(
    "unknown",
    "retry",
    0.3,
    "the run failed",
    "the log does not say why: read the log of each rank, and run once more",
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


class ExitCodes:
    """Collects the exit codes that the lines of a log report."""

    def __init__(self) -> None:
        self.exits: list[Exit] = []
        self._in_root = 0
        self._root_rank: int | None = None
        self._mpi_rank: int | None = None  # from mpirun's sentence, which continues on the next line
        self._listed: int | None = None  # the rank of the entry of torchrun's summary that is being read

    @property
    def root_rank(self) -> int | None:
        """The rank that torchrun names as the root cause."""
        return self._root_rank

    @property
    def first(self) -> Exit | None:
        """The exit that counts: torchrun's root cause, else the first that is no clean-up by the launcher (SIGTERM)."""
        failed = [exit for exit in self.exits if exit.code != 0]
        candidates = [exit for exit in failed if exit.code not in (-15, 143)] or failed
        return next((exit for exit in candidates if exit.root), candidates[0] if candidates else None)

    def read(self, text: str) -> bool:
        """Whether the line reports an exit; if so, it is kept."""
        if _ROOT_CAUSE.search(text):
            self._in_root = 8
            return True
        root_rank = _ROOT_RANK.match(text)
        if root_rank:
            self._listed = int(root_rank[1])
        if mpi_rank := _MPI_RANK.search(text.rstrip()):
            self._mpi_rank = int(mpi_rank[1])
        if self._in_root:
            self._in_root -= 1
            if root_rank and self._root_rank is None:
                self._root_rank = int(root_rank[1])
                return True
        for pattern in _REPORTS:
            if match := pattern.search(text):
                code, rank = _exit_code(match.groupdict()), self._rank(match.groupdict().get("rank"), text)
                self.exits.append(Exit(code, rank, bool(self._in_root), text.strip()[:300]))
                return True
        return False

    def _rank(self, named: str | None, text: str) -> int | None:
        """The rank of a report: named in the line itself, or in a line before it."""
        if named:
            return int(named)
        rank = self._root_rank if self._in_root else None
        if rank is None and text.lstrip().startswith(("exitcode", "traceback :")):
            rank = self._listed
        if rank is None and text.startswith("signal "):
            rank, self._mpi_rank = self._mpi_rank, None
        return rank


def _exit_code(groups: dict[str, str | None]) -> int:
    if name := groups.get("name"):
        return -_NAMES[name.lower()] if name.lower() in _NAMES else 1
    if number := groups.get("code9"):
        return -int(number)
    return normalize_exit_code(int(groups.get("code") or 1))


def normalize_exit_code(code: int) -> int:
    """Signals as `subprocess` reports them: a shell's 137 becomes −9."""
    return 128 - code if 128 < code <= 128 + 64 else code


def explain_exit_code(code: int) -> Meaning:
    """The meaning of an exit code other than 0."""
    return MEANINGS.get(normalize_exit_code(code), _OTHER)
