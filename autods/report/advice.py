"""When nothing fits: what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..outcomes import Failed, OutOfMemory, first_line
from ..units import show_bytes
from .result import Report

_MIB = 2**20
_ROOM = 1.05  # a trial's peak varies a little from run to run


def shortage(report: Report) -> str:
    """'zero3-nvme comes closest, at least 61.2 MiB of device memory are missing'."""
    closest = report.closest
    if closest is None:
        failed = any(isinstance(record.outcome, Failed) for record in report.trials)
        return "no rung could be run to its end" if failed else "no rung could be tried"
    missing = closest.get("missing_bytes")
    if missing is None:
        return f"{closest['rung']} comes closest"
    bound = "" if closest.get("exact") else "at least "
    return f"{closest['rung']} comes closest, {bound}{show_bytes(missing)} of {_tier(closest)} memory are missing"


def remedies(report: Report) -> Iterator[str]:
    """Sentences, the surest first."""
    yield from dict.fromkeys(
        f"{record.trial.rung} ran out of {record.outcome.tier} memory: {first_line(record.outcome.advice)}"
        for record in report.trials
        if isinstance(record.outcome, OutOfMemory) and record.outcome.tier != "device" and record.outcome.advice
    )
    if report.closest is None:
        yield from dict.fromkeys(
            f"{record.trial.rung}: {first_line(record.outcome.advice)}"
            for record in report.trials
            if isinstance(record.outcome, Failed) and record.outcome.advice
        )
    elif (missing := report.closest.get("missing_bytes")) is not None:
        yield _more_memory(report, report.closest, int(missing))
    else:
        yield "more memory per rank (--gpu-memory)"
    for skipped in report.skipped:
        if "nvme" in skipped.reason.lower():
            yield f"--nvme-path DIR on a fast disk: {skipped.rung} was skipped for want of it"
    gpus = int(report.question.get("gpus", 1))
    yield f"more ranks (--gpus {gpus * 2}): ZeRO splits the model over them"
    yield "a smaller workload: a shorter sequence in build_batch, or a smaller model"


def _more_memory(report: Report, closest: Mapping[str, Any], missing: int) -> str:
    limit = report.question.get("device_bytes")
    if _tier(closest) != "device" or not isinstance(limit, int):
        return f"{show_bytes(missing)} more {_tier(closest)} memory"
    enough = -(-int((limit + missing) * _ROOM) // (16 * _MIB)) * 16
    size = f"{enough}MiB" if enough < 10240 else f"{-(-enough // 1024)}GiB"
    if report.question.get("device") == "cuda":
        return f"a card with {size} or more for each rank (--gpu-memory {size})"
    known = "" if closest.get("exact") else ", or more: the shortage is a lower bound"
    return f"--gpu-memory {size}{known}"


def _tier(closest: Mapping[str, Any]) -> str:
    return str(closest.get("tier", "device"))
