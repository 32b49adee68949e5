"""How ranks end, as agents report it."""

from __future__ import annotations

from typing import Any

import pytest

from autods.diagnosis.evidence import RankError
from autods.rank.job import RankJob
from autods.rank.record import RankResult
from autods.runner.node_messages import NodeReport, RankExit
from autods.runner.outcome import judge_trial
from autods.schema import read_as
from autods.system import processes
from autods.types import Outcome, Phase, WorkloadSource

JOB = RankJob(
    job="train",
    source=WorkloadSource(kind="file", path="/model.py", name="model", digest=""),
    device="cpu",
    folder="/logs",
    scratch="/logs/scratch",
    world_size=2,
    local_ranks=(0, 1),
)


def rank_exit(
    rank: int,
    *,
    result: dict[str, Any] | None = None,
    error: RankError | dict[str, Any] | None = None,
    phase: Phase = "done",
    step: int = 2,
    at_s: float = 1.0,
    exit_code: int | None = None,
    **more: Any,
) -> RankExit:
    """A rank with the result of a trial or the error that it wrote. exit_code: by default 0 or 1 with these."""
    if exit_code is None and (result is not None or error is not None):
        exit_code = int(error is not None)
    return RankExit(
        rank=rank,
        phase=phase,
        step=step,
        at_s=at_s,
        exit_code=exit_code,
        result=None if result is None else read_as(RankResult, result),
        error=error if isinstance(error, RankError) else read_as(RankError, error or {}),
        **more,
    )


def report_of(*ranks: RankExit, **more: Any) -> NodeReport:
    """A node whose ranks ended so."""
    return NodeReport(ranks=ranks, **{"gone_at_s": 1.0, **more})


def outcome(*ranks: RankExit) -> Outcome:
    """What a training job of these ranks comes to."""
    return judge_trial([report_of(*ranks)], JOB, wall_s=9.0, tokens_per_sample=None, host_bytes=None)


def spare_present_children(patch: pytest.MonkeyPatch) -> None:
    """Let an agent run in this process, as if it had no children yet: an agent ends all strays, a Ray too.

    Nor does this process adopt orphans. It would go on doing so, and later tests would meet zombies that nobody reaps.
    """
    patch.setattr(processes, "adopt_orphans", lambda: None)
    present, list_all = set(processes.list_children()), processes.list_children
    patch.setattr(processes, "list_children", lambda: [child for child in list_all() if child not in present])
