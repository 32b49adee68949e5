"""Build models once, in a process that has no threads and no device in use, and print why ranks must build each."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import deepspeed
import torch
from torch import nn

from autods.rank.job import RankJob
from autods.runner.rank_fork import Builder
from autods.system import processes
from autods.types import WorkloadSource
from autods.workload import Workload


def of_rank() -> nn.Module:
    return nn.Linear(4, 2 + int(os.environ.get("RANK", "0")))


def of_all_variables() -> nn.Module:
    return nn.Linear(4, 2 + int(dict(os.environ).get("RANK", "0")))


def of_joined_ranks() -> nn.Module:
    return nn.Linear(4, torch.distributed.get_rank() if torch.distributed.is_initialized() else 2)


def with_thread() -> nn.Module:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return nn.Linear(4, 2)


def with_file() -> nn.Module:
    model = nn.Linear(4, 2)
    model.log = open("log", "w")  # type: ignore[assignment]
    return model


def with_shared_weights() -> nn.Module:
    return nn.Linear(4, 2).share_memory()


def with_experts() -> nn.Module:
    class MoE(nn.Module):
        num_experts = 2

    return nn.Sequential(nn.Linear(4, 2), MoE())


def that_raises() -> nn.Module:
    raise RuntimeError("no process group")


def that_ends() -> nn.Module:
    os.kill(os.getpid(), 9)
    return nn.Linear(4, 2)


def plain() -> nn.Module:
    print("building")
    return nn.Linear(4, 2)


CASES: tuple[Callable[[], nn.Module], ...] = (
    plain, of_rank, of_all_variables, of_joined_ranks, with_thread, with_file, with_shared_weights, with_experts,
    that_raises, that_ends,
)  # fmt: skip


def main(folder: Path) -> None:
    assert deepspeed
    torch.set_num_threads(1)
    processes.adopt_orphans()
    reasons = {}
    for build in CASES:
        scratch = folder / build.__name__ / "scratch"
        scratch.mkdir(parents=True)
        source = WorkloadSource(kind="file", path=__file__, name="model", digest="0")
        job = RankJob(job="train", source=source, device="cpu", folder=str(scratch.parent), scratch=str(scratch))
        builder = Builder.start(replace(job, shares_model=True), Workload(build, lambda size: ()))
        reasons[build.__name__] = builder.read_end()
        builder.end()
    print(json.dumps({"reasons": reasons, "left": processes.list_children()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
