"""The exam of a winner: evaluation, a checkpoint saved and loaded, all on the longest batch."""

from __future__ import annotations

import gc
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.deepspeed import GATHER
from ..plain_text import read_text
from ..system.limits import find_lack
from ..types import Examined, Phase
from .distributed import Ranks
from .memory import FEWEST_GROWTHS, Meter, growth_per_step
from .model_facts import estimate_checkpoint_bytes

_TAG, _WEIGHTS = "certificate", "weights.bin"
_DISK_MARGIN = 1.1
_FURTHER_STEPS = 6  # where memory seems to grow: an allocator may fill up over the first steps
MOST_STEPS = _FURTHER_STEPS + 2  # of an exam: one follows the save, and one the load
# Relative, for the same forward on the same weights: only the order of sums in the device's kernels differs.
_TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}
_BF16_STEP = 2**-7  # relative; the largest step between neighbouring numbers of bfloat16, which has 8 bits


@dataclass(slots=True, kw_only=True)
class WorstCaseExam:
    """Evaluates, saves a checkpoint and loads it. Its caller runs an optimizer step after the save and the load.

    `evaluate` returns this rank's loss on the same batch each time; None if the model returns no loss in evaluation.
    `folder` takes the checkpoint and is removed. `index` is that of the next step. `examined` begins with the shape of
    the longest batch, or without one if there is none to evaluate. `held_bytes` were in use after each step so far.
    Every rank makes the same calls.
    """

    engine: Any
    ranks: Ranks
    evaluate: Callable[[], float | None]
    observe: Callable[[Phase, int], None]
    meter: Meter
    folder: Path
    index: int
    examined: Examined
    held_bytes: Sequence[int] = ()
    _parts: Iterator[bool] | None = None
    _has_steps: bool = True

    def advance(self) -> bool:
        """Run the next part. True if the step `index` has to follow before the next call, False after the last part."""
        self._parts = self._parts or self._run()
        return next(self._parts, False)

    def finish_without_steps(self) -> None:
        """Run the remaining parts after a script has ended, if the ranks can still communicate."""
        import torch

        if not torch.distributed.is_initialized():
            unchecked = "the longest batch, evaluation and the checkpoint were not checked"
            self.examined = Examined(batch_shape=(), draws=0)
            self._leave_out(f"{unchecked}: the script ended its process group")
            return
        self._has_steps = False
        while self.advance():
            pass
        self._leave_out("the script ended before a step was trained between saving and loading its checkpoint")

    def _run(self) -> Iterator[bool]:
        """Run the exam; after each part that is yielded the caller runs a step."""
        yield from self._watch_growth()
        self.observe("evaluate", self.index)
        _broadcast_buffers(self.engine)
        loss = None
        if self.examined.batch_shape:
            loss = self.evaluate()
            self.examined = replace(self.examined, evaluated=True)
        else:
            self._leave_out(
                "evaluation was not run and the loaded checkpoint not compared:"
                " the engine was given no tensors to repeat"
            )
        self._run_supported(self._save, "save a checkpoint")
        yield True
        self.index += 1
        if self.examined.save_s is not None:
            self._run_supported(lambda: self._load(loss), "load its checkpoint")
            yield True

    def _watch_growth(self) -> Iterator[bool]:
        """Note by how much memory grows from step to step; where it seems to, judge by further steps."""
        held = [*self.held_bytes[:-1], self._hold()]
        growth = growth_per_step(held)
        if not self.ranks.agree(not growth):
            for _ in range(_FURTHER_STEPS):
                if not self._has_steps:
                    break
                yield True
                self.index += 1
                held.append(self._hold())
            growth = growth_per_step(held[-FEWEST_GROWTHS - 2 :])
        self.examined = replace(self.examined, growth_bytes=growth)
        if growth is None:
            self._leave_out(f"growth of memory from step to step was not checked: {len(held)} steps are too few")

    def _hold(self) -> int:
        """Return the device memory in use, without garbage in cycles, which is no leak."""
        gc.collect()
        return self.meter.held_bytes()

    def _run_supported(self, part: Callable[[], None], action: str) -> None:
        """Run the part. If DeepSpeed does not implement it for this config, note its reason; all ranks get the same."""
        try:
            part()
        except NotImplementedError as error:
            self._leave_out(f"DeepSpeed cannot {action} here: {read_text(error)}")

    def _leave_out(self, reason: str) -> None:
        self.examined = replace(self.examined, left_out=(*self.examined.left_out, reason))

    def _save(self) -> None:
        """Save a checkpoint and, where the weights are partitioned, all of them gathered."""
        engine, folder = self.engine, self.folder
        self.observe("save", self.index)
        # Ranks of all nodes save into one folder. The margin is for smaller contents. A pipeline's rank holds a stage.
        size = estimate_checkpoint_bytes(engine.module) * getattr(engine, "num_stages", 1)
        needed = int(_DISK_MARGIN * size)
        lack = find_lack(folder.parent, needed) if self.ranks.rank == 0 else None
        if not self.ranks.agree(lack is None):
            if lack is not None:
                self._leave_out(f"no checkpoint was saved: {lack} in {folder.parent}")
            return
        seconds = self._time(lambda: engine.save_checkpoint(str(folder), tag=_TAG))
        self.ranks.wait()
        size, gathered = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()), None
        if engine.zero_optimization_partition_weights():
            if engine.zero_gather_16bit_weights_on_model_save():
                gathered = self._gather_weights()
                self.ranks.wait()
            else:
                self._leave_out(f"the whole weights were not gathered: the config turns {GATHER} off")
        self.examined = replace(self.examined, save_s=seconds, checkpoint_bytes=size, gathered=gathered)

    def _gather_weights(self) -> bool:
        """Gather the whole weights in the memory of rank 0, as DeepSpeed does to save them; whether it did.

        Torch writes them to nowhere, ten times as fast as to a disk, which has taken the checkpoint. The writers of
        other checkpoint engines need a file.
        """
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        engine = self.engine
        by_torch = isinstance(getattr(engine, "checkpoint_engine", None), TorchCheckpointEngine)
        file = Path(os.devnull) if by_torch else self.folder / _WEIGHTS
        return bool(engine.save_16bit_model(str(file.parent), file.name)) and (self.ranks.rank != 0 or file.exists())

    def _load(self, saved_loss: float | None) -> None:
        """Load the checkpoint after a step that changed the weights, and compare the losses."""
        engine = self.engine
        self.observe("load", self.index)
        if hasattr(engine, "num_stages") and not engine.zero_optimization() and engine.bfloat16_enabled():
            # BF16_Optimizer.load_state_dict expects the list of a ZeRO checkpoint, and stage 0 gives it a dict.
            raise NotImplementedError("the optimizer of a pipeline in bf16 without ZeRO cannot be loaded; use ZeRO-1")
        paths: list[Any] = []
        seconds = self._time(lambda: paths.extend(engine.load_checkpoint(str(self.folder), tag=_TAG)))
        if paths[0] is None:
            raise RuntimeError("DeepSpeed found nothing to load in the checkpoint that it saved")
        self.ranks.wait()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            shutil.rmtree(self.folder, ignore_errors=True)
        self.examined = replace(self.examined, load_s=seconds)
        if not self.examined.evaluated:
            return
        self.observe("evaluate", self.index)
        loss = self.evaluate()
        if saved_loss is None or loss is None or not math.isfinite(saved_loss):
            self._leave_out(
                "the loaded checkpoint was not compared with the saved one: the model evaluates to no finite loss"
            )
            return
        dtype = next(p.dtype for p in engine.module.parameters() if p.is_floating_point())
        tolerance = _TOLERANCE[str(dtype).removeprefix("torch.")]
        if _is_bf16(saved_loss) and _is_bf16(loss):
            tolerance = _BF16_STEP
        restored = math.isclose(saved_loss, loss, rel_tol=tolerance, abs_tol=1e-12)
        self.examined = replace(self.examined, restored=restored)

    def _time(self, work: Callable[[], Any]) -> float:
        """Return the seconds that the work takes, with the device idle before and after."""
        self.meter.synchronize()
        began = time.perf_counter()
        work()
        self.meter.synchronize()
        return time.perf_counter() - began


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


def _is_bf16(loss: float) -> bool:
    """Whether the loss is exactly a number of bfloat16, in which the model then computes it."""
    import torch

    return math.isfinite(loss) and float(torch.tensor(loss, dtype=torch.bfloat16)) == loss
