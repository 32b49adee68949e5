"""The work that the engine issues: operators, copies, collectives, and how streams and the host wait for each other."""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...types import Phase
from ..predict import step_time as codes
from ..predict.known_kernels import find_kernel
from ..predict.prices import Work
from ..predict.step_time import BITS, STREAM_BITS, STREAMS, Schedule
from .kernel_buffers import converts_first
from .stream_order import StreamOrder

_aten = torch.ops.aten
# These allocate or describe; the device does nothing.
_WITHOUT_KERNEL = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_", "resize_",
    "is_same_size", "_unsafe_view", "detach", "detach_",
})  # fmt: skip
_OVERWRITE = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "arange"})
# These read as much as they write, whatever the size of the tensor that they pick from.
_PICK = frozenset({"embedding", "index", "gather", "index_select", "nll_loss_forward", "take"})
_COPIES = frozenset({"copy_", "_to_copy"})
# These sum over rows or columns.
_REDUCTIONS = frozenset({
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward", "native_batch_norm", "native_batch_norm_backward", "_log_softmax",
    "_log_softmax_backward_data", "sum", "mean", "embedding_dense_backward",
})  # fmt: skip
BUILT_IN = frozenset({"aten", "prims", "prim", "c10d", "_c10d_functional", "profiler", "inductor", "rngprims"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})  # of cuBLAS; cuDNN has its own ways with convolutions
_MAPPED = 32 << 20  # glibc's malloc maps larger blocks anew each time, and unmaps them when they are freed
_OPTIMIZER_BYTES = 1.75  # of the bytes of parameter, gradient and two moments: all are read, all but one are written
# By collective: the argument that holds the whole tensor, and how often its bytes pass a rank.
_COLLECTIVES: dict[str, tuple[int, float]] = {
    "allreduce_": (0, 2), "allreduce_coalesced_": (0, 2), "_allgather_base_": (0, 1), "allgather_": (0, 1),
    "allgather_into_tensor_coalesced_": (0, 1), "_reduce_scatter_base_": (1, 1), "reduce_scatter_": (1, 1),
    "reduce_scatter_tensor_coalesced_": (1, 1), "alltoall_base_": (0, 1), "alltoall_": (0, 1),
    "broadcast_": (0, 1), "reduce_": (0, 1), "gather_": (0, 1), "scatter_": (0, 1),
}  # fmt: skip
_FLATTENED = frozenset({"allgather_", "reduce_scatter_"})  # lists of tensors, which NCCL wants as one
_VIEW = Work(kind="view")
_NVME_STREAM = STREAMS


class _CollectiveWork(FakeWork):
    """The handle of a collective. Whoever waits for it lets the current stream wait, and ends what it holds."""

    def __init__(self, log: WorkLog, record: int) -> None:
        super().__init__()
        self._log, self._record = log, record
        self._give_back: Any = None

    def hold(self, give_back: Callable[[], None]) -> None:
        """Call this function when somebody waits for the collective, or when the handle is gone."""
        self._give_back = weakref.finalize(self, give_back)
        self._give_back.atexit = False

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        if self._give_back is not None:
            self._give_back()  # only the first call does anything
        self._log.wait(self._record, self._log.current)
        return True


