"""From how the ranks of a trial ended to its outcome."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import InputError
from ..types import Action, Device, Failed, OutOfMemory, Phase, Tier
from ..units import format_bytes
from .exit_codes import MEANINGS
from .messages import BOILERPLATE
from .rules import Signature, first_match
from .values import Kind, shortage_in

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
            return f"the OOM killer of its cgroup struck ({format_bytes(self.limit_bytes)} are its limit)"
        if self.machine_kills:
            return f"the kernel's OOM killer struck ({format_bytes(self.limit_bytes)} of memory)"
        if self.least_free_bytes < _NEARLY_FULL * self.limit_bytes:
            return f"only {format_bytes(self.least_free_bytes)} of {format_bytes(self.limit_bytes)} were free"
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
    hint: str | None = None
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


_UNWRITTEN = 98  # how a rank leaves when even its result file fails, see `runner.ranks`


@dataclass(frozen=True, slots=True)
class Said:
    """What is said of the rank that is the cause."""

    kind: Kind
    action: Action
    evidence: str
    advice: str
    tier: Tier | None = None


def meaning_of(cause: Evidence) -> Said:
    """By the strongest evidence there is."""
    if cause.contract:
        return Said("user_code", "fix_code", cause.contract, cause.hint or "")
    if cause.lost:
        return _lost(cause)
    if cause.signal_name:
        return _signalled(cause, cause.signal_name)
    if "SystemExit" in cause.types:
        said = f"{_where(cause)}sys.exit({cause.message}) was called"
        return Said("user_code", "fix_code", said, "a workload must not leave the process")
    if not cause.types:
        if cause.exit == _UNWRITTEN:
            said = "the rank could not write its result"
            return Said("infrastructure", "fix_environment", said, "look for space left in --out: df -h")
        said = f"the process left with exit code {cause.exit} and no result"
        return Said("user_code", "fix_code", said, "something called os._exit or exec")
    if cause.phase in ("start", "rendezvous") and not cause.user_frame:
        return Said("infrastructure", "retry", cause.headline, "the ranks could not find each other")
    # The workload's own code runs while building, in forward and in backward; the rest is DeepSpeed with its config.
    if cause.phase in ("init", "step", "save", "load") and not cause.user_frame:
        return Said("config", "fix_config", cause.headline, "DeepSpeed cannot work with this model and config")
    said = f"{_where(cause)}{cause.headline}"
    return Said("user_code", "fix_code", said, f"the workload raised it in {cause.phase}")


def _where(cause: Evidence) -> str:
    return f"{cause.user_frame}: " if cause.user_frame else ""


def _lost(cause: Evidence) -> Said:
    match cause.lost:
        case "stopped":
            said = "the process was stopped (SIGSTOP) and did not go on"
            return Said("infrastructure", "retry", said, "see who stops it")
        case "wall limit":
            said = "the trial took longer than the wall limit"
            return Said("infrastructure", "retry", said, "raise limits.wall_s")
        case _:
            said = f"no rank moved for the stall limit; this one beat last in {cause.phase}"
            return Said("communication", "retry", said, "its stack is at the end of its log")


def _signalled(cause: Evidence, name: str) -> Said:
    if name == "SIGKILL":
        return _killed(cause)
    meaning = MEANINGS.get(cause.exit or 0)
    said = f"killed by {name}{_last_word(cause)}"
    if meaning is None or meaning.kind == "unknown":
        return Said("unknown", "retry", said, "its stack is at the end of its log")
    return Said(meaning.kind, meaning.action, said, meaning.advice, meaning.tier)


def _killed(cause: Evidence) -> Said:
    """SIGKILL: the OOM killer's, if something else than the signal says so."""
    why = cause.host.killed if cause.host else None
    if cause.host is None or why is None:
        return Said("unknown", "retry", "killed by SIGKILL, by no one of ours", MEANINGS[-signal.SIGKILL].advice)
    held = cause.host.peak_rss_bytes.get(str(cause.rank))
    said = f"killed by SIGKILL while {why}" if why.startswith("only") else f"killed by SIGKILL: {why}"
    return Said(
        "out_of_memory", "less_host_memory", f"{said}; it held {format_bytes(held)}" if held else said,
        "the host's memory is full: offload less (or to NVMe), or give the node or its cgroup more memory", "host",
    )  # fmt: skip


