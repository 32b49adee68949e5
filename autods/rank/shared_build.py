"""Build a model once for several ranks, unless they would get another one than they would build themselves."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from ..files import is_library_file
from ..system.host import count_cores
from ..workload.protocol import Workload
from . import preload
from .job import RankJob
from .launch_variables import RANK_VARIABLES
from .model_facts import is_moe, seed_all
from .model_trial import drawing_weights
from .pipeline import is_pipeline


def build_for_ranks(job: RankJob, workload: Workload, connection: int, refuse: Callable[[str], NoReturn]) -> Any:
    """Build the model as rank 0 of the job would. `refuse` is called where ranks must not get it by a fork."""
    before, opened = preload.read_process_state(connection), _list_descriptors()
    seed_all(job.seed)
    with drawing_weights(job.source, count_cores()), _refusing_ranks(refuse):
        model = workload.build()
    if (reason := preload.find_fork_hazard("building it") or preload.find_change(before, connection)) is not None:
        refuse(reason)
    if is_pipeline(model) or any(is_moe(module) for module in model.modules()):
        refuse("its ranks have different parts of it")
    if any(tensor.is_shared() for tensor in (*model.parameters(), *model.buffers())):
        refuse("its weights are in shared memory")
    if _list_descriptors() != opened or os.listdir():
        refuse("it opens or writes files while it is built")
    return model


def _list_descriptors() -> set[str]:
    """The targets of the open descriptors of this process; the folder that is read is not among them."""
    targets = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.add(os.readlink(f"/proc/self/fd/{name}"))
    return targets


@contextlib.contextmanager
def _refusing_ranks(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Call `refuse` as soon as code in the block asks which rank this is: the answer would be another one in a rank.

    Libraries may ask whether ranks have joined, and copy the environment for a program that they start.
    """
    import torch.distributed
    from deepspeed import comm

    read_variable, joined = type(os.environ).__getitem__.__code__, "it asks whether the ranks have joined"
    asked_by_user = {
        torch.distributed.is_initialized.__code__: joined,
        comm.is_initialized.__code__: joined,
        type(os.environ).__iter__.__code__: "it reads the whole environment",
    }

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code is read_variable:
            if (name := frame.f_locals.get("key")) in RANK_VARIABLES:
                refuse(f"it reads {name} while it is built")
        elif code in asked_by_user and _is_users(frame.f_back):
            refuse(f"{asked_by_user[code]} while it is built")

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def _is_users(frame: FrameType | None) -> bool:
    """Whether the first caller outside of Python's own modules is the user's code."""
    while frame is not None and _is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and not is_library_file(frame.f_code.co_filename)


def _is_pythons(file: str) -> bool:
    return file.startswith(("<frozen", os.path.dirname(os.__file__))) and not is_library_file(file)
