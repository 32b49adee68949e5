"""Decide the outcome of a trial from how its ranks ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config.trainers import SCRIPT_KINDS
from ..devices import find_device
from ..errors import InputError
from ..system.stacks import is_in_wait
from ..types import Action, Failed, OutOfMemory, Tier
from ..units import format_bytes
from .evidence import RESULT_PREVENTED_EXIT, RESULT_UNWRITTEN_EXIT, Evidence, RankError
from .messages import BOILERPLATE
from .run_processes import explain_exit_code
from .shortage import Shortage, parse_shortage
from .signatures import Kind, Signature, find_signature

_EVIDENCE_CHARS = 400
_WORKER_GONE = (
    "an OOM killer struck while this process ended: use fewer DataLoader workers or a smaller prefetch_factor, or give "
    "the node or its cgroup more memory"
)
_BUDGET_FULL = (
    "the rank's memory budget is full: use a leaner rung, a smaller micro batch or activation checkpointing, or give "
    "each rank more memory (--gpu-memory)"
)
_LAST_LINES = 40  # of a log: read for what a dying process wrote
CONFIG = "DeepSpeed config"
# What libstdc++ prints where a library starts some threads, as gloo does, and the stack of one finds no memory: the
# exception unwinds past those that run, and std::terminate ends the process.
_THREADS_ABANDONED, _NO_THREAD = "terminate called without an active exception", "pthread_create failed"
_CONFIG_READERS = (module for kind in SCRIPT_KINDS.values() for module in kind.config_readers or kind.packages)
_READS_A_CONFIG = re.compile(rf"/(?:{'|'.join(module.replace('.', '/') for module in _CONFIG_READERS)})[/.]")
_PLACE = re.compile(r"(/[^\n]*?\.py:\d+): ")
_PYDANTIC_ERROR = re.compile(r"\n(\S+)\n  (.+?)(?: \[type=|\n|$)")
_OP = re.compile(
    r"building extension '(\w+)'|(?:Deep[Ss]peed|DS_)?(cpu_adam|fused_adam|async_io|quantizer)(?:\.so|')|'(\w+)Builder'"
)
# From torch, DeepSpeed's MoE layers, and trainers that compare the samples of a batch.
_TOO_SMALL = re.compile(
    r"Expected more than 1 (?:value per channel|spatial element) when training|than min_capacity\b"
    r"|batch[ _]size (?:must|has to|should) be (?:>|greater than|larger than|at least) ?[1-4]\b"
    r"|batch[ _]size \(\d+\) must be (?:evenly )?divisible by (?:the number of generations|num_generations)",
    re.IGNORECASE,
)


class Verdict(NamedTuple):
    """The cause of a rank's end."""

    kind: Kind
    action: Action
    evidence: str
    advice: str
    tier: Tier | None = None


def explain_failure(ends: Sequence[Evidence]) -> OutOfMemory | Failed:
    """The outcome of a trial whose ranks did not all succeed. The first rank that failed by itself is the cause.

    A rank that the OOM killer of its cgroup ended goes before all others: what they met, they met in a full cgroup.
    One that was lost at the end of its work goes last: it waits for the others, unless they wait for it.
    """
    # Rows are matched only until one rank is the cause, because a trial may have thousands of ranks.
    in_time = sorted(ends, key=lambda evidence: (not evidence.is_oom_kill, _is_over(evidence), evidence.at_s))
    cause = next((evidence for evidence in in_time if not _only_noticed(evidence)), in_time[0])
    row = None if cause.error.contract or cause.lost else _matching_row(cause)
    if _is_over(cause) and not all(_is_over(evidence) for evidence in ends):
        verdict = _verdict_on_early_end(cause)
    else:
        verdict = _verdict_without_row(cause) if row is None else _verdict_by_row(cause, row)
    common: dict[str, Any] = {
        "rank": cause.rank, "phase": cause.phase, "step": cause.step, "evidence": verdict.evidence[:_EVIDENCE_CHARS],
        "action": verdict.action, "advice": verdict.advice,
    }  # fmt: skip
    if verdict.kind == "out_of_memory":
        assert verdict.tier is not None
        shortage = _measure_shortage(cause)
        limits = {"device": cause.limit_bytes, "host": cause.host.limit_bytes if cause.host else None}
        free_bytes = [shortage.free_bytes, cause.free_bytes if verdict.tier == "device" else None]
        return OutOfMemory(
            tier=verdict.tier,
            wanted_bytes=shortage.wanted_bytes,
            # On an emulated card the message tells what is free on the whole card.
            free_bytes=min((free for free in free_bytes if free is not None), default=None),
            limit_bytes=limits.get(verdict.tier),
            fragmented=verdict.tier == "device" and shortage.fragmented,
            **common,
        )
    assert verdict.kind != "none"
    frame = cause.hang
    op = _OP.search(cause.text) if verdict.kind == "toolchain" else None
    return Failed(
        failure=verdict.kind,
        op=next(filter(None, op.groups())) if op else None,
        wants_larger_batch=verdict.kind in ("user_code", "config") and wants_larger_batch(cause.text),
        own_batch=cause.error.own_batch,
        hung_at=None if frame is None else str(frame),
        **common,
    )


