"""The processes of a run as its logs report them: their ranks, and how they ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..schema import read_as
from ..types import Action, Tier
from ..units import format_signal
from .messages import Message
from .signatures import Kind, Weight, expand, read_toml

# How a process ended: exit codes as launchers, shells and schedulers report them.

MOST_SIGNAL = 64  # signals of Linux are 1 to 64
_SILENT_SIGNALS = (-9, -11, -7, -4, -8)  # they leave no message; a watchdog ends its own process by −6


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one process as a log reports it.

    `code` is negative for a signal, as in `subprocess`. `root` is true if the launcher names this process as the first
    that failed, and `time` is then what the launcher says of its time.
    """

    code: int
    rank: int | None = None
    root: bool = False
    line: str = ""
    time: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether a signal ended the process that leaves no message."""
        return self.code in _SILENT_SIGNALS


@dataclass(frozen=True, slots=True)
class ExitMeaning:
    """The diagnosis that an exit code allows when there is no other evidence: a row of `signatures/exit_codes.toml`."""

    kind: Kind
    action: Action
    summary: str
    advice: str
    tier: Tier | None = None


def normalize_exit_code(code: int) -> int:
    """Signals as `subprocess` reports them: a shell's 137 becomes −9, and so does PBS's 265."""
    added = next((added for added in (128, 256) if added < code <= added + MOST_SIGNAL), None)
    return code if added is None else added - code


def explain_exit_code(code: int, *, host_full: bool = False) -> ExitMeaning:
    """The meaning of an exit code other than 0. `host_full`: host memory was full shortly before."""
    meanings = {name: read_as(ExitMeaning, row) for name, row in read_toml("exit_codes").items()}
    code = normalize_exit_code(code)
    if code >= 0:
        return meanings.get(str(code), meanings["other"])
    name = format_signal(-code)
    if host_full and name == "SIGKILL":
        return meanings["SIGKILL, host full"]
    return meanings.get(name) or replace(meanings["signal"], summary=f"ended by {name}")


_SIGNALS: Mapping[str, int] = read_toml("fragments")["signal_name"]
_REPORTS = tuple(re.compile(expand(pattern), re.IGNORECASE) for pattern in read_toml("log_lines")["exit_reports"])
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\)", re.IGNORECASE)
_MPI_RANK = re.compile(r"noticed that process rank (\d+) with PID \d+ on node .* exited on$")
_ROOT_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_ROOT_TIME = re.compile(r"^\s*time\s*: (\d{4}-\S+)")


@dataclass(slots=True)
class ReportedExits:
    """Collects the exit codes that the lines of a log report."""

    exits: list[Exit] = field(default_factory=list)
    _root_ranks: list[int] = field(default_factory=list)  # one a node: each torchrun names a root cause of its own
    _in_root: int = 0  # lines left of torchrun's paragraph on the root cause
    _root_time: str = ""
    _mpi_rank: int | None = None  # from mpirun's sentence, which continues on the next line
    _listed: int | None = None  # the rank of the entry of torchrun's summary that is being read

    @property
    def first(self) -> Exit | None:
        """The exit that counts: torchrun's root cause, else the first that is no clean-up by the launcher (SIGTERM).

        Several nodes have a root cause each: one that a silent signal ended comes first, then the earliest.
        """
        failed = [exit for exit in self.exits if exit.code != 0]
        candidates = [exit for exit in failed if exit.code not in (-15, 143)] or failed
        roots = [exit for exit in candidates if exit.root]
        timed = all(exit.time for exit in roots)
        first_root = min(roots, key=lambda exit: (not exit.is_silent, exit.time if timed else ""), default=None)
        return first_root or next(iter(candidates), None)

    @property
    def root_rank(self) -> int | None:
        """The rank of torchrun's root cause, or of the one that counts."""
        first = self.first
        if first is not None and first.root and first.rank is not None:
            return first.rank
        return next(iter(self._root_ranks), None)

    def read(self, text: str) -> bool:
        """Whether the line reports an exit; if so, it is kept."""
        if _ROOT_CAUSE.search(text):
            self._in_root, self._root_time, self._listed = 8, "", None
            return True
        if mpi_rank := _MPI_RANK.search(text.rstrip()):
            self._mpi_rank = int(mpi_rank[1])
        if root_rank := _ROOT_RANK.match(text):
            self._listed = int(root_rank[1])
        if self._in_root:
            self._in_root -= 1
            if time := _ROOT_TIME.match(text):
                self._root_time = time[1]
            if root_rank:
                self._root_ranks.append(int(root_rank[1]))
                return True
        match = next((match for pattern in _REPORTS if (match := pattern.search(text))), None)
        if match is not None:
            self.exits.append(self._parse(match.groupdict(), text))
        return match is not None

    def _parse(self, groups: dict[str, str | None], text: str) -> Exit:
        """The exit that a report names. Its rank may stand in a line before."""
        if name := groups.get("name"):
            code = -_SIGNALS.get(name.lower(), -1)
        elif number := groups.get("code9"):
            code = -int(number)
        else:
            code = normalize_exit_code(int(groups.get("code") or 1))
        rank = self._listed if self._in_root else None
        if named := groups.get("rank"):
            rank = int(named)
        elif rank is None and text.lstrip().startswith(("exitcode", "traceback :")):
            rank = self._listed
        elif rank is None and text.startswith("signal "):
            rank, self._mpi_rank = self._mpi_rank, None
        time = self._root_time if self._in_root else ""
        return Exit(code, rank, bool(self._in_root), text.strip()[:300], time)