def _last_word(cause: Evidence) -> str:
    lines = [line.strip() for line in cause.text.splitlines() if line.strip()]
    assertion = next((line for line in reversed(lines) if "ssert" in line), None)
    return f": {assertion}" if assertion else ""


_INVALID = re.compile(r"\n(\S+)\n  (.+?)(?: \[type=|\n|$)")
_OP = re.compile(
    r"building extension '(\w+)'|(?:Deep[Ss]peed|DS_)?(cpu_adam|fused_adam|async_io)(?:\.so|')|'(\w+)Builder'"
)
# By torch, DeepSpeed's layers of experts, and trainers that compare the samples of a batch with each other.
_TOO_SMALL = re.compile(
    r"Expected more than 1 (?:value per channel|spatial element) when training|than min_capacity\b"
    r"|batch[ _]size (?:must|has to|should) be (?:>|greater than|larger than|at least) ?[1-4]\b"
    r"|batch[ _]size \(\d+\) must be (?:evenly )?divisible by (?:the number of generations|num_generations)",
    re.IGNORECASE,
)
_EVIDENCE_CHARS = 400


def outcome_of(ends: Sequence[Evidence]) -> OutOfMemory | Failed:
    """The verdict on a trial whose ranks did not all succeed: that of the first rank that failed by itself."""
    # In time, and read only until one speaks for itself: thousands of ranks may have something to say.
    in_time = sorted(ends, key=lambda evidence: evidence.at_s)
    cause = next((evidence for evidence in in_time if not _noticed(evidence)), in_time[0])
    row = row_of(cause)
    said = _by_row(cause, row) if row is not None and not cause.contract and not cause.lost else meaning_of(cause)
    if said.kind == "out_of_memory":
        return _out_of_memory(cause, said)
    return _failed(cause, said)


def _noticed(evidence: Evidence) -> bool:
    """Whether it only saw another rank fail."""
    row = row_of(evidence)
    return (row is not None and row.weight == "secondary") or evidence.waits


def row_of(evidence: Evidence) -> Signature | None:
    """The row that its exception matches, or the last words of a process that died by a signal."""
    row = _by_exception(evidence) if evidence.types else _by_last_words(evidence)
    if row is None:
        return None
    if row.name == "missing-package" and evidence.user_frame:
        return None  # the workload's own import: its file and line say more
    if row.budget and evidence.device == "cpu":  # the budgeted process memory is the device
        return replace(row, kind="out_of_memory", tier="device", action="leaner_rung")
    if row.killed and evidence.host and not evidence.host.killed:
        return replace(row, kind="unknown", tier=None, action="retry")
    return row


def _by_exception(evidence: Evidence) -> Signature | None:
    """By its type and message, those of its base classes, and where these say nothing by what it was raised from."""
    text = "\n".join(line for line in evidence.said.splitlines() if not BOILERPLATE.match(line))
    row = first_match(text, type=evidence.types[0], stack=evidence.stack)
    if row is None or row.name == "any-exception":
        own = (first_match(text, type=base, stack=evidence.stack) for base in evidence.types[1:])
        row = next((found for found in own if found is not None and found.name != "any-exception"), None)
    if row is None or row.kind == "unknown":
        causes = (first_match(f"{type}: {message}", type=type) for type, message in evidence.causes)
        row = next((found for found in causes if found is not None and found.kind == "out_of_memory"), row)
    if (row is None or row.kind == "unknown") and "DistBackendError" in evidence.types:
        row = _memory_in(_rows_of(evidence.log_tail)) or row  # NCCL writes why into the log, its exception only that
    return row


