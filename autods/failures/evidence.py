"""What is known of how one rank ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..values import Device, Phase

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# faulthandler's dump, innermost frame first: this rank is in a collective, or in DeepSpeed awaiting one.
_AWAITING = re.compile(
    r"Current thread [^\n]*\n  File \"[^\"\n]*/(torch/distributed|deepspeed/comm|deepspeed/runtime)/"
)


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
    functions: tuple[str, ...] = ()  # of the stack, outermost first
    user_frame: str | None = None
    contract: str | None = None  # what of the Workload contract was broken
    mend: str | None = None
    free_bytes: int | None = None
    log_tail: str = ""

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


def from_end(end: Mapping[str, Any], *, device: Device, limit_bytes: int | None) -> Evidence:
    """Evidence from what the watcher noted of a rank."""
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
        functions=tuple(error.get("functions", ())),
        user_frame=error.get("user_frame"),
        contract=error.get("contract"),
        mend=error.get("mend"),
        free_bytes=record.get("free_bytes"),
        log_tail=end.get("log_tail", ""),
    )