# Which rank a message belongs to: by prefix, text or file name, by process id, or by GPU.

# 'disagreement between rank0 and rank7' is said by the second one; adapters and tensors have ranks of their own.
_NO_PROCESS = (
    r"(?<!between )(?<!LoRA )(?<!adapter )(?<!tensor )(?<!matrix )\b(?!rank \d+ (?:tensor|matri|array|adapter))"
)
_RANK_IN_TEXT = re.compile(
    _NO_PROCESS + r"(?:global[_ ]?rank|rank)\s?[:=#]?\s?(\d+)\b|\[rank(\d+)\]|task (\d+):|RankID:(\d+)", re.IGNORECASE
)
_RANK_BEFORE = re.compile(r"^\[Rank (\d+)\]|on \[Rank (\d+)\]|^\[PG [^\]]*\bRank (\d+)\]", re.IGNORECASE)
_RANK_IN_FILE = re.compile(
    r"(?:rank|worker|trainer|proc(?:ess)?|task|local_rank)[_.-]?(\d+)(?!\d)|(?:attempt_\d+|none_\w+|default_\w+)/(\d+)/"
    r"|(?:^|/)(\d+)/(?:std(?:err|out)|error|log)|slurm-\d+[._](\d+)|[._-](\d+)\.(?:log|out|err|txt)$|^(\d+)\.(?:log|out|err|txt)$"
    r"|std(?:err|out)[._-](\d+)|log\.(\d+)$",
    re.IGNORECASE,
)
_NCCL_DEVICE = re.compile(r"^\S+:\d+:\d+ \[(\d+)\] ")  # on the first host the device is the rank
_LOCAL = re.compile(
    r"\bGPU (\d+)(?: has a total|;)|\((?:GPU|NPU|XPU|HPU|DCU) (\d+);|Allocation on device (\d+) would",
)
_PID = re.compile(
    r"\b(?:pid|PID)\b[=: ]{1,3}(\d+)|^\S+?:(\d{2,}):\d{2,} \[\d+\] |Killed process (\d+)|^\((?:\w+ )?pid=(\d+)"
)
_STREAM_PID = re.compile(r"\bpid=(\d+)")
_OWNER = re.compile(
    r"\bpid\)?[=: ]{1,3}(\d+)|^[\w.-]+:(\d{2,}):\d{2,} \[\d+\] |\blocal_rank: \d+ \(pid: (\d+)\)", re.IGNORECASE
)
_OWN_RANK = re.compile(r"\b(?:world_rank|global_rank|rank|RankID)[=: ]{1,2}(\d+)\b", re.IGNORECASE)
_ONE_HOST = re.compile(
    r"WORLD INFO DICT: \{'[^']+': \[[\d, ]*\]\}|nnodes=1,|--nnodes[= ]1\b(?!:)|--standalone|--num_machines[= ]1\b"
    r"|num_machines: 1\b|with local resources only|\bnodes?=1\b|gpu_ids=|CUDA_VISIBLE_DEVICES"
)
_MANY_HOSTS = re.compile(
    r"WORLD INFO DICT: \{'[^']+': \[[\d, ]*\], '|(?:nnodes=|--nnodes |--num_machines[= ])(?:[2-9]|\d\d)"
    r"|\bnode_rank=[1-9]"
)
_OWN_PID = re.compile(
    r"\W*(?:(?:my|own|process|this|running|started|trainer|main)\W+){0,4}pid\W{1,3}\d+\W*", re.IGNORECASE
)
_MOST_PIDS = 20_000
# vLLM before V1: rank 0 is the engine's own process, which starts those of the other ranks in their order, on its host.
_VLLM_ENGINE = re.compile(r"tensor_parallel_size=(\d+), pipeline_parallel_size=(\d+)")
_VLLM_WORKER = re.compile(r"\(VllmWorkerProcess pid=(\d+)\)")
_VLLM_READY = "Worker ready; awaiting tasks"