def _only_noticed(evidence: Evidence) -> bool:
    """Whether the rank only saw another one fail, or was lost while it waited for the others in a collective."""
    row = _matching_row(evidence)
    awaits = evidence.lost is not None and is_in_wait(evidence.log_tail)
    return awaits or (row is not None and row.weight == "secondary")


def _is_over(evidence: Evidence) -> bool:
    """Whether the rank was lost after its work had ended: it then waits for the others to end theirs."""
    return evidence.lost is not None and evidence.phase == "done"


def _matching_row(evidence: Evidence) -> Signature | None:
    """The row that matches the exception, or the last lines of a process that died by a signal."""
    row = _row_of_exception(evidence) if evidence.error.types else _row_of_last_lines(evidence)
    if row is None or (row.name == "missing-package" and evidence.error.user_frame):
        return None  # an import in the workload: its file and line say more
    if row.kind == "config" and evidence.phase == "build" and not _READS_A_CONFIG.search(evidence.error.traceback):
        return None  # the model was being built, of heads that do not divide its width, say: no DeepSpeed took part
    if evidence.error.user_frame and row.kind not in ("out_of_memory", "memory_pressure"):
        if "KeyboardInterrupt" in evidence.error.types:  # no Ctrl-C reaches a rank
            return None
        if find_device(evidence.device).stands_in and row.kind == "toolchain" and not row.killed:
            return None
    host_is_full = evidence.host is not None and evidence.host.is_exhausted
    if row.budget and find_device(evidence.device).shares_host_memory and not host_is_full:
        # The memory of the process, which has a budget, stands for the device: the row's advice is for a full host.
        return replace(row, kind="out_of_memory", tier="device", action="leaner_rung", advice=_BUDGET_FULL)
    if row.killed and evidence.host and not evidence.host.oom_kill_evidence:
        return replace(row, kind="unknown", tier=None, action="retry")
    if row.vanished and evidence.host and evidence.host.oom_kill_evidence:
        # torch names a DataLoader worker's signal only where its handler is faster than the queue's time limit.
        return replace(row, kind="out_of_memory", tier="host", action="less_host_memory", advice=_WORKER_GONE)
    return row


def _row_of_exception(evidence: Evidence) -> Signature | None:
    """By type and message, then by the base classes, then by the exceptions that it was raised from."""
    message = f"{evidence.error.types[0]}: {evidence.error.message}"
    text = "\n".join(line for line in message.splitlines() if not BOILERPLATE.match(line))
    by_class = (find_signature(text, type=type, stack=evidence.stack) for type in evidence.error.types)
    row = next((match for match in by_class if match is not None and match.name != "any-exception"), None)
    if row is None or row.kind == "unknown":
        by_cause = (find_signature(f"{type}: {message}", type=type) for type, message in evidence.error.causes)
        row = next((match for match in by_cause if match is not None and match.kind == "out_of_memory"), row)
    if (row is None or row.kind == "unknown") and "DistBackendError" in evidence.error.types:
        row = _memory_row(_rows_of(evidence.log_tail)) or row  # NCCL writes the reason only into the log
    return row


