"""How ranks ended, as agents report it."""

from __future__ import annotations

from typing import Any

from autods.runner.outcome import outcome_from
from autods.trial.job import RankJob
from autods.types import WorkloadSource

JOB = RankJob(
    job="train",
    source=WorkloadSource(kind="file", path="/model.py", name="model", digest=""),
    device="cpu",
    folder="/logs",
    scratch="/logs/scratch",
    world_size=2,
    local_ranks=(0, 1),
)


def outcome(*ends: dict[str, Any]) -> Any:
    report = {"ends": list(ends), "why_killed": None}
    return outcome_from([report], JOB, wall_s=9.0, tokens_per_sample=None, host_bytes=None)


def end(rank: int, record: dict[str, Any], *, exit: int = 0, killed: bool = False) -> dict[str, Any]:
    said = {"rank": rank, "exit": exit, "killed_by_us": killed, "phase": "done", "step": 2, "at_s": 1.0, "log_tail": ""}
    return {**said, "record": record}
