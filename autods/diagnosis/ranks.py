"""Whose line it is: the rank by prefix, words or file name, and by what the log says of process ids, hosts and GPUs."""

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
_OF_NCCL = re.compile(r"^\S+:\d+:\d+ \[(\d+)\] ")  # the device, which is the rank on the first host
_LOCAL = re.compile(
    r"\bGPU (\d+)(?: has a total|;)|\((?:GPU|NPU|XPU|HPU|DCU) (\d+);|Allocation on device (\d+) would",
)
_PID = re.compile(
    r"\b(?:pid|PID)\b[=: ]{1,3}(\d+)|^\S+?:(\d{2,}):\d{2,} \[\d+\] |Killed process (\d+)|^\((?:\w+ )?pid=(\d+)"
)
_OWNER = re.compile(
    r"\bpid\)?[=: ]{1,3}(\d+)|^[\w.-]+:(\d{2,}):\d{2,} \[\d+\] |\blocal_rank: \d+ \(pid: (\d+)\)", re.IGNORECASE
)
_OWN_RANK = re.compile(r"\b(?:world_rank|global_rank|rank|RankID)[=: ]{1,2}(\d+)\b", re.IGNORECASE)
_WORKER_NAMED = re.compile(r"\((?:\w*[Ww]orker\w*|rank|trainer)[_\- ]?(?:rank[_=]?)?(\d+)\b[^()]* pid=(\d+)")
_ONE_HOST = re.compile(
    r"WORLD INFO DICT: \{'[^']+': \[[\d, ]*\]\}|nnodes=1,|--nnodes[= ]1\b(?!:)|--standalone|--num_machines[= ]1\b|num_machines: 1\b"
    r"|with local resources only|\bnodes?=1\b|gpu_ids=|CUDA_VISIBLE_DEVICES"
)
_MANY_HOSTS = re.compile(
    r"WORLD INFO DICT: \{'[^']+': \[[\d, ]*\], '|nnodes=(?:[2-9]|\d\d)|--nnodes[= ](?:[2-9]|\d\d)|--num_machines[= ](?:[2-9]|\d\d)|\bnode_rank=[1-9]"
)
_MOST_PIDS = 20_000


@dataclass(slots=True)
class Ranks:
    """Collects who is who. hosts: 1, 2 (more than one), or None where nothing tells."""

    pids: dict[int, int] = field(default_factory=dict)
    hosts: int | None = None
    gpus: set[int] = field(default_factory=set)  # that messages without a rank name

    def read(self, message: Message) -> None:
        """What one message tells of process ids, hosts and GPUs."""
        text = message.text
        if self.hosts != 2:
            if _MANY_HOSTS.search(text):
                self.hosts = 2
            elif _ONE_HOST.search(text):
                self.hosts = 1
        if "pid" in text or "PID" in text or "NCCL INFO" in text or "pid=" in message.prefix.stream:
            for line in (text, *text.splitlines()[1:60]):
                self._pid(line.partition("\n")[0], message)

    def _pid(self, line: str, message: Message) -> None:
        if len(self.pids) >= _MOST_PIDS:
            return
        if named := _WORKER_NAMED.search(f"{message.prefix.stream} {line}"):
            self.pids.setdefault(int(named[2]), int(named[1]))
        pid = _OWNER.search(line)
        owner = _number(pid) if pid else _pid_in(message.prefix.stream)
        if owner is None:
            return
        rank = _OWN_RANK.search(line)
        if rank is not None and "worker (pid" not in line:
            self.pids.setdefault(owner, int(rank[1]))
        elif pid is not None and _speaks_of_itself(line):
            of_file = message.prefix.rank if message.prefix.rank is not None else rank_of_file(message.file)
            if of_file is not None:
                self.pids.setdefault(owner, of_file)

    def of(self, message: Message) -> int | None:
        """The rank of the process that the message names or comes from, by its process id."""
        for pid in (_pid_in(message.prefix.stream), message.pid, *_pids_in(message.text)):
            if pid is not None and pid in self.pids:
                return self.pids[pid]
        return None

    def of_device(self, local: int | None) -> int | None:
        """The rank of a GPU's index: with one process a GPU on one host they are the same."""
        if local is None or self.hosts == 2:
            return None
        return local if self.hosts == 1 or len(self.gpus) > 1 else None


def rank_of(message: Message, weight: Weight, files: int) -> int | None:
    """The rank that the prefix, the text or the file's name tells."""
    rank = message.prefix.rank
    if rank is None and weight != "secondary" and (found := _RANK_BEFORE.search(message.text)):
        rank = _number(found)
    if rank is None and weight in ("cause", "likely") and (found := _RANK_IN_TEXT.search(message.text[:600])):
        rank = _number(found)
    if rank is None and files > 1:
        rank = rank_of_file(message.file)
    return rank


def local_of(message: Message) -> int | None:
    """The index of the GPU, or of the process on its host, that the message names."""
    found = _LOCAL.search(message.text)
    return _number(found) if found else None


def nccl_device_of(message: Message) -> int | None:
    """The device in NCCL's own prefix: the rank, where nothing better names it and there is one host."""
    found = _OF_NCCL.search(message.text)
    return int(found[1]) if found else None


def rank_of_file(name: str) -> int | None:
    """The rank that a log's name tells: 'rank_3.log', 'attempt_0/3/stderr.log'."""
    found = _RANK_IN_FILE.search(name)
    return _number(found) if found else None


def _speaks_of_itself(line: str) -> bool:
    return (
        re.fullmatch(
            r"\W*(?:(?:my|own|process|this|running|started|trainer|main)\W+){0,4}pid\W{1,3}\d+\W*",
            line.strip(),
            re.IGNORECASE,
        )
        is not None
    )


def _pid_in(stream: str) -> int | None:
    found = re.search(r"\bpid=(\d+)", stream)
    return int(found[1]) if found else None


def _pids_in(text: str) -> list[int]:
    return [_number(found) for found in _PID.finditer(text[:4000])]


def _number(found: re.Match[str]) -> int:
    return int(next(group for group in found.groups() if group is not None))
