"""The exam of a winner: evaluation, a checkpoint saved and loaded, all on the longest batch."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config.deepspeed import get_key, merge
from ..types import Examined, Phase
from ..units import format_bytes
from .distributed import Ranks
from .model_facts import LongestBatch

_TAG = "certificate"
_WEIGHTS = "weights.bin"
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_DISK_MARGIN = 1.1
# Relative, for the same forward on the same weights: only the order of sums in the device's kernels differs.
_TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}
_BF16_STEP = 2**-7  # relative; the largest step between neighbouring numbers of bfloat16, which has 8 bits
# Fields of `Examined`, and sentences about parts that were skipped.
_Part = tuple[dict[str, Any], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOps:
    """What an exam does with an engine.

    `step` runs the optimizer step of that index. `evaluate` returns this rank's loss on the same batch each time; None
    if the model returns no loss in evaluation.
    """

    step: Callable[[int], Any]
    evaluate: Callable[[], float | None]
    observe: Callable[[Phase, int], None]
    synchronize: Callable[[], None]


def allow_gathering(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with whole weights gathered at stage 3 when a model is saved, unless it says otherwise."""
    zero = get_key(ds_config, "zero_optimization") or {}
    decided = any(name in zero for name in (_GATHER, "stage3_gather_fp16_weights_on_model_save"))
    return dict(ds_config) if decided else merge(ds_config, {"zero_optimization": {_GATHER: True}})


def examine(
    engine: Any, ops: EngineOps, ranks: Ranks, *, longest: LongestBatch, folder: Path, index: int
) -> dict[str, Any]:
    """Run the exam; return `types.Examined` of this rank as a dict.

    `folder` takes the checkpoint and is removed. `index` is that of the next step.
    """
    parts = exam_parts(engine, ops, ranks, longest=longest, folder=folder, index=index)
    while True:
        try:
            ops.step(next(parts))
        except StopIteration as end:
            return dict(end.value)


def exam_parts(
    engine: Any, ops: EngineOps, ranks: Ranks, *, longest: LongestBatch, folder: Path, index: int
) -> Generator[int, None, dict[str, Any]]:
    """Run the exam in parts, for a caller that does not run the steps itself.

    At each index that it yields, the optimizer step of that index has to run. Returns the same as `examine`.
    """
    ops.observe("evaluate", index)
    _broadcast_buffers(engine)
    loss = ops.evaluate()
    saved, left_out = _skip_unsupported(lambda: _save(engine, ops, ranks, folder, index), "save a checkpoint")
    yield index
    if "save_s" in saved:
        loaded, more = _skip_unsupported(
            lambda: _load(engine, ops, ranks, folder, index + 1, loss), "load its checkpoint"
        )
        saved, left_out = saved | loaded, left_out + more
        yield index + 1
    return asdict(Examined(batch_shape=longest.shape, draws=longest.draws, evaluated=True, left_out=left_out, **saved))


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _broadcast_buffers(engine: Any) -> None:
    """Give all ranks with the same weights the buffers of the first one.

    A checkpoint has one copy of them, while the running statistics of batch normalisation differ by rank.
    """
    import torch

    group = getattr(engine, "seq_data_parallel_group", None)
    if group is None or not torch.distributed.is_initialized():
        return
    first = torch.distributed.get_global_rank(group, 0)
    for buffer in engine.module.buffers():
        whole = buffer.detach().contiguous()
        torch.distributed.broadcast(whole, first, group=group)
        buffer.detach().copy_(whole)


def _skip_unsupported(part: Callable[[], _Part], action: str) -> _Part:
    """Run the part. If DeepSpeed does not implement it for this config, return its reason; all ranks get the same."""
    try:
        return part()
    except NotImplementedError as error:
        return {}, (f"DeepSpeed cannot {action} here: {error}",)


