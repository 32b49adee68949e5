"""Find the rank that a message belongs to: by prefix, text or file name, by process id, or by GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .messages import Message
from .rules import Weight

_RANK_IN_TEXT = re.compile(
    r"\b(?:global[_ ]?rank|rank)\s?[:=#]?\s?(\d+)\b|\[rank(\d+)\]|task (\d+):|RankID:(\d+)", re.IGNORECASE
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
    r"WORLD INFO DICT: \{'[^']+': \[[\d, ]*\]\}|nnodes=1,|--nnodes[= ]1\b(?!:)|--standalone|--num_machines[= ]1\b|num_machines: 1\b"
    r"|with local resources only|\bnodes?=1\b|gpu_ids=|CUDA_VISIBLE_DEVICES"
)
_MANY_HOSTS = re.compile(
    r"WORLD INFO DICT: \{'[^']+': \[[\d, ]*\], '|nnodes=(?:[2-9]|\d\d)|--nnodes[= ](?:[2-9]|\d\d)|--num_machines[= ](?:[2-9]|\d\d)|\bnode_rank=[1-9]"
)
_OWN_PID = re.compile(
    r"\W*(?:(?:my|own|process|this|running|started|trainer|main)\W+){0,4}pid\W{1,3}\d+\W*", re.IGNORECASE
)
_MOST_PIDS = 20_000


@dataclass(slots=True)
class Ranks:
    """The ranks of process ids and GPUs, collected from messages. `hosts` is 1, 2 for more than one, or None."""

    pids: dict[int, int] = field(default_factory=dict)
    hosts: int | None = None
    gpus: set[int] = field(default_factory=set)  # named by messages that name no rank

    def read(self, message: Message) -> None:
        """Collect process ids and the number of hosts from one message."""
        text = message.text
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
        return next((self.pids[pid] for pid in pids if pid in self.pids), None)

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