class WorkLog:
    """Collects the schedule of the current optimizer step. `current` is the current stream's number."""

    def __init__(self) -> None:
        self.events = array("q")
        self.current = 0
        self._step = -1
        self._forgotten = 0  # events of former steps
        self._works: dict[Work, int] = {}
        self._streams = 0
        self.order = StreamOrder()
        self._communicators: dict[Any, tuple[int, int, int]] = {}  # group → stream, ranks, stride
        self._handles: list[_CollectiveWork] = []  # C++ returns the Python object while it is alive
        self.last_issued: int | None = None  # of the last operator; None where its shapes do not determine it
        self.view_code = self._code(codes.RUN, _VIEW)
        self.is_pinned: Callable[[Any], bool] = lambda tensor: False

    def begin(self, phase: Phase, step: int) -> None:
        """Begin a phase of an optimizer step. Another step than before makes the log forget the former."""
        if step != self._step:
            self._step = step
            self._forgotten += len(self.events)
            del self.events[:]
            self._handles.clear()
            self.switch(self.current)
        elif phase == "forward":
            self.events.append(codes.MICRO_BATCH)

    def schedule(self) -> Schedule:
        return Schedule(events=array("q", self.events), works=tuple(self._works), first=self._forgotten)

    @property
    def issued(self) -> int:
        """How many events were entered so far, in all steps."""
        return self._forgotten + len(self.events)

    @property
    def communicators(self) -> int:
        """The process groups of several ranks in which this rank has communicated so far."""
        return sum(ranks > 1 for _, ranks, _ in self._communicators.values())

    # Streams and records.

    def new_stream(self) -> int:
        self._streams += 1
        return self._streams % _NVME_STREAM

    def switch(self, stream: int) -> int:
        """Make a stream the current one; return the former."""
        former, self.current = self.current, stream
        self.events.append(stream << BITS | codes.SWITCH)
        return former

    def record(self, stream: int) -> int:
        """Record the stream's clock; return the record's number."""
        record = self.order.record(stream)
        self.events.append((record << STREAM_BITS | stream) << BITS | codes.RECORD)
        return record

    def wait(self, record: int, stream: int) -> None:
        """Let the stream wait for a record."""
        self.order.wait(record, stream)
        self.events.append((record << STREAM_BITS | stream) << BITS | codes.WAIT)

    def host_waits_for_record(self, record: int) -> None:
        self.order.host_waits_for_record(record)
        self.events.append(record << BITS | codes.HOST_WAITS_RECORD)

    def host_waits_for_stream(self, stream: int) -> None:
        self.order.host_waits_for_stream(stream)
        self.events.append(stream << BITS | codes.HOST_WAITS_STREAM)

    def host_waits_for_all(self) -> None:
        self.order.host_waits_for_all()
        self.events.append(codes.HOST_WAITS_ALL)

    # Work.

    def call_without_kernel(self, count: int) -> None:
        """Enter so many calls that launch no kernel: views, `record_stream`."""
        if count > 0:
            self._add(codes.RUN, Work(kind="view", launches=count))

    def issue(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Enter a call of an operator."""
        name = func._schema.name.partition("::")[2]
        tensors = _tensors((args, kwargs, out))
        devices = {tensor.device.type for tensor in tensors}
        if name in _COPIES and devices == {"cuda", "cpu"}:
            self._copy(name, args, kwargs, out)
            self.last_issued = None
            return
        if name in _WITHOUT_KERNEL or not devices - {"meta"}:
            code = self.view_code
        elif "cuda" in devices:
            code = self._code(codes.RUN, _describe_kernel(func, name, args, kwargs, out))
        else:
            code = self._code(codes.HOST, _describe_host_work(func, name, args, kwargs, out))
        self.events.append(code)
        self.last_issued = code

    def launch(self, name: str, arguments: Mapping[str, Any]) -> Work:
        """Enter the launch of a kernel that is no operator of torch, and return its work."""
        tensors = {id(tensor): tensor for tensor in _tensors(list(arguments.values()))}.values()
        work = _describe_custom(name, arguments, sum(map(_bytes, tensors)))
        self._add(codes.RUN, work)
        return work

    def interpret(self, opcodes: int) -> None:
        """Enter Python of DeepSpeed's own."""
        self._add(codes.RUN, Work(kind="python", opcodes=opcodes))

    def read_back(self, tensor: Any) -> None:
        """Enter that the host reads a value of the tensor."""
        if tensor.is_cuda:
            self._add(codes.RUN, Work(kind="copy", name="item", bytes=tensor.element_size()))
            self.host_waits_for_stream(self.current)

    def optimize(self, args: Iterable[Any]) -> None:
        """Enter an optimizer's compiled step on these parameters, gradients and states."""
        tensors = _tensors(list(args))
        size = int(_OPTIMIZER_BYTES * sum(map(_bytes, tensors)))
        if any(tensor.is_cuda for tensor in tensors):
            self._add(codes.RUN, Work(kind="kernel", name="optimizer", bytes=size))
        elif tensors:
            self._add(codes.HOST, Work(kind="host_optimizer", name="optimizer", bytes=size))

    def swap(self, tensor: Any) -> None:
        """Enter an asynchronous read or write of the tensor's bytes on NVMe."""
        former = self.switch(_NVME_STREAM)
        self._add(codes.RUN, Work(kind="nvme", name="swap", bytes=_bytes(tensor)))
        self.switch(former)

    def host_waits_for_nvme(self) -> None:
        self.host_waits_for_stream(_NVME_STREAM)

    def collect(self, func: Any, args: Any) -> Any:
        """Enter a `c10d` operator on its communicator's stream; return its handle."""
        name = func._schema.name.partition("::")[2]
        place, passes = _COLLECTIVES.get(name, (0, 0))
        stream, ranks, stride = self._communicator(func, args)
        tensors = _tensors(args[place])
        moved = int(passes * sum(map(_bytes, tensors)))
        work = Work(
            kind="collective", name=name.strip("_"), bytes=moved, ranks=ranks, stride=stride,
            pairwise=name.startswith("alltoall"),
        )  # fmt: skip
        current = self.current
        self.wait(self.record(current), stream)
        self.switch(stream)
        self._add(codes.RUN, work)
        for tensor in list_flattened(func, args):
            self._add(codes.RUN, Work(kind="kernel", name="flatten", bytes=2 * _bytes(tensor)))
        self.switch(current)
        handle = _CollectiveWork(self, self.record(stream))
        if name == "barrier":
            self.host_waits_for_stream(stream)
        elif "coalesced" in name:  # torch returns a handle of its own: taken as waited for at once
            handle.wait()
        self._handles.append(handle)
        return handle

    def _copy(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        target, source = (args[0], args[1]) if name == "copy_" else (out, args[0])
        host = target if target.is_cpu else source
        asynchronous = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        is_converted = target.dtype != source.dtype
        first = converts_first(source, asynchronous=asynchronous)
        # A conversion on the host has a result, or a source, in memory that is not page-locked.
        pinned = self.is_pinned(host) and (asynchronous or not is_converted)
        if is_converted and first:
            self._convert(target, source, made=target, on_host=not asynchronous)
        work = Work(
            kind="copy" if pinned else "pageable_copy",
            name="to host" if host is target else "from host",
            bytes=_bytes(target) if first or not is_converted else target.numel() * source.element_size(),
        )
        self._add(codes.RUN, work)
        if not (asynchronous and pinned):
            self.host_waits_for_stream(self.current)
        if is_converted and not first:
            self._convert(target, source, made=source, on_host=not asynchronous)

    def _convert(self, target: Any, source: Any, *, made: Any, on_host: bool) -> None:
        """Enter a change of type in a copy, beside which torch has a tensor like `made`."""
        size = _bytes(source) + target.element_size() * source.numel()
        if on_host:
            self._add(codes.HOST, Work(kind="host", name="convert", bytes=size, fresh=_mapped_bytes([made])))
        else:
            self._add(codes.RUN, Work(kind="kernel", name="convert", bytes=size))

    def _communicator(self, func: Any, args: Any) -> tuple[int, int, int]:
        """The stream of the process group's communicator, its ranks and their stride."""
        place = _place_of_group(func)
        group = None if place is None else ProcessGroup.unbox(args[place])
        name = None if group is None else group.group_name
        if name not in self._communicators:
            members = torch.distributed.get_process_group_ranks(group)  # None: of all ranks
            stride = members[1] - members[0] if len(members) > 1 else 1
            self._communicators[name] = (self.new_stream(), len(members), stride)
        return self._communicators[name]

    def _add(self, code: int, work: Work) -> None:
        self.events.append(self._code(code, work))

    def _code(self, code: int, work: Work) -> int:
        return self._works.setdefault(work, len(self._works)) << BITS | code


def list_flattened(func: Any, args: Any) -> list[torch.Tensor]:
    """Return the tensors of the device that a `c10d` operator copies to or from a single one, if it does.

    After torch 2.13's ProcessGroupNCCL.cpp, `allgather` and `reduce_scatter`: tensors of one size, by `newLikeFlat`.
    """
    name = func._schema.name.partition("::")[2]
    if name not in _FLATTENED:
        return []
    tensors = _tensors(args[_COLLECTIVES[name][0]])
    return tensors if tensors and tensors[0].is_cuda and len({tensor.numel() for tensor in tensors}) == 1 else []


@functools.cache
def _place_of_group(func: Any) -> int | None:
    """The argument of a `c10d` operator that is its process group."""
    types = [str(argument.type) for argument in func._schema.arguments]
    return next((place for place, name in enumerate(types) if "ProcessGroup" in name), None)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: Any) -> int:
    """Bytes that a kernel touches: a dimension that is expanded counts once."""
    count = tensor.element_size()
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if step or not length else 1
    return int(count)


def _describe_host_work(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Work:
    given = _tensors((args, kwargs))
    known = {tensor.untyped_storage()._cdata for tensor in given}
    results = _tensors(out)
    made = [tensor for tensor in results if tensor.untyped_storage()._cdata not in known]
    moved = _moved_bytes(func, name, args, kwargs, out)
    if name == "isinf":  # it compares the absolute values, which it writes first
        made += given
        moved += 2 * sum(map(_bytes, given))
    compares = any(tensor.dtype == torch.bool for tensor in results)
    compared = max((tensor.numel() for tensor in given), default=0) if compares else 0
    return Work(kind="host", name=name, bytes=moved, fresh=_mapped_bytes(made), compared=compared)


def _mapped_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of those of the tensors that malloc would map anew."""
    return sum(size for size in map(_bytes, tensors) if size > _MAPPED)


def _moved_bytes(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that a call reads and writes."""
    outputs = _tensors(out)
    if name in _PICK:
        return 2 * max(sum(map(_bytes, outputs)), 1)
    read = written = 0
    values = [*args, *kwargs.values()]
    parameters = func._schema.arguments
    named = {argument.name: argument for argument in parameters}
    sources = [*parameters[: len(args)], *(named[key] for key in kwargs if key in named)]
    changed: set[int] = set()
    for argument, value in zip(sources, values, strict=False):
        tensors = _tensors(value)
        size = sum(map(_bytes, tensors))
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed |= {id(tensor) for tensor in tensors}
            written += size
            read += 0 if name in _OVERWRITE else size
        else:
            read += size
    return read + written + sum(_bytes(tensor) for tensor in outputs if id(tensor) not in changed)


def _count_attention(name: str, args: Any) -> float:
    """Return what torch's registry counts, which before 2.13 refuses fewer heads of keys than of queries."""
    backward = name.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    size, value_size = query.shape[-1], value.shape[-1]
    products = 3 * size + 2 * value_size if backward else size + value_size
    return float(2 * query.shape[:-1].numel() * key.shape[-2] * products)


def _count_grouped_matmul(matrix: Any, other: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of a grouped matmul: groups share the rows, the inner dimension or the columns of a matrix."""
    groups = matrix.shape[0] if matrix.dim() == other.dim() == 3 else 1
    return int(2 * groups * matrix.shape[-2] * matrix.shape[-1] * other.shape[-1])


_FLOPS: dict[Any, Callable[..., Any]] = {
    **flop_registry, _aten._grouped_mm: _count_grouped_matmul, _aten._scaled_grouped_mm: _count_grouped_matmul,
}  # fmt: skip


def bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an operator's call by name, defaults included."""
    declared = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return {**defaults, **dict(zip((argument.name for argument in declared), args, strict=False)), **kwargs}


def _describe_custom(name: str, arguments: Mapping[str, Any], size: int) -> Work:
    """Describe a call by the table of known kernels, and without a row by the bytes of its tensors."""
    kernel = find_kernel(name)
    if kernel is None or kernel.kind == "parts":
        return Work(kind="kernel", name=name, bytes=size, sure=False)
    flops, first = kernel.count_flops(arguments), _tensors(list(arguments.values()))[:1]
    dtype = kernel.dtype or "".join(str(tensor.dtype).removeprefix("torch.") for tensor in first)
    size = int(size * kernel.passes)
    return Work(kind=kernel.kind, name=name, flops=flops or 0.0, bytes=size, dtype=dtype, sure=flops is not None)


def _describe_kernel(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Work:
    size = _moved_bytes(func, name, args, kwargs, out)
    count = _FLOPS.get(func._overloadpacket)
    if count is None and func.namespace not in BUILT_IN:
        return _describe_custom(f"{func.namespace}::{name}", bind(func, args, kwargs), size)
    if count is None:
        return Work(kind="reduction" if name in _REDUCTIONS else "kernel", name=name, bytes=size)
    fused = name.startswith("_scaled_dot_product") and len(args) >= 3
    operands = (
        args[:-1] if func._overloadname.startswith("dtype") else args
    )  # torch's formulas know no dtype of the result
    flops = _count_attention(name, args) if fused else float(count(*operands, **kwargs, out_val=out))
    first = _tensors(args)[0]
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype == "float32" and _takes_tf32(name):
        dtype = "tf32"
    if "attention" in name:
        names = [argument.name for argument in func._schema.arguments]
        if "is_causal" in names:
            place = names.index("is_causal")
            causal = args[place] if place < len(args) else kwargs.get("is_causal", False)
            flops /= 2 if causal else 1
        return Work(kind="attention", name=name, flops=flops, bytes=size, dtype=dtype)
    matrices = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    aligned = name not in _PRODUCTS or all(map(_has_aligned_rows, matrices))
    return Work(kind="matmul", name=name, flops=flops, bytes=size, dtype=dtype, aligned=aligned)


def _takes_tf32(name: str) -> bool:
    """Whether tensor cores compute this call in fp32.

    Convolutions take them by default, and matmuls where a script asks for it.
    The newer switch is read, since torch refuses `allow_tf32` where a script has set that one. transformers does.
    """
    backends: Any = torch.backends  # its types lack cudnn.conv
    owner = backends.cudnn.conv if "convolution" in name else backends.cuda.matmul
    return bool(owner.fp32_precision == "tf32")


def _has_aligned_rows(matrix: torch.Tensor) -> bool:
    return all(
        size == 1 or stride == 1 or stride * matrix.element_size() % 16 == 0
        for size, stride in zip(matrix.shape, matrix.stride(), strict=True)
    )