def _save(engine: Any, ops: EngineOps, ranks: Ranks, folder: Path, index: int) -> _Part:
    """Save a checkpoint and, where the weights are partitioned, all of them gathered."""
    ops.observe("save", index)
    needed, free = _checkpoint_bytes(engine, ranks), shutil.disk_usage(folder.parent).free
    if not ranks.agree(needed <= free):
        sizes = f"about {format_bytes(needed)} of disk are needed and {format_bytes(free)} are free"
        return {}, (f"no checkpoint was saved: {sizes} in {folder.parent}",)
    seconds = _time(ops, lambda: engine.save_checkpoint(str(folder), tag=_TAG))
    ranks.wait()
    saved: dict[str, Any] = {"save_s": seconds, "checkpoint_bytes": folder_bytes(folder)}
    if not engine.zero_optimization_partition_weights():
        return saved, ()
    if not engine.zero_gather_16bit_weights_on_model_save():
        return saved, (f"the whole weights were not gathered: the config turns {_GATHER} off",)
    gathered = bool(engine.save_16bit_model(str(folder), _WEIGHTS))
    ranks.wait()
    on_disk = (folder / _WEIGHTS).exists() if ranks.rank == 0 else True
    return saved | {"gathered": gathered and on_disk}, ()


def _load(engine: Any, ops: EngineOps, ranks: Ranks, folder: Path, index: int, saved_loss: float | None) -> _Part:
    """Load the checkpoint after a step that changed the weights, and compare the losses."""
    ops.observe("load", index)
    if hasattr(engine, "num_stages") and not engine.zero_optimization() and engine.bfloat16_enabled():
        # BF16_Optimizer.load_state_dict expects the list of a ZeRO checkpoint, and stage 0 gives it a dict.
        raise NotImplementedError("the optimizer of a pipeline in bf16 without ZeRO cannot be loaded; use ZeRO-1")
    paths: list[Any] = []
    seconds = _time(ops, lambda: paths.extend(engine.load_checkpoint(str(folder), tag=_TAG)))
    if paths[0] is None:
        raise RuntimeError("DeepSpeed found nothing to load in the checkpoint that it saved")
    ranks.wait()
    if _leads_node():
        shutil.rmtree(folder, ignore_errors=True)
    ops.observe("evaluate", index)
    loss = ops.evaluate()
    if saved_loss is None or loss is None or not math.isfinite(saved_loss):
        reason = "the loaded checkpoint was not compared with the saved one: the model evaluates to no finite loss"
        return {"load_s": seconds}, (reason,)
    tolerance = _TOLERANCE[str(_dtype(engine)).removeprefix("torch.")]
    if _is_bf16(saved_loss) and _is_bf16(loss):
        tolerance = _BF16_STEP
    restored = math.isclose(saved_loss, loss, rel_tol=tolerance, abs_tol=1e-12)
    return {"load_s": seconds, "restored": restored}, ()


def _is_bf16(loss: float) -> bool:
    """Whether the loss is exactly a number of bfloat16, in which the model then computes it."""
    import torch

    return math.isfinite(loss) and float(torch.tensor(loss, dtype=torch.bfloat16)) == loss


def _time(ops: EngineOps, work: Callable[[], Any]) -> float:
    """Return the seconds that the work takes, with the device idle before and after."""
    ops.synchronize()
    began = time.perf_counter()
    work()
    ops.synchronize()
    return time.perf_counter() - began


def _checkpoint_bytes(engine: Any, ranks: Ranks) -> int:
    """Estimate the bytes of a checkpoint on this node's disk, with a margin for smaller contents.

    A checkpoint has the weights as they are. For each that is trained it also has Adam's fp32 copy and two moments, 12
    bytes, of which every rank writes its share.
    """
    share = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) / ranks.world_size
    total = 0.0
    for parameter in engine.module.parameters():
        elements = getattr(parameter, "ds_numel", parameter.numel())
        total += elements * (parameter.element_size() + 12 * share * parameter.requires_grad)
    return int(_DISK_MARGIN * total * getattr(engine, "num_stages", 1))  # a rank of a pipeline holds one stage


def _leads_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _dtype(engine: Any) -> Any:
    return next(parameter.dtype for parameter in engine.module.parameters() if parameter.is_floating_point())
