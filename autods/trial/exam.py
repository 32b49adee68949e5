"""The exam of a winner: the longest batch, evaluation, a checkpoint saved and loaded."""

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
from .batch import Longest
from .distributed import Ranks

_TAG = "certificate"
_WEIGHTS = "weights.bin"
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_MARGIN = 1.1
# The same forward on the same weights: what is left is the order of sums inside the device's kernels.
_TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}
_BF16_STEP = 2**-7  # of a number with bfloat16's 8 bits, at most: what a loss that is computed in it can differ by

# Fields of `Examined`, and what was left out.
_Part = tuple[dict[str, Any], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hands:
    """What the exam may do with the engine. step(index): one optimizer step; evaluate() -> this rank's loss on the
    same batch, None where the model returns none in evaluation."""

    step: Callable[[int], Any]
    evaluate: Callable[[], float | None]
    observe: Callable[[Phase, int], None]
    synchronize: Callable[[], None]


def gathering(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a trial that saves: stage 3 may gather the whole weights, unless the user said otherwise."""
    zero = get_key(ds_config, "zero_optimization") or {}
    said = any(name in zero for name in (_GATHER, "stage3_gather_fp16_weights_on_model_save"))
    return dict(ds_config) if said else merge(ds_config, {"zero_optimization": {_GATHER: True}})


def examine(engine: Any, hands: Hands, ranks: Ranks, *, longest: Longest, folder: Path, index: int) -> dict[str, Any]:
    """`Examined` of this rank as a dict. `folder` takes the checkpoint and is removed; index: of the next step."""
    parts = parts_of(engine, hands, ranks, longest=longest, folder=folder, index=index)
    while True:
        try:
            hands.step(next(parts))
        except StopIteration as end:
            return dict(end.value)


def parts_of(
    engine: Any, hands: Hands, ranks: Ranks, *, longest: Longest, folder: Path, index: int
) -> Generator[int, None, dict[str, Any]]:
    """`examine` in parts, for who does not run the steps: wherever it yields, a step of that index is to be run."""
    hands.observe("evaluate", index)
    _share_buffers(engine)
    before = hands.evaluate()
    saved, left_out = _where_possible(lambda: _save(engine, hands, ranks, folder, index), "save a checkpoint")
    yield index
    if "save_s" in saved:
        loaded, more = _where_possible(
            lambda: _load(engine, hands, ranks, folder, index + 1, before), "load its checkpoint"
        )
        saved, left_out = saved | loaded, left_out + more
        yield index + 1
    shape = longest.shape
    return asdict(Examined(batch_shape=shape, draws=longest.draws, evaluated=True, left_out=left_out, **saved))


def _share_buffers(engine: Any) -> None:
    """Every rank gets the buffers of the first that holds the same weights: of those a checkpoint has one copy, and the
    running statistics of batch normalisation are each rank's own until it is loaded."""
    import torch

    group = getattr(engine, "seq_data_parallel_group", None)
    if group is None or not torch.distributed.is_initialized():
        return
    first = torch.distributed.get_global_rank(group, 0)
    for buffer in engine.module.buffers():
        whole = buffer.detach().contiguous()
        torch.distributed.broadcast(whole, first, group=group)
        buffer.detach().copy_(whole)


def _where_possible(part: Callable[[], _Part], what: str) -> _Part:
    """The part, or DeepSpeed's own reason that it has no such thing for this config: the same on every rank."""
    try:
        return part()
    except NotImplementedError as error:
        return {}, (f"DeepSpeed cannot {what} here: {error}",)


def _save(engine: Any, hands: Hands, ranks: Ranks, folder: Path, index: int) -> _Part:
    """A checkpoint, and where the weights are in parts, all of them gathered."""
    hands.observe("save", index)
    needed, free = _needed_bytes(engine, ranks), shutil.disk_usage(folder.parent).free
    if not ranks.agree(needed <= free):
        said = f"about {format_bytes(needed)} of disk are needed and {format_bytes(free)} are free"
        return {}, (f"no checkpoint was saved: {said} in {folder.parent}",)
    seconds = _timed(hands, lambda: engine.save_checkpoint(str(folder), tag=_TAG))
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


def _load(engine: Any, hands: Hands, ranks: Ranks, folder: Path, index: int, before: float | None) -> _Part:
    """The checkpoint, after a step that moved the weights away from it: the loss has to come back."""
    hands.observe("load", index)
    if hasattr(engine, "num_stages") and not engine.zero_optimization() and engine.bfloat16_enabled():
        # BF16_Optimizer.load_state_dict takes the list that ZeRO's checkpoints give it, and stage 0 gives a dict.
        raise NotImplementedError("a pipeline in bf16 without ZeRO saves its optimizer as nothing reads it; use ZeRO-1")
    found: list[Any] = []
    seconds = _timed(hands, lambda: found.extend(engine.load_checkpoint(str(folder), tag=_TAG)))
    if found[0] is None:
        raise RuntimeError("DeepSpeed found nothing to load in the checkpoint that it saved")
    ranks.wait()
    if _leads_node():
        shutil.rmtree(folder, ignore_errors=True)
    hands.observe("evaluate", index)
    after = hands.evaluate()
    if before is None or after is None or not math.isfinite(before):
        reason = "evaluated, the model returns no finite loss, so what was loaded was not compared with what was saved"
        return {"load_s": seconds}, (reason,)
    tolerance = _TOLERANCE[str(_dtype(engine)).removeprefix("torch.")]
    if _in_bf16(before) and _in_bf16(after):
        tolerance = _BF16_STEP
    return {"load_s": seconds, "restored": math.isclose(before, after, rel_tol=tolerance, abs_tol=1e-12)}, ()


def _in_bf16(loss: float) -> bool:
    """Whether the loss is one of the few numbers that bfloat16 has: then the model computes it in that."""
    import torch

    return math.isfinite(loss) and float(torch.tensor(loss, dtype=torch.bfloat16)) == loss


def _timed(hands: Hands, work: Callable[[], Any]) -> float:
    hands.synchronize()
    began = time.perf_counter()
    work()
    hands.synchronize()
    return time.perf_counter() - began


def _needed_bytes(engine: Any, ranks: Ranks) -> int:
    """On this node's disk, with a margin for what else a checkpoint holds.

    The weights as they are, and of each that is trained Adam's fp32 copy and two moments, 12 bytes, of which every
    rank writes its share.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size)) / ranks.world_size
    parameters = [(getattr(one, "ds_numel", one.numel()), one) for one in engine.module.parameters()]
    each = (count * (one.element_size() + 12 * here * one.requires_grad) for count, one in parameters)
    return int(_MARGIN * sum(each) * getattr(engine, "num_stages", 1))  # a pipeline's rank has one stage of them


def _leads_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _dtype(engine: Any) -> Any:
    return next(one.dtype for one in engine.module.parameters() if one.is_floating_point())


def folder_bytes(folder: Path) -> int:
    """Of all files below it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
