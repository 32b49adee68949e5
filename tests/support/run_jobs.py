"""The job of an attempt of a training run, without a runner that makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autods.rank.job import RankJob, RunOrder
from autods.types import WorkloadSource

NO_CONFIG: Mapping[str, Any] = {}
SOURCE = WorkloadSource(kind="script", path="/train.py", name="train", digest="")


def run_job(
    folder: Path,
    attempt: int = 1,
    *,
    ds_config: Mapping[str, Any] = NO_CONFIG,
    micro_batch: int = 1,
    accumulation: int = 1,
    ranks: int = 1,
    seed: int = 0,
    source: WorkloadSource = SOURCE,
    **order: Any,
) -> RankJob:
    """The job of CPU ranks; `order` has fields of its RunOrder."""
    return RankJob(
        job="run",
        source=source,
        device="cpu",
        folder=str(folder / "logs"),
        scratch=str(folder / "scratch"),
        private=str(folder / "private"),
        ds_config=ds_config,
        micro_batch=micro_batch,
        accumulation=accumulation,
        world_size=ranks,
        local_ranks=tuple(range(ranks)),
        seed=seed,
        order=RunOrder(folder=str(folder), attempt=attempt, **order),
    )


def read_samples(folder: Path) -> dict[int, list]:
    """The samples of each step on all ranks, of the last attempt that trained it."""
    steps: dict[int, list] = {}
    for attempt in sorted(folder.glob("attempts/*")):
        trained: dict[int, list] = {}
        for file in attempt.glob("samples.*"):
            for text in file.read_text().splitlines():
                step, samples = json.loads(text)
                trained.setdefault(step, []).extend(samples)
        steps |= trained
    return {step: sorted(samples) for step, samples in sorted(steps.items())}


def read_steps(folder: Path) -> dict[int, dict[str, Any]]:
    """The record of each step of a run; of a repeated one the last."""
    files = sorted(folder.glob("attempts/*/steps.jsonl"), key=lambda path: int(path.parent.name))
    rows = (json.loads(line) for file in files for line in file.read_text().splitlines())
    return {row["step"]: row for row in rows}