@dataclass(slots=True)
class RankClues:
    """The ranks of process ids and GPUs, collected from messages. `hosts` is 1, 2 for more than one, or None."""

    pids: dict[int, int] = field(default_factory=dict)
    hosts: int | None = None
    gpus: set[int] = field(default_factory=set)  # named by messages that name no rank
    _vllm_sizes: list[int] = field(default_factory=list)  # ranks of each of vLLM's engines
    _vllm_workers: set[int] = field(default_factory=set)  # process ids

    def read(self, message: Message) -> None:
        """Collect process ids and the number of hosts from one message."""
        text = message.text
        if engine := _VLLM_ENGINE.search(text):
            self._vllm_sizes.append(int(engine[1]) * int(engine[2]))
        if worker := _VLLM_WORKER.search(message.prefix.stream):
            self.hosts = self.hosts or 1
            if _VLLM_READY in text:
                self._vllm_workers.add(int(worker[1]))
        if self.hosts != 2:
            if _MANY_HOSTS.search(text):
                self.hosts = 2
            elif _ONE_HOST.search(text):
                self.hosts = 1
        if "pid" in text or "PID" in text or "NCCL INFO" in text or "pid=" in message.prefix.stream:
            for line in text.splitlines()[:60]:
                self._read_pid(line, message)

    def _read_pid(self, line: str, message: Message) -> None:
        if len(self.pids) >= _MOST_PIDS:
            return
        owner = _search(_OWNER, line)
        pid = _search(_STREAM_PID, message.prefix.stream) if owner is None else owner
        rank = None if "worker (pid" in line else _search(_OWN_RANK, line)
        if rank is None and owner is not None and _OWN_PID.fullmatch(line.strip()):
            rank = _search(_RANK_IN_FILE, message.file) if message.prefix.rank is None else message.prefix.rank
        if pid is not None and rank is not None:
            self.pids.setdefault(pid, rank)

    def of(self, message: Message) -> int | None:
        """The rank of the process id that the message names or comes from."""
        named = [_number(match) for match in _PID.finditer(message.text[:4000])]
        pids = (_search(_STREAM_PID, message.prefix.stream), message.pid, *named)
        known = self.pids
        if self._vllm_sizes == [len(self._vllm_workers) + 1]:
            known = known | {pid: rank for rank, pid in enumerate(sorted(self._vllm_workers), 1)}
        return next((known[pid] for pid in pids if pid in known), None)

    def of_device(self, local: int | None) -> int | None:
        """The rank of a GPU's index. With one process per GPU on one host both are the same."""
        if local is None or self.hosts == 2:
            return None
        return local if self.hosts == 1 or len(self.gpus) > 1 else None


def find_rank(message: Message, weight: Weight, files: int) -> int | None:
    """Return the rank that the message's prefix, text or file name has; None without one."""
    rank = message.prefix.rank
    if rank is None and weight != "secondary":
        rank = _search(_RANK_BEFORE, message.text)
    if rank is None and weight in ("cause", "likely"):
        rank = _search(_RANK_IN_TEXT, message.text[:600])
    return _search(_RANK_IN_FILE, message.file) if rank is None and files > 1 else rank


def find_local_gpu(message: Message) -> int | None:
    """Return the index of the GPU that the message names; None without one."""
    return _search(_LOCAL, message.text)


def find_nccl_device(message: Message) -> int | None:
    """Return the device in NCCL's prefix. On one host it is the rank."""
    return _search(_NCCL_DEVICE, message.text)


def _search(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return _number(match) if match else None


def _number(match: re.Match[str]) -> int:
    return int(next(group for group in match.groups() if group is not None))