def _row_of_last_lines(evidence: Evidence) -> Signature | None:
    """A row for memory that ran out, whatever follows it; for an abort else the peer that was waited for in vain."""
    rows = _rows_of(evidence.text)
    peer = next((row for row in rows if row.weight == "secondary"), None)
    if (memory := _memory_row(rows)) is not None or evidence.signal_name != "SIGABRT":
        return memory
    if evidence.limit_bytes is not None and _THREADS_ABANDONED in evidence.text:
        return find_signature(_NO_THREAD)
    return peer


def _rows_of(text: str) -> list[Signature]:
    """The rows that match the last lines, the last line first."""
    return [row for line in reversed(text.splitlines()[-_LAST_LINES:]) if (row := find_signature(line)) is not None]


def _memory_row(rows: Sequence[Signature]) -> Signature | None:
    return next((row for row in rows if row.weight in ("decisive", "cause") and row.kind == "out_of_memory"), None)


def _verdict_by_row(cause: Evidence, row: Signature) -> Verdict:
    """The row's verdict. Its evidence is the line that the row matches."""
    notes: tuple[str, ...] = ()
    if row.tier == "device":
        notes = _measure_shortage(cause).notes()
    if "ValidationError" in cause.error.types and (match := _PYDANTIC_ERROR.search(cause.error.message)):
        line = f"{match[1]}: {match[2]}"  # pydantic's first line only counts the errors
    else:
        line = next((line.strip() for line in cause.text.splitlines() if row.tells(line)), "")
        line = cause.headline if line in cause.headline else line
    return Verdict(row.kind, row.action, line[:_EVIDENCE_CHARS], "; ".join((*notes, row.advice)), tier=row.tier)


def _measure_shortage(cause: Evidence) -> Shortage:
    """The sizes in the rank's message. Where it lacks the idle bytes, those after it: the error has freed tensors."""
    shortage = parse_shortage(cause.text)
    return shortage if shortage.idle_bytes is not None else replace(shortage, idle_bytes=cause.idle_bytes)


def _verdict_without_row(cause: Evidence) -> Verdict:
    """The verdict by the kind of end, where no row matches the text."""
    place = f"{cause.error.user_frame}: " if cause.error.user_frame else ""
    match cause:
        case Evidence(error=RankError(contract=str(broken))):
            return Verdict("user_code", "fix_code", broken, cause.error.hint or "")
        case Evidence(lost="stopped"):
            text = "the process was stopped (SIGSTOP) and not continued"
            return Verdict("infrastructure", "retry", text, "find out who stops it")
        case Evidence(lost="wall limit"):
            text = f"the trial took longer than {cause.lost_after_s:.0f} s, the limit for its size"
            return Verdict("infrastructure", "retry", text, "--stall-limit raises it, too")
        case Evidence(lost=str()):
            text = f"no rank moved for {cause.lost_after_s:.0f} s; this rank's last heartbeat was in {cause.phase}"
            if (frame := cause.hang) is not None:
                text += f", and it was at {frame}, in {frame.function}"
            advice = "its stack is at the end of its log; where it was only slow, --stall-limit allows more"
            if hint := find_device(cause.device).hang_advice:
                advice += f"; {hint}"
            return Verdict("communication", "retry", text, advice)
        case Evidence(signal_name="SIGKILL"):
            return _verdict_on_sigkill(cause)
        case Evidence(signal_name=str(name)):
            lines = (line.strip() for line in reversed(cause.text.splitlines()))
            assertion = next((f": {line}" for line in lines if "ssert" in line), "")
            meaning = explain_exit_code(cause.exit_code or 0)
            if meaning.kind == "unknown" and cause.error.user_frame:
                advice = "this line, or a library in C that it calls, ended the process; its stack is in its log"
                return Verdict("user_code", "fix_code", f"{place}killed by {name}{assertion}", advice)
            if meaning.kind == "unknown":
                return Verdict("unknown", "retry", f"killed by {name}{assertion}", "its stack is at the end of its log")
            return Verdict(meaning.kind, meaning.action, f"killed by {name}{assertion}", meaning.advice, meaning.tier)
        case Evidence(error=RankError(types=()), exit_code=code) if code == RESULT_UNWRITTEN_EXIT:
            text = "the rank could not write its result"
            return Verdict("infrastructure", "fix_environment", text, "check the space left in --out: df -h")
        case Evidence(error=RankError(types=()), exit_code=code) if code == RESULT_PREVENTED_EXIT:
            reason = next((line.strip() for line in reversed(cause.text.splitlines()) if line.strip()), "")
            text = f"the rank could not write its result{': ' if reason else ''}{reason}"
            advice = "the workload changed what the rank needs: its descriptors, limits, folders or functions of Python"
            return Verdict("user_code", "fix_code", text, advice)
        case Evidence(error=RankError(types=())):
            text = f"the process left with exit code {cause.exit_code} and no result"
            return Verdict("user_code", "fix_code", text, "something called os._exit or exec")
        case Evidence() if "SystemExit" in cause.error.types:
            text = f"{place}sys.exit({cause.error.message}) was called"
            return Verdict("user_code", "fix_code", text, "a workload must not leave the process")
        case Evidence(error=RankError(message="EOF when reading a line")):
            advice = "it waits for input, and a trial has no terminal: take the answer from an argument or a file"
            return Verdict("user_code", "fix_code", f"{place}{cause.headline}", advice)
        case Evidence(phase="start" | "rendezvous", error=RankError(user_frame=None)):
            return Verdict("infrastructure", "retry", cause.headline, "the ranks could not find each other")
        case Evidence(phase="init" | "step" | "save" | "load", error=RankError(user_frame=None)):
            # The workload's own code runs in build, forward and backward. Other phases are DeepSpeed with its config.
            return Verdict("config", "fix_config", cause.headline, "DeepSpeed cannot work with this model and config")
        case _:
            text = f"{place}{cause.headline}"
            return Verdict("user_code", "fix_code", text, f"the workload raised it in {cause.phase}")


