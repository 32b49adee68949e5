"""Patches of DeepSpeed on the simulated GPU: compiled ops, swap files, checks between ranks, views for each rank."""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import types
from typing import Any

import torch

from ...rank.patching import declare, declare_all
from ...rank.preload import PROCESSOR
from ...workload.long_sequences import shift_labels_by_one
from .ledger import Ledger
from .protocol import SimulationFailed
from .work_log import WorkLog

_IN_PLACE = frozenset({
    "multi_tensor_adam", "multi_tensor_lion",
    *(f"{verb}_{name}" for name in ("adam", "adagrad", "lion") for verb in ("create", "destroy")),
    *(f"{name}_update" for name in ("adam", "adagrad", "lion")), "adam_rollback",
})  # fmt: skip
_LAMB_NORMS = 512  # elements each of the two norms' partial sums, csrc/lamb/fused_lamb_cuda.cpp

_OP_BUILDER = declare_all(
    "deepspeed.ops.op_builder.builder.OpBuilder", ("load", "is_compatible"), "compiled ops need a GPU and a compiler"
)
_SAME_ON_ALL_RANKS = declare_all(
    "deepspeed.runtime.zero.utils",
    ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"),
    "they compare values of all ranks, and simulated tensors have none",
)
_REFILL = declare(
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter.refill",
    "it reads how long the batches of other ranks are, and simulated tensors have no values",
    optional=True,
)
_VOCABULARY = declare(
    "deepspeed.sequence.cross_entropy._validate_vocab_shard_bounds",
    "it reads which part of the vocabulary other ranks hold, and simulated tensors have no values",
    optional=True,
)
_NVTX = declare("deepspeed.utils.nvtx.enable_nvtx", "ranges for a profiler around each function cost time")
_DUPLICATES = declare(
    "deepspeed.runtime.engine.DeepSpeedEngine._check_for_duplicates",
    "it searches lists of all parameters for each parameter, which takes minutes for a large model",
    optional=True,
)
_COMPILE_PASS = declare(
    "deepspeed.runtime.engine.DeepSpeedEngine.register_compile_pass",
    "it imports torch's inductor, a second for each engine, for passes that only `engine.compile` uses",
    optional=True,
)
_REDUCE_SCATTER = declare(
    "deepspeed.runtime.zero.stage3.reduce_scatter_coalesced", "it makes a view for each rank of the world"
)
_GATHER_WAIT = declare(
    "deepspeed.runtime.zero.partition_parameters.AllGatherCoalescedHandle.wait",
    "it makes a view for each rank of the world",
)
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
_STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
# By method: the opcodes of Python that ZeRO-3 runs around a call, and around each parameter that it is given, as
# tests/benchmarks/zero3_opcodes.py counts them. A module is fetched and released in each pass. A parameter that was
# gathered is partitioned when it is no longer needed.
_OPCODES: dict[str, tuple[int, int]] = {
    f"{_COORDINATOR}.fetch_sub_module": (2000, 0),
    f"{_COORDINATOR}.release_sub_module": (2000, 0),
    f"{_COORDINATOR}._PartitionedParameterCoordinator__all_gather_params_": (1700, 0),
    "deepspeed.runtime.zero.partition_parameters.Init._partition": (0, 2200),
    f"{_STAGE_3}.partition_grads": (5700, 1200),
    f"{_STAGE_3}.get_grad_norm_direct": (0, 700),
}
_PYTHON = {name: declare(name, "a step's time counts what its Python costs the host") for name in _OPCODES}
_RANGE = declare(
    "deepspeed.runtime.zero.partition_parameters.range", "a gather makes a view for each rank of the world", adds=True
)


def install(ledger: Ledger) -> None:
    """Patch DeepSpeed in this process: compiled ops do nothing, ranks agree, and costs that are no memory go."""
    _OP_BUILDER["load"].install(lambda self, verbose=True: _OPS.get(self.name, _Ops)(self.name, ledger))
    _OP_BUILDER["is_compatible"].install(lambda self, verbose=False: True)
    _SAME_ON_ALL_RANKS["assert_lst_len_same_as_other_ranks"].install(lambda values: None)
    _SAME_ON_ALL_RANKS["get_lst_from_rank0"].install(lambda values: values)
    _REFILL.wrap(_refill)
    _VOCABULARY.install(_join_vocabulary)
    _NVTX.install(False)
    PROCESSOR.install(dict)  # no vendor: an optimizer on the CPU asks for it, to warn of fp16
    _DUPLICATES.wrap(_check_for_duplicates)
    _COMPILE_PASS.install(lambda *args, **kwargs: None)
    for name, patch in _PYTHON.items():
        patch.wrap(_count_opcodes, ledger.work, *_OPCODES[name])


