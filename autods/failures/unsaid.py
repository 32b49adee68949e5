"""Ends that no signature explains: a broken contract, a lost rank, a signal, an exit code, or just the phase."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ..outcomes import Action, Tier
from ..units import show_bytes
from .diagnosis import Kind
from .evidence import Evidence
from .exits import MEANINGS

_UNWRITTEN = 98  # how a rank leaves when even its result file fails, see `cluster.ranks`


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
        return Said("user_code", "fix_code", cause.contract, cause.mend or "")
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
        "out_of_memory", "less_host_memory", f"{said}; it held {show_bytes(held)}" if held else said,
        "the host's memory is full: offload less (or to NVMe), or give the node or its cgroup more memory", "host",
    )  # fmt: skip


def _last_word(cause: Evidence) -> str:
    lines = [line.strip() for line in cause.text.splitlines() if line.strip()]
    assertion = next((line for line in reversed(lines) if "ssert" in line), None)
    return f": {assertion}" if assertion else ""