def _verdict_on_early_end(cause: Evidence) -> Verdict:
    """The user's code: it ended on this rank, while all others wait for it in a collective. It would do so again."""
    text = f"its code ended in step {cause.step}, and {cause.lost_after_s:.0f} s later other ranks still wait for it"
    advice = "all ranks need as many steps: see why this one left, such as sys.exit, a break, or fewer batches"
    return Verdict("user_code", "fix_code", text, advice)


def _verdict_on_sigkill(cause: Evidence) -> Verdict:
    """Host memory if something other than the signal shows an OOM kill; else unknown."""
    host = cause.host
    if host is None or host.oom_kill_evidence is None:
        return Verdict(
            "unknown", "retry", "killed by SIGKILL, not by autods", explain_exit_code(-signal.SIGKILL).advice
        )
    link = ": " if host.group_kills or host.machine_kills else " while "
    text = f"killed by SIGKILL{link}{host.oom_kill_evidence}"
    if held := host.peak_rss_bytes.get(str(cause.rank)):
        text += f"; the rank held {format_bytes(held)}"
    advice = "host memory is full: offload less (or to NVMe), or give the node or its cgroup more memory"
    return Verdict("out_of_memory", "less_host_memory", text, advice, "host")


def blame_code_for_hang(failure: Failed) -> Failed:
    """The failure as one of the user's code: no other rank and no accident explains why it hung where it did."""
    assert failure.hung_at is not None
    return replace(
        failure,
        failure="user_code",
        action="fix_code",
        evidence=f"{failure.hung_at}: it hangs here: {failure.evidence.partition(', and it was at ')[0]}",
        advice=failure.advice,
    )


LARGEST_SURVEY_BATCH = 8  # the walk begins with no larger micro batch


def wants_larger_batch(text: str) -> bool:
    """Whether the text says that the model cannot be trained with so small a micro batch."""
    return _TOO_SMALL.search(text) is not None


def make_input_error(failure: Failed, path: str, log: Path) -> InputError:
    """The error for a failure that the user has to fix: in the workload at `path`, or in the DeepSpeed config."""
    place, text = CONFIG if failure.action == "fix_config" else path, failure.evidence
    if place == path and (match := _PLACE.match(text)):  # a line of the workload, or of a module that it imports
        place, text = match[1], text[match.end() :]
    details = f"rank {failure.rank}, {failure.phase}, log: {log}"
    return InputError(text, place=place, hint=f"{failure.advice}; {details}" if failure.advice else details)