def _refill(refill: Any, adapter: Any) -> None:
    """`UlyssesSPDataLoaderAdapter.refill` where every rank has drawn a batch like this one."""
    try:
        batch = dict(next(adapter.iter))
    except StopIteration:
        adapter.iter = iter(adapter.dl)
        raise
    size, start = batch["input_ids"].shape[1] // adapter.sp_world_size, adapter.sp_rank
    batch["shift_labels"] = shift_labels_by_one(batch.pop("labels"))
    for _ in range(adapter.sp_world_size):
        parts = {
            name: value[:, start * size : (start + 1) * size] if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        adapter.micro_batches.append(parts)


def _join_vocabulary(local_vocab_size: int, start: int, end: int, tp_group: Any, device: Any) -> int:
    """The size of a vocabulary of which every rank of tensor parallelism holds as much as this one."""
    from deepspeed import comm

    return local_vocab_size * (comm.get_world_size(tp_group) if tp_group is not None else 1)


def _check_for_duplicates(complain: Any, engine: Any, optimizer: Any) -> None:
    listed = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if len(set(listed)) != len(listed):
        complain(engine, optimizer)


def _count_opcodes(
    work: WorkLog, once: int, each: int, method: Any, owner: Any, given: Any, *args: Any, **kwargs: Any
) -> Any:
    work.interpret(once + each * len(given) if each else once)
    return method(owner, given, *args, **kwargs)


class _Ops(types.ModuleType):
    """A compiled op whose functions do nothing; a function with unknown memory use raises."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        super().__init__(name)
        self._work = ledger.work
        self.aio_handle = self.gds_handle = self.pin_handle = functools.partial(_SwapFiles, ledger)
        self.lamb = functools.partial(_lamb, ledger.work)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _IN_PLACE:

            def optimize(*args: Any, **kwargs: Any) -> int:
                self._work.optimize(args)
                return 0

            return optimize

        def refuse(*args: Any, **kwargs: Any) -> Any:
            # Its use of memory is not known, and no forecast is better than a wrong one.
            problem = f"DeepSpeed's compiled function {self.__name__}.{name} is not simulated"
            raise SimulationFailed(
                "unsupported", problem, "forecast with --no-forecast, or measure by a trial (autods fit)"
            )

        return refuse


class _Quantizer(_Ops):
    """The op that quantizes weights: csrc/quantization/pt_binding.cpp makes what it returns, and nothing beside it."""

    def quantize(self, values: Any, groups: int, bits: int, kind: Any) -> list[Any]:
        """Return the numbers as signed bytes, and a scale in fp32 for each group of them."""
        quantized = torch.empty_like(values, dtype=torch.int8)
        scales = torch.empty(groups, 1, dtype=torch.float32, device=values.device)
        self._work.launch("quantizer.quantize", {"values": values, "quantized": quantized, "scales": scales})
        return [quantized, scales]

    def dequantize(self, quantized: Any, scales: Any, groups: int, bits: int, kind: Any) -> Any:
        """Return the numbers in fp16, whatever the model trains in."""
        values = torch.empty_like(quantized, dtype=torch.float16)
        self._work.launch("quantizer.dequantize", {"quantized": quantized, "scales": scales, "values": values})
        return values


_OPS: dict[str, type[_Ops]] = {"quantizer": _Quantizer}


def _lamb(work: WorkLog, parameter: Any, *args: Any) -> Any:
    """FusedLamb's step on a tensor: it returns a coefficient and holds partial sums of two norms meanwhile."""
    work.optimize((parameter, *args))
    partial_sums = [torch.empty(_LAMB_NORMS, dtype=parameter.dtype, device=parameter.device) for _ in range(2)]
    coefficient = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
    del partial_sums
    return coefficient


class _SwapFiles:
    """The handle of async_io: reads and writes do nothing, and the ledger keeps the files' sizes."""

    def __init__(self, ledger: Ledger, *args: Any, **kwargs: Any) -> None:
        self._ledger = ledger
        self._pending = 0

    def new_cpu_locked_tensor(self, count: int, like: Any) -> Any:
        """A pinned buffer that DeepSpeed locks itself."""
        tensor = torch.empty(count, dtype=like.dtype, pin_memory=not self._ledger.one_memory)
        self._ledger.lock(tensor)
        return tensor

    def free_cpu_locked_tensor(self, tensor: Any) -> bool:
        return True  # the ledger notices the end of the tensor

    def is_pinned(self, tensor: Any) -> bool:
        return tensor.is_cpu and (self._ledger.one_memory or self._ledger.is_pinned(tensor))

    def sync_pwrite(self, tensor: Any, path: str, offset: int = 0, *args: Any) -> int:
        """Enter the file's size."""
        size = offset + tensor.numel() * tensor.element_size()
        self._ledger.nvme[path] = max(size, self._ledger.nvme.get(path, 0))
        self._ledger.work.swap(tensor)
        return 0

    def async_pwrite(self, *args: Any, **kwargs: Any) -> int:
        self._pending += 1
        return self.sync_pwrite(*args, **kwargs)

    def async_pread(self, tensor: Any, *args: Any, **kwargs: Any) -> int:
        self._pending += 1
        self._ledger.work.swap(tensor)
        return 0

    def wait(self) -> int:
        """How many operations were pending."""
        count, self._pending = self._pending, 0
        self._ledger.work.host_waits_for_nvme()
        return count

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


def install_rank_zero(ledger: Ledger) -> None:
    """Make rank 0's view of a tensor where stage 3 makes one for each rank of the world; only rank 0 is simulated.

    The log gets the launches of all of them. AUTODS_EVERY_RANK in the environment makes all views.
    """
    if os.environ.get("AUTODS_EVERY_RANK"):
        return
    _REDUCE_SCATTER.install(functools.partial(_reduce_scatter_coalesced, ledger.work))
    _GATHER_WAIT.wrap(_wait, ledger.work)
    _RANGE.install(functools.partial(_range, ledger.work))


def _reduce_scatter_coalesced(work: WorkLog, tensors: list[Any], group: Any = None) -> list[Any]:
    """`deepspeed.runtime.comm.coalesced_collectives.reduce_scatter_coalesced` with views for rank 0 only."""
    from deepspeed import comm
    from deepspeed.runtime.comm.coalesced_collectives import _torch_reduce_scatter_fn

    world = comm.get_world_size(group)
    sizes = [tensor.numel() for tensor in tensors]
    chunks = [math.ceil(size / world) for size in sizes]
    with torch.no_grad():
        flat_tensors = [tensor.view(-1) for tensor in tensors]
        work.call_without_kernel(world * len(tensors))
        if len(tensors) == 1 and sizes[0] % world == 0:
            buffer = tensors[0].view(-1)
        else:
            first_padded = min(size // chunk if chunk else 0 for size, chunk in zip(sizes, chunks, strict=True))
            missing = [
                (chunk - max(0, min(chunk, size - rank * chunk)), tensor)
                for rank in range(first_padded, world)
                for size, chunk, tensor in zip(sizes, chunks, flat_tensors, strict=True)
            ]
            padding = [tensor.new_empty(count) for count, tensor in missing if count]
            buffer = torch.cat([*flat_tensors, *padding])
        buffer.div_(world)
        partition = buffer.narrow(0, 0, buffer.numel() // world)
        _torch_reduce_scatter_fn(buffer, partition, group=group)
        starts = itertools.accumulate(chunks, initial=0)
        return [
            partition.narrow(0, start, min(chunk, size))
            for start, chunk, size in zip(starts, chunks, sizes, strict=False)
        ]


def _wait(work: WorkLog, real: Any, handle: Any, handle_dependency: bool = True) -> None:
    """`AllGatherCoalescedHandle.wait` with each parameter as a single piece of the gathered buffer."""
    if handle.complete or handle.quantization:
        real(handle, handle_dependency)
        return
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    accelerator = get_accelerator()
    has_streams = not accelerator.is_synchronized_device()
    handle.allgather_handle.wait()
    pieces: list[Any] = []
    for param in handle.params:
        pieces = [handle.partitions[0].as_strided((param.ds_numel,), (1,))]
        part = param.ds_tensor.ds_numel
        if handle.use_secondary_tensor:  # hpZ gathers within a node, from larger parts
            part *= param.ds_secondary_tensor_num_of_groups
        others = math.ceil(param.ds_numel / part) - 1
        work.call_without_kernel(others)
        param.data = torch.cat(pieces).view(param.ds_shape).to(param.ds_tensor.dtype)
        param.ds_status = ZeroParamStatus.AVAILABLE
        if has_streams and handle_dependency:
            pieces[0].record_stream(accelerator.current_stream())
            work.call_without_kernel(others)
    handle.complete = True
    if has_streams and not handle_dependency:
        type(handle).data_buffer.append(pieces)


def _range(work: WorkLog, *args: int) -> Any:
    """`range` for partition_parameters: its loop over the world in `_all_gather_dtype` sees rank 0 only."""
    if sys._getframe(1).f_code.co_name == "_all_gather_dtype" and len(args) == 1:
        work.call_without_kernel(args[0] - 1)
        return range(min(args[0], 1))
    return range(*args)
