"""Stage 3 without its loops over all ranks: they allocate the same, and their cost does not grow with the world.

DeepSpeed cuts every gradient and every gathered buffer into one view a rank. Rank 0 uses its own, and the concatenation
of all, so the views of the others are left out. AUTODS_EVERY_RANK=1 keeps DeepSpeed's own loops.
"""

from __future__ import annotations

import builtins
import math
import os
import sys
from typing import Any

import torch

_FROM = 16  # ranks


def install(world_size: int) -> None:
    """In this process, if the world is large."""
    if world_size < _FROM or os.environ.get("AUTODS_EVERY_RANK"):
        return
    from deepspeed.runtime.zero import partition_parameters, stage3

    if hasattr(stage3, "reduce_scatter_coalesced"):
        stage3.reduce_scatter_coalesced = _reduce_scatter_coalesced
    handle = getattr(partition_parameters, "AllGatherCoalescedHandle", None)
    if handle is not None:
        own = handle.wait
        handle.wait = lambda self, *args, **kwargs: _wait(self, own, *args, **kwargs)
        partition_parameters.range = _range


def _reduce_scatter_coalesced(tensors: list[Any], group: Any = None) -> list[Any]:
    """As deepspeed.runtime.comm.coalesced_collectives has it, for rank 0."""
    from deepspeed import comm

    world = comm.get_world_size(group)
    chunks = [math.ceil(tensor.numel() / world) for tensor in tensors]
    with torch.no_grad():
        missing = [chunk * world - tensor.numel() for chunk, tensor in zip(chunks, tensors, strict=True)]
        padding = [tensor.new_empty(count) for count, tensor in zip(missing, tensors, strict=True) if count]
        whole = len(tensors) == 1 and not padding
        flat = tensors[0].view(-1) if whole else tensors[0].new_empty(sum(chunks) * world)
        flat.div_(world)
        own = flat.narrow(0, 0, sum(chunks))
        starts = [sum(chunks[:index]) for index in builtins.range(len(chunks))]
        sizes = [min(chunk, tensor.numel()) for chunk, tensor in zip(chunks, tensors, strict=True)]
        return [own.narrow(0, start, size) for start, size in zip(starts, sizes, strict=True)]


def _wait(handle: Any, own: Any, handle_dependency: bool = True) -> None:
    """As AllGatherCoalescedHandle has it, each parameter one piece of the gathered buffer."""
    if handle.complete or handle.quantization:
        own(handle, handle_dependency)
        return
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    handle.allgather_handle.wait()
    for param in handle.params:
        gathered = handle.partitions[0].new_empty(param.ds_numel)
        param.data = gathered.view(param.ds_shape).to(param.ds_tensor.dtype)
        param.ds_status = ZeroParamStatus.AVAILABLE
    handle.complete = True


def _range(*args: int) -> Any:
    """`range` as that module sees it: the views of a gathered buffer are made for rank 0 only."""
    if sys._getframe(1).f_code.co_name in ("_all_gather_dtype",) and len(args) == 1:
        return builtins.range(min(args[0], 1))
    return builtins.range(*args)
