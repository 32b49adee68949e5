"""What is known of the end of a rank: its exception, its exit, and the memory of its node."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..plain_text import clean
from ..system.stacks import Frame, find_hang
from ..types import Phase
from ..units import format_bytes, format_signal

LostBecause = Literal["stopped", "stuck", "wall limit"]
# A rank leaves with one of these when even its result file cannot be written: by the disk's fault, or by another.
RESULT_UNWRITTEN_EXIT, RESULT_PREVENTED_EXIT = 98, 96
_MOST_LISTED = 4  # lines of a message after its first one
_NEARLY_FULL = 0.02  # of the limit: kernels and daemons that watch memory strike before it is all gone


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUsage:
    """The node's memory during the trial, recorded by the process that watches the node's ranks.

    `group_kills` counts OOM kills in the fit's cgroup during the trial. `machine_kills` counts those on the whole
    machine.
    """

    limit_bytes: int
    least_free_bytes: int
    group_kills: int = 0
    machine_kills: int = 0
    peak_rss_bytes: Mapping[str, int] = field(default_factory=dict)  # by rank

    @property
    def is_exhausted(self) -> bool:
        """Whether the memory of this node, or of the fit's cgroup, was used up. Kills elsewhere do not count."""
        return self.group_kills > 0 or self.least_free_bytes < _NEARLY_FULL * self.limit_bytes

    @property
    def oom_kill_evidence(self) -> str | None:
        """A sentence that shows that an OOM killer struck; None without a sign of it. A SIGKILL alone is no sign."""
        if self.group_kills:
            return f"the OOM killer of its cgroup struck (the limit is {format_bytes(self.limit_bytes)})"
        if self.machine_kills:
            return f"the kernel's OOM killer struck ({format_bytes(self.limit_bytes)} of memory)"
        if self.least_free_bytes < _NEARLY_FULL * self.limit_bytes:
            return f"only {format_bytes(self.least_free_bytes)} of {format_bytes(self.limit_bytes)} were free"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An exception as the rank describes it, see `rank.record.describe_error`. Its texts are printable.

    `types` are the exception's class and its bases, the most derived first. `causes` are type and message of the
    exceptions that it was raised from, the nearest first. `user_frame` is the innermost line of the user's files.
    `contract` is the part of the workload contract that was broken, and `own_batch` that of a `WorkloadError`.
    """

    types: tuple[str, ...] = ()
    message: str = ""
    traceback: str = ""
    causes: tuple[tuple[str, str], ...] = ()
    user_frame: str | None = None
    contract: str | None = None
    own_batch: int | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended: by an exception, by a signal or exit code, or lost.

    `at_s` is the moment of its error. If it wrote none, its end was seen then, or its last heartbeat came.
    """

    rank: int
    phase: Phase
    step: int
    at_s: float
    exit_code: int | None = None  # negative: the signal; None: it was lost before it ended
    lost: LostBecause | None = None
    lost_after_s: float = 0.0  # the limit that was passed
    error: RankError = field(default_factory=RankError)  # empty where there was none
    free_bytes: int | None = None  # of the device, when the error came
    idle_bytes: int | None = None  # reserved by the device's allocator, holding no tensor
    log_tail: str = ""  # empty where a result or an error says enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(RankEnd):
    """The end of a rank, with its device, the limit of that, and the memory of its node."""

    device: str
    limit_bytes: int | None = None
    host: HostUsage | None = None

    @property
    def signal_name(self) -> str | None:
        """'SIGKILL' for exit −9."""
        return format_signal(-self.exit_code) if self.exit_code is not None and self.exit_code < 0 else None

    @property
    def is_oom_kill(self) -> bool:
        """Whether the OOM killer of its cgroup probably ended this rank."""
        return self.signal_name == "SIGKILL" and self.host is not None and self.host.group_kills > 0

    @property
    def headline(self) -> str:
        """The exception's type, and the first line of its message that is not blank, with the list that it begins."""
        line, *others = [line.strip() for line in self.error.message.splitlines() if line.strip()] or [""]
        if line.endswith(":"):
            line = f"{line} {'; '.join(others[:_MOST_LISTED])}"
        return ": ".join((*self.error.types[:1], *([line] if line else [])))

    @property
    def stack(self) -> str:
        """The frames of the last traceback in the form in which rows match those of a log: no indent, no carets."""
        _, _, last = self.error.traceback.rpartition("Traceback (most recent call last):\n")
        frames = itertools.takewhile(lambda line: line.startswith("  "), last.splitlines())
        return "\n".join(line.strip() for line in frames if line.strip(" ^~"))

    @property
    def hang(self) -> Frame | None:
        """The line of the user's code where the rank was stuck; None where it was not, or waited for another rank."""
        return find_hang(self.log_tail) if self.lost == "stuck" else None

    @property
    def text(self) -> str:
        """The exception, or the last log lines of a process that died by a signal."""
        if self.error.types:
            return f"{self.error.types[0]}: {self.error.message}\n{self.error.traceback}"
        if self.exit_code == -signal.SIGKILL:  # the process could not write a reason: its log is about something else
            return ""
        return clean(self.log_tail)
