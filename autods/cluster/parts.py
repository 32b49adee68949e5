"""A job cut along the nodes: who runs which ranks, in which folders."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..trial.spec import RankJob
from .team import Member

Part = tuple[Member, RankJob]


def own_place(path: str, number: int) -> str:
    """A path for that node alone: several nodes may be one machine, or share a folder. The first has `path` itself."""
    return path if number == 0 else f"{path}-node{number}"


def repeated(job: RankJob, members: Sequence[Member]) -> list[Part]:
    """Every node does all of the job by itself, and clears its folder before."""
    folders = [own_place(job.folder, number) for number in range(len(members))]
    inside = job.scratch.removeprefix(job.folder)
    return [
        (member, replace(job, folder=folder, scratch=f"{folder}{inside}"))
        for member, folder in zip(members, folders, strict=True)
    ]


def parts_of(job: RankJob, members: Sequence[Member], ranks_per_node: int, port: int | None) -> list[Part]:
    """Consecutive ranks share a node; a job that one node can hold is left whole. port: of the store on the first."""
    if job.world_size <= ranks_per_node:
        return [(members[0], job)]
    parts = []
    for number, member in enumerate(members):
        ranks = range(number * ranks_per_node, min((number + 1) * ranks_per_node, job.world_size))
        if not ranks:
            break
        part = replace(
            job,
            local_ranks=tuple(ranks),
            node_rank=number,
            node_address=member.node.address,
            master_address=members[0].node.address,
            master_port=port,
            checkpoints=f"{job.folder}/checkpoints",
        )
        parts.append((member, _placed(part, number)))
    return parts


@contextlib.contextmanager
def shared_folders(parts: Sequence[Part]) -> Iterator[None]:
    """What no single node may make or remove is there inside: the folder of a checkpoint that all ranks write."""
    folders = {job.checkpoints for _, job in parts if job.checkpoints is not None}
    try:
        for folder in folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _placed(job: RankJob, number: int) -> RankJob:
    """The job with the folders of that node, which makes and removes them: its working directory and its swap files."""
    job = replace(job, scratch=own_place(job.scratch, number))
    if job.swap is None:
        return job
    swap = own_place(job.swap, number)
    return replace(job, swap=swap, ds_config=_with_path(job.ds_config, job.swap, swap))


def _with_path(config: Any, path: str, other: str) -> Any:
    """The config with `other` wherever that path stands."""
    if isinstance(config, Mapping):
        return {key: _with_path(value, path, other) for key, value in config.items()}
    return other if config == path else config
