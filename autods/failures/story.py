"""What was read of a run: findings, ends, how far it trained, who is who."""

from __future__ import annotations

from dataclasses import dataclass, field

from .clock import Clock
from .exits import Exit
from .messages import Message
from .ranks import Ranks, local_of, nccl_device_of, rank_of
from .signatures import Signature


@dataclass(slots=True)
class Finding:
    """A message and the row that it matched.

    local: the GPU's index; nccl: the device in NCCL's prefix. when: as its file tells it.
    """

    row: Signature
    message: Message
    rank: int | None
    local: int | None = None
    nccl: int | None = None
    when: Clock | None = None


@dataclass(slots=True)
class Story:
    """What was read. progress: per file, at its end. root_rank: whom torchrun saw fail first. last: of each file."""

    findings: list[Finding] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    ranks: Ranks = field(default_factory=Ranks)
    first_exit: Exit | None = None
    root_rank: int | None = None
    named_rank: int | None = None  # an error line without a cause names it
    progress: dict[str, int] = field(default_factory=dict)
    last: dict[str, list[str]] = field(default_factory=dict)
    bytes: int = 0
    files: int = 1
    text: bool = True

    def rank(self, one: Finding) -> int | None:
        """Of the process that a finding is about: by its own words, then by its process id, then by its GPU."""
        found = (one.rank, self.ranks.of(one.message), self.ranks.of_device(one.local))
        return next((rank for rank in found if rank is not None), None)


def finding_of(row: Signature, message: Message, files: int, when: Clock | None = None) -> Finding:
    """With the rank and the GPU that the message itself names."""
    rank = rank_of(message, row.weight, files)
    return Finding(row, message, rank, local_of(message), nccl_device_of(message), when)