def _by_last_words(evidence: Evidence) -> Signature | None:
    """Memory that ran out, whatever was said after it; else of an abort that a peer was waited for in vain."""
    rows = _rows_of(evidence.text)
    peer = next((row for row in rows if row.weight == "secondary"), None)
    return _memory_in(rows) or (peer if evidence.signal_name == "SIGABRT" else None)


def _rows_of(text: str) -> list[Signature]:
    """Of the last lines, the last one first."""
    return [row for line in reversed(text.splitlines()[-40:]) if (row := first_match(line)) is not None]


def _memory_in(rows: Sequence[Signature]) -> Signature | None:
    return next((row for row in rows if row.weight in ("decisive", "cause") and row.kind == "out_of_memory"), None)


def _by_row(cause: Evidence, row: Signature) -> Said:
    notes = replace(shortage_in(cause.text), **_allocator(cause)).notes() if row.tier == "device" else ()
    advice = "; ".join((*notes, row.advice))
    return Said(row.kind, row.action, _line(cause, row), advice, tier=row.tier)


def _allocator(cause: Evidence) -> dict[str, int]:
    """The allocator's own figure, where the message does not have it."""
    return {} if cause.idle_bytes is None else {"idle_bytes": cause.idle_bytes}


def _out_of_memory(cause: Evidence, said: Said) -> OutOfMemory:
    assert said.tier is not None
    limit = cause.host.limit_bytes if cause.host and said.tier == "host" else None
    shortage = shortage_in(cause.text)
    return OutOfMemory(
        tier=said.tier,
        rank=cause.rank,
        phase=cause.phase,
        step=cause.step,
        evidence=said.evidence[:_EVIDENCE_CHARS],
        wanted_bytes=shortage.wanted_bytes,
        free_bytes=shortage.free_bytes if shortage.free_bytes is not None else cause.free_bytes,
        limit_bytes=cause.limit_bytes if said.tier == "device" else limit,
        action=said.action,
        advice=said.advice,
    )


def _failed(cause: Evidence, said: Said) -> Failed:
    assert said.kind != "out_of_memory"
    assert said.kind != "none"
    return Failed(
        failure=said.kind,
        rank=cause.rank,
        phase=cause.phase,
        step=cause.step,
        evidence=said.evidence[:_EVIDENCE_CHARS],
        action=said.action,
        advice=said.advice,
        op=_op_in(cause.text) if said.kind == "toolchain" else None,
        wants_larger_batch=said.kind in ("user_code", "config") and wants_larger_batch(cause.text),
    )


def wants_larger_batch(text: str) -> bool:
    """Whether it says that a model cannot be trained with so small a micro batch."""
    return _TOO_SMALL.search(text) is not None


def _op_in(text: str) -> str | None:
    """The DeepSpeed op that a toolchain failure is about."""
    found = _OP.search(text)
    return next(filter(None, found.groups())) if found else None


def _line(cause: Evidence, row: Signature) -> str:
    """The line of the text that proves it."""
    if "ValidationError" in cause.types and (said := _INVALID.search(cause.message)):
        return f"{said[1]}: {said[2]}"  # pydantic's first line only counts the errors
    for line in cause.text.splitlines():
        low = line.lower()
        if any(words in low for words in row.says) or (
            not row.says and row.pattern and re.search(row.pattern, line, re.IGNORECASE)
        ):
            return line.strip()[:_EVIDENCE_CHARS]
    return cause.headline[:_EVIDENCE_CHARS]


CONFIG = "DeepSpeed config"
_PLACE = re.compile(r"(/[^\n]*?\.py:\d+): ")


def input_error(failure: Failed, path: str, log: Path) -> InputError:
    """What was wrong and where: the workload at `path`, with the line where it is known, or the DeepSpeed config."""
    where = CONFIG if failure.action == "fix_config" else path
    said = failure.evidence
    if where == path and (place := _PLACE.match(said)):  # a line of the workload, or of a module that it imports
        where, said = place[1], said[place.end() :]
    seen = f"rank {failure.rank}, {failure.phase}; log: {log}"
    return InputError(said, where=where, hint=f"{failure.advice} ({seen})" if failure.advice else seen)
