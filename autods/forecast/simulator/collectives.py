"""Collectives without other ranks: they return at once and leave tensors as they are."""

from __future__ import annotations

import os
from typing import Any

import torch


def join(world_size: int, ranks_per_node: int) -> None:
    """This process becomes rank 0 of `world_size`; its cost does not grow with the number."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(min(world_size, ranks_per_node)),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", CROSS_RANK="0", CROSS_SIZE="1", LOCAL_SIZE=str(ranks_per_node),
    )  # fmt: skip
    import deepspeed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="nccl", verbose=False)


def agree_with_everybody() -> None:
    """DeepSpeed's checks that all ranks hold the same compare values that a simulated rank does not have."""
    import deepspeed.runtime.zero.utils as utils

    utils.assert_lst_len_same_as_other_ranks = lambda values: None
    utils.get_lst_from_rank0 = lambda values: values


def collective(func: Any, args: Any) -> Any:
    """What a `c10d` operator returns: its tensors, and a work that is done."""
    work = torch._C._distributed_c10d.FakeWork().boxed()
    out = [work if "Work" in str(result.type) else args[0] for result in func._schema.returns]
    if not out:  # a barrier
        return None
    return out[0] if len(out) == 1 else tuple(out)


# Operator → the argument that gloo copies whole, whatever the number of ranks (measured: torch 2.13, 1 to 3 ranks).
_COPIED = {
    "_allgather_base_": 0,
    "allgather_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}
_IN_SEGMENTS = ("allreduce_", "allreduce_coalesced_", "reduce_")
_TWO_SEGMENTS = 2 << 20


def copied_by_gloo(func: Any, args: Any) -> int:
    """Bytes that a collective of CPU ranks allocates inside, until it ends."""
    name = func._schema.name.partition("::")[2]
    if name in _COPIED:
        return _bytes(args[_COPIED[name]])
    if name in _IN_SEGMENTS and torch.distributed.get_world_size() > 1:
        return min(_TWO_SEGMENTS, _bytes(args[0]))
    return 0


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)
