"""Which rank is the cause, and what its end means for the walk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ..values import Action, Failed, FailureKind, OutOfMemory
from .evidence import Evidence
from .messages import BOILERPLATE
from .shortage import shortage_in
from .signatures import Signature, first_match

_INVALID = re.compile(r"\n(\S+)\n  (.+?)(?: \[type=|\n|$)")
_EVIDENCE_CHARS = 400
_UNWRITTEN = 98  # how a rank leaves when even its result file fails, see `cluster.supervise`


def outcome_of(ends: Sequence[Evidence]) -> OutOfMemory | Failed:
    """The verdict on a trial whose ranks did not all succeed: that of the first rank that failed by itself."""
    rows = {evidence.rank: row_of(evidence) for evidence in ends}

    def order(evidence: Evidence) -> tuple[bool, float]:
        row = rows[evidence.rank]
        return (row is not None and row.weight == "secondary") or evidence.waits, evidence.at_s

    cause = min(ends, key=order)
    row = rows[cause.rank]
    if row is not None and row.kind == "out_of_memory":
        return _out_of_memory(cause, row)
    return _failed(cause, row)


def row_of(evidence: Evidence) -> Signature | None:
    """The row that its exception matches, or the last words of a process that died by a signal."""
    if evidence.types:
        text = "\n".join(line for line in evidence.said.splitlines() if not BOILERPLATE.match(line))
        row = first_match(text, type=evidence.types[0], stack=evidence.traceback)
        if row is None or row.name == "any-exception":
            own = (first_match(text, type=base, stack=evidence.traceback) for base in evidence.types[1:])
            row = next((found for found in own if found is not None and found.name != "any-exception"), None)
    else:
        row = next(filter(None, (_last_words(line) for line in reversed(evidence.text.splitlines()[-40:]))), None)
    if row is not None and row.name == "missing-package" and evidence.user_frame:
        return None  # the workload's own import: its file and line say more
    full = row is not None and row.weight != "decisive" and (row.tier == "host" or row.budget)
    if row is not None and full and evidence.device == "cpu":
        return replace(
            row, kind="out_of_memory", tier="device", action="leaner_rung"
        )  # the budgeted process memory is the device
    return row


def _last_words(line: str) -> Signature | None:
    row = first_match(line)
    return row if row is not None and row.weight in ("decisive", "cause") and row.kind == "out_of_memory" else None


def _out_of_memory(cause: Evidence, row: Signature) -> OutOfMemory:
    assert row.tier is not None
    shortage = shortage_in(cause.text)
    return OutOfMemory(
        tier=row.tier,
        rank=cause.rank,
        phase=cause.phase,
        step=cause.step,
        evidence=_line(cause, row),
        wanted_bytes=shortage.wanted_bytes,
        free_bytes=shortage.free_bytes if shortage.free_bytes is not None else cause.free_bytes,
        limit_bytes=cause.limit_bytes,
    )


def _failed(cause: Evidence, row: Signature | None) -> Failed:
    kind, action, said, advice = _meaning(cause, row)
    return Failed(
        failure=kind,
        rank=cause.rank,
        phase=cause.phase,
        step=cause.step,
        evidence=said[:_EVIDENCE_CHARS],
        action=action,
        advice=advice,
    )


def _meaning(cause: Evidence, row: Signature | None) -> tuple[FailureKind, Action, str, str]:
    """Kind, action, evidence and advice, by the strongest evidence there is."""
    if cause.contract:
        return "user_code", "fix_code", cause.contract, cause.mend or ""
    if cause.lost:
        return _lost(cause)
    if row is not None:
        assert row.kind != "out_of_memory"
        assert row.kind != "none"
        return row.kind, row.action, _line(cause, row), row.advice
    if cause.signal_name:
        return _signalled(cause, cause.signal_name)
    if "SystemExit" in cause.types:
        said = f"{_where(cause)}sys.exit({cause.message}) was called"
        return "user_code", "fix_code", said, "a workload must not leave the process"
    if not cause.types:
        if cause.exit == _UNWRITTEN:
            said = "the rank could not write its result"
            return "infrastructure", "fix_environment", said, "look for space left in --out: df -h"
        said = f"the process left with exit code {cause.exit} and no result"
        return "user_code", "fix_code", said, "something called os._exit or exec"
    if cause.phase in ("start", "rendezvous") and not cause.user_frame:
        return "infrastructure", "retry", cause.headline, "the ranks could not find each other"
    # The workload's own code runs while building, in forward and in backward; the rest is DeepSpeed with its config.
    if cause.phase in ("init", "step") and not cause.user_frame:
        return "config", "fix_config", cause.headline, "DeepSpeed cannot work with this model and config"
    return "user_code", "fix_code", f"{_where(cause)}{cause.headline}", f"the workload raised it in {cause.phase}"


def _where(cause: Evidence) -> str:
    return f"{cause.user_frame}: " if cause.user_frame else ""


def _lost(cause: Evidence) -> tuple[FailureKind, Action, str, str]:
    match cause.lost:
        case "stopped":
            return "infrastructure", "retry", "the process was stopped (SIGSTOP) and did not go on", "see who stops it"
        case "wall limit":
            return "infrastructure", "retry", "the trial took longer than the wall limit", "raise limits.wall_s"
        case _:
            said = f"no rank moved for the stall limit; this one beat last in {cause.phase}"
            return "communication", "retry", said, "its stack is at the end of its log"


def _signalled(cause: Evidence, name: str) -> tuple[FailureKind, Action, str, str]:
    if name == "SIGKILL":
        advice = "if it happens again, look for the kernel's OOM killer: dmesg | grep -i 'killed process'"
        return "unknown", "retry", "killed by SIGKILL, by no one of ours", advice
    return "unknown", "retry", f"killed by {name}{_last_word(cause)}", "its stack is at the end of its log"


def _last_word(cause: Evidence) -> str:
    lines = [line.strip() for line in cause.text.splitlines() if line.strip()]
    assertion = next((line for line in reversed(lines) if "ssert" in line), None)
    return f": {assertion}" if assertion else ""


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
