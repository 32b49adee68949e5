"""What is known of how one rank ended."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..outcomes import Phase
from ..units import show_bytes
from ..values import Device

_NEARLY_FULL = 0.02  # of the limit: kernels and daemons that watch memory strike before it is all gone

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# faulthandler's dump, innermost frame first: this rank is in a collective, or in DeepSpeed awaiting one.
_AWAITING = re.compile(
    r"Current thread [^\n]*\n  File \"[^\"\n]*/(torch/distributed|deepspeed/comm|deepspeed/runtime)/"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The node's memory during the trial, noted by the process that watched its ranks.

    group_kills, machine_kills: what OOM killers ended meanwhile, in the fit's cgroup and on the whole machine.
    """

    limit_bytes: int
    least_free_bytes: int
    group_kills: int = 0
    machine_kills: int = 0
    peak_rss_bytes: Mapping[str, int] = field(default_factory=dict)  # by rank

    @property
    def killed(self) -> str | None:
        """What speaks for an OOM killer, if anything does; a SIGKILL alone does not."""
        if self.group_kills:
            return f"the OOM killer of its cgroup struck ({show_bytes(self.limit_bytes)} are its limit)"
        if self.machine_kills:
            return f"the kernel's OOM killer struck ({show_bytes(self.limit_bytes)} of memory)"
        if self.least_free_bytes < _NEARLY_FULL * self.limit_bytes:
            return f"only {show_bytes(self.least_free_bytes)} of {show_bytes(self.limit_bytes)} were free"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One rank's end: by exception (`types` …), by signal or exit code (`exit`), or lost (`lost`: stuck, stopped)."""

    rank: int
    phase: Phase
    step: int
    at_s: float
    device: Device
    limit_bytes: int | None = None
    exit: int | None = None  # negative: the signal, as subprocess says it
    lost: str | None = None
    types: tuple[str, ...] = ()
    message: str = ""
    traceback: str = ""
    causes: tuple[tuple[str, str], ...] = ()  # type and message of what it was raised from, the nearest first
    user_frame: str | None = None
    contract: str | None = None  # what of the Workload contract was broken
    mend: str | None = None
    free_bytes: int | None = None
    log_tail: str = ""
    host: HostMemory | None = None
    idle_bytes: int | None = None  # reserved by the device's allocator, holding no tensor

    @property
    def signal_name(self) -> str | None:
        """'SIGKILL' for exit −9."""
        if self.exit is None or self.exit >= 0:
            return None
        return signal.Signals(-self.exit).name

    @property
    def said(self) -> str:
        """The exception with its message, without the stack."""
        return f"{self.types[0]}: {self.message}" if self.types else ""

    @property
    def stack(self) -> str:
        """The frames of its own traceback, as the signatures read those of a log: no indent, no message, no carets."""
        _, _, own = self.traceback.rpartition("Traceback (most recent call last):\n")
        frames = itertools.takewhile(lambda line: line.startswith("  "), own.splitlines())
        return "\n".join(line.strip() for line in frames if line.strip(" ^~"))

    @property
    def text(self) -> str:
        """All that can be matched: the exception, or what a process that died by a signal left in its log."""
        if self.types:
            return f"{self.types[0]}: {self.message}\n{self.traceback}"
        if self.exit == -signal.SIGKILL:  # it could not say anything: what stands in the log is about something else
            return ""
        return _ANSI.sub("", self.log_tail)

    @property
    def waits(self) -> bool:
        """A lost rank whose stack shows that it waits for the others."""
        return self.lost is not None and _AWAITING.search(self.log_tail) is not None

    @property
    def headline(self) -> str:
        """The exception in one line: the first line of its message that says something."""
        line = next((line.strip() for line in self.message.splitlines() if line.strip()), "")
        return f"{self.types[0]}: {line}" if self.types else line


def from_end(
    end: Mapping[str, Any], *, device: Device, limit_bytes: int | None, host: Mapping[str, Any] | None = None
) -> Evidence:
    """Evidence from what the watcher noted of a rank and of its node's memory."""
    record = end["record"] or {}
    error = record.get("error") or {}
    return Evidence(
        rank=end["rank"],
        phase=record.get("phase", end["phase"]),
        step=record.get("step", end["step"]),
        at_s=end["at_s"],
        device=device,
        limit_bytes=limit_bytes,
        exit=end["exit"],
        lost=end.get("lost"),
        types=tuple(error.get("types", ())),
        message=error.get("message", ""),
        traceback=error.get("traceback", ""),
        causes=tuple((type, message) for type, message in error.get("causes", ())),
        user_frame=error.get("user_frame"),
        contract=error.get("contract"),
        mend=error.get("mend"),
        free_bytes=record.get("free_bytes"),
        log_tail=end.get("log_tail", ""),
        host=HostMemory(**host) if host else None,
        idle_bytes=record.get("idle_bytes"),
    )
