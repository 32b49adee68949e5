"""Which rank is the cause, and what its end means for the walk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ..outcomes import Failed, OutOfMemory
from .evidence import Evidence
from .patterns import BOILERPLATE
from .shortage import shortage_in
from .signatures import Signature, first_match
from .unsaid import Said, meaning_of

_INVALID = re.compile(r"\n(\S+)\n  (.+?)(?: \[type=|\n|$)")
_OP = re.compile(
    r"building extension '(\w+)'|(?:Deep[Ss]peed|DS_)?(cpu_adam|fused_adam|async_io)(?:\.so|')|'(\w+)Builder'"
)
_TOO_SMALL = re.compile(r"Expected more than 1 (?:value per channel|spatial element) when training|than min_capacity\b")
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
        wants_larger_batch=said.kind == "user_code" and wants_larger_batch(cause.text),
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
