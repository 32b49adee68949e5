"""The dispatch mode that runs every operator on fake tensors and enters its allocations in the ledger."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ...plain_text import read_text
from ...rank.launch_variables import tell_rank
from ..predict.known_kernels import find_kernel
from . import known_values
from .kernel_buffers import BUFFERS, BUFFERS_ON_CPU, size_copy
from .ledger import DEVICE, HOST, PINNED, Ledger
from .shape_cache import ShapeCache
from .torch_patches import FAKE_DEVICE
from .unknown_values import Masks
from .work_log import BUILT_IN, bind, list_flattened


def join_world(world_size: int, ranks_per_node: int) -> None:
    """Make this process rank 0 of `world_size` ranks; the cost does not grow with their number."""
    local_world_size = min(world_size, ranks_per_node)
    os.environ |= tell_rank(
        rank=0, local_rank=0, world_size=world_size, local_world_size=local_world_size,
        node_rank=0, address="127.0.0.1", port=29500,
    )  # fmt: skip
    os.environ.update(CROSS_RANK="0", CROSS_SIZE="1", LOCAL_SIZE=str(ranks_per_node))
    import deepspeed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="nccl", verbose=False)


# By operator, the argument that gloo copies whole for any number of ranks (measured: torch 2.13, 1 to 3 ranks).
_COPIED_ARGUMENT = {
    "_allgather_base_": 0,
    "allgather_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}
_IN_SEGMENTS = ("allreduce_", "allreduce_coalesced_", "reduce_")
_TWO_SEGMENTS = 2 << 20


def _bytes_copied_by_gloo(func: Any, args: Any) -> int:
    """Bytes that gloo allocates for a collective of CPU ranks, until it ends."""
    name = func._schema.name.partition("::")[2]
    in_segments = name in _IN_SEGMENTS and torch.distributed.get_world_size() > 1
    if name not in _COPIED_ARGUMENT and not in_segments:
        return 0
    tensors = tree_leaves(args[_COPIED_ARGUMENT.get(name, 0)])
    size = int(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    return min(_TWO_SEGMENTS, size) if in_segments else size


_aten = torch.ops.aten
_device_of = torch.ops.prim.device.default
_META = torch.device("meta")
_CPU = torch.device("cpu")
_LARGEST = "the size of a tensor depends on values ({}): the largest possible was taken"
_POSITIONS = (_aten.randint.default, _aten.randint.low, _aten.randint.generator, _aten.randint.low_generator)
_MOST_POSITIONS = 1 << 16  # of the samples of a batch
_CUSTOM = (
    "the custom operator {} is not known: its results are counted, not its temporaries, and its time is that of the"
    " bytes that it moves, with a wider interval"
)
_EXPERTS = "the first experts were taken to get all tokens, until every token has its experts"
Handler = Callable[[Any, Any, Any], Any]


# Arguments that kernels want of one type, and fake tensors do not ask for.
_OF_ONE_TYPE = {
    _aten.mm.default: (0, 1), _aten.bmm.default: (0, 1), _aten.addmm.default: (1, 2), _aten.baddbmm.default: (1, 2),
    _aten.native_layer_norm.default: (0, 2),
}  # fmt: skip


def _refuse_two_types(func: Any, given: Any, weight: Any) -> None:
    if weight is None or given.dtype == weight.dtype:
        return
    if func is not _aten.native_layer_norm.default or weight.dtype != torch.float32:  # its weights may have 32 bits
        raise RuntimeError(f"expected scalar type {given.dtype} but found {weight.dtype}")


def _is_composite(func: Any) -> bool:
    """Whether devices have no kernels for the operator, because all compute it by others."""
    has_kernel, keys = func.has_kernel_for_dispatch_key, torch._C.DispatchKey
    return bool(has_kernel(keys.CompositeImplicitAutograd)) and not has_kernel(keys.CPU)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator that Python or autograd dispatches passes here on its way to FakeTensorMode."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that nothing is compiled here: its guard against that takes a microsecond of each operator."""
        return False

    def __init__(self, ledger: Ledger, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._mode = ledger, mode
        self.masks = Masks()  # of the current batch; set by the owner of the batch
        self.has_known_values = False  # whether tensors of that batch carry values; set by its owner, too
        self._cache = ShapeCache(mode, ledger, self._run)
        self._buffers = BUFFERS_ON_CPU if ledger.one_memory else BUFFERS
        self._handlers: dict[Any, Handler] = {
            _aten._local_scalar_dense.default: self._scalar,
            _aten.equal.default: self._equal,
            _aten._pin_memory.default: self._pin,
            _aten.nonzero.default: self._nonzero,
            _aten.masked_select.default: self._masked_select,
            _aten.repeat_interleave.Tensor: self._repeat,
            _aten.index.Tensor: self._index,
            _aten.split_with_sizes.default: self._split,
            _aten._unique2.default: self._unique,
            _aten.unique_consecutive.default: self._unique_consecutive,
            _aten.all.default: self._all,
            _aten.all.dim: self._all,
            _aten.sum.dim_IntList: self._sum,
            _aten.max.default: self._max,
            _aten.bitwise_not.default: self._negate,
            _aten.cat.default: self._cat,
            **dict.fromkeys(_POSITIONS, self._draw_positions),
        }
        if not ledger.one_memory:
            self._handlers |= {_aten.copy_.default: self._copy, _aten._to_copy.default: self._move}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device_of:  # every second call where the C++ library is not there to answer: on CPU ranks
            return _META if self._mode.in_kernel_invocation else getattr(args[0], FAKE_DEVICE)
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._choose_handler(func)
        kwargs = kwargs or {}
        out = handler(func, args, kwargs)
        if self.has_known_values:
            known_values.carry(func, args, kwargs, out)
        return out

    def _choose_handler(self, func: Any) -> Handler:
        if isinstance(func, HigherOrderOperator):
            return self._run_parts
        if func.namespace == "c10d":
            return self._run_collective
        if func._schema.name.startswith("aten::_fused_") and not func._schema.returns:
            return self._skip_in_place
        if func.namespace not in BUILT_IN:
            return self._run_custom
        if func in self._buffers:
            return self._run_with_buffers
        if _is_composite(func):  # below autograd or in inference mode: elsewhere autograd has decomposed it
            return self._decompose
        if any(argument.name == "pin_memory" for argument in func._schema.arguments):
            return self._factory
        if not ShapeCache.allows(func):
            return self._run
        return self._cache.view if func.is_view or func is _aten._unsafe_view.default else self._cache.call

    def _run_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the tensors of a `c10d` operator, and work that is done."""
        if self.ledger.one_memory:
            self.ledger.copy(_bytes_copied_by_gloo(func, args))
        handle = self.ledger.work.collect(func, args)
        if flattened := list_flattened(func, args):
            handle.hold(self.ledger.hold(sum(tensor.numel() * tensor.element_size() for tensor in flattened)))
        work = handle.boxed()
        out = tuple(work if "Work" in str(result.type) else args[0] for result in func._schema.returns)
        return out if len(out) > 1 else next(iter(out), None)  # a barrier returns nothing

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _OF_ONE_TYPE:
            _refuse_two_types(func, *(args[place] for place in _OF_ONE_TYPE[func]))
        out = func(*args, **kwargs)
        self._enter(out)
        self.ledger.work.issue(func, args, kwargs, out)
        return out

    def _run_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of functions, such as FlexAttention, as eager torch does: by operators that are recorded."""
        with self:
            return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return func.decompose(*args, **kwargs)

    def _run_with_buffers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose kernel takes buffers, which are there together with its results."""
        out = self._cache.call(func, args, kwargs)
        self.ledger.borrow(self._buffers[func](args))
        return out

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._cache.call(func, args, kwargs)
        self._borrow_for_copy(args[0], args[1], bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2])))
        return out

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy to a device or type; what goes to the host asynchronously gets page-locked memory there."""
        source, device, asynchronous = args[0], kwargs.get("device"), bool(kwargs.get("non_blocking"))
        if asynchronous and source.is_cuda and device is not None and device.type == _CPU.type:
            out = self._factory(func, args, {**kwargs, "pin_memory": True})
            self.ledger.work.issue(func, args, kwargs, out)
        else:
            out = self._factory(func, args, kwargs)
        self._borrow_for_copy(out, source, asynchronous)
        return out

    def _borrow_for_copy(self, target: Any, source: Any, asynchronous: bool) -> None:
        """Note what a copy between the device and the host takes beside its tensors."""
        if target.is_cuda == source.is_cuda:
            return
        for tensor, size in zip((target, source), size_copy(target, source, asynchronous=asynchronous), strict=True):
            if size:
                self.ledger.borrow([size], HOST if tensor.is_cpu else DEVICE)

    def _factory(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (device := kwargs.get("device")) is not None and device.type == _CPU.type and device.index is not None:
            kwargs = {**kwargs, "device": _CPU}  # accelerate asks for cpu:0, and a real tensor's device is cpu
        if not kwargs.get("pin_memory"):
            with _without_values(args if device is not None and device.type != _CPU.type else ()):
                return self._cache.call(func, args, kwargs)
        out = func(*args, **{**kwargs, "pin_memory": False})
        self._enter(out, PINNED)
        return out

    def _draw_positions(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a list of random integers on the host with its values: a script may cut its samples at them."""
        size = bind(func, args, kwargs)["size"]
        if (kwargs.get("device") or _CPU).type != _CPU.type or len(size) != 1 or size[0] > _MOST_POSITIONS:
            return self._factory(func, args, kwargs)
        with _disable_current_modes():
            drawn = func(*args, **{**kwargs, "device": _CPU, "pin_memory": False})
        out = self._mode.fake_tensor_converter.from_real_tensor(self._mode, drawn, make_constant=True)
        self._enter(out)
        return out

    def _pin(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        plain = type(tensor) is FakeTensor and tensor.is_contiguous()
        out = self._cache.make_like(tensor) if plain else _aten.empty_like.default(tensor)
        self._enter(out, PINNED)
        self.ledger.work.issue(func, args, kwargs, out)
        return out

    def _enter(self, out: Any, tier: int | None = None) -> None:
        if isinstance(out, FakeTensor):
            self.ledger.enter(out, tier)
        elif isinstance(out, (tuple, list)):
            for output in out:
                self._enter(output, tier)

    def _scalar(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if getattr(tensor, "constant", None) is not None:
            return func(*args, **kwargs)
        if (known := known_values.find_value(tensor)) is not None:
            self.ledger.work.read_back(tensor)
            with _disable_current_modes():
                return known.item()
        value: Any = 1.0 if tensor.is_floating_point() else 0
        if tensor.dtype == torch.bool:
            value = hasattr(tensor, "autods_is_all")
        if is_size := hasattr(tensor, "autods_is_size") and hasattr(tensor, "autods_most"):
            value = tensor.autods_most
        self.ledger.work.read_back(tensor)
        self._assume(f"the value of a tensor is read, and {value} was taken for it", at_most=is_size)
        return value

    def _sum(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A sum of a mask: how many are chosen, at most all."""
        out = self._cache.call(func, args, kwargs)
        if args[0].dtype == torch.bool and out.numel():
            out.autods_most = args[0].numel() // out.numel()
        return out

    def _max(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._cache.call(func, args, kwargs)
        if hasattr(args[0], "autods_most"):
            out.autods_most = args[0].autods_most
        return out

    def _negate(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._cache.call(func, args, kwargs)
        out.autods_negated = weakref.ref(args[0])
        return out

    def _cat(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A mask beside its negation chooses as many as it is long: so models pad what they choose."""
        out, parts = self._cache.call(func, args, kwargs), args[0]
        if len(parts) == 2 and hasattr(parts[1], "autods_negated") and parts[1].autods_negated() is parts[0]:
            out.autods_ones = parts[0].numel()
        return out

    def _all(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`all` of a mask asks for padding: its value is true unless the batch's mask of that shape holds padding."""
        out = self._run(func, args, kwargs)  # uncached: a tensor of its own, which takes the mark
        shape = tuple(args[0].shape)
        if shape not in self.masks.padded:
            out.autods_is_all = True
            for mask_shape, sentence in self.masks.assumptions:
                if mask_shape == shape:
                    self.ledger.assume(sentence)
        return out

    def _skip_in_place(self, func: Any, args: Any, kwargs: Any) -> None:
        """Skip a fused optimizer's step: it changes its arguments in place, and some have no fake implementation."""
        self.ledger.work.optimize(args)

    def _equal(self, func: Any, args: Any, kwargs: Any) -> bool:
        self.ledger.work.read_back(args[0])
        self._assume("two tensors are compared, and were taken to be equal")
        return bool(args[0].shape == args[1].shape)

    def _nonzero(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        self.ledger.work.read_back(tensor)
        if (count := known_values.count_ones(tensor)) is None:
            count = self.ledger.choices.take(tensor)
            self._assume(_LARGEST.format("nonzero") if count is None else _EXPERTS, at_most=True)
        return self._make(tensor, (tensor.numel() if count is None else count, tensor.dim()), torch.long)

    def _masked_select(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.ledger.work.read_back(args[0])
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        if (count := known_values.count_ones(args[1])) is None or shape != args[1].shape:
            count = shape.numel()
            self._assume(_LARGEST.format("masked_select"), at_most=True)
        return self._make(args[0], (count,), args[0].dtype)

    def _repeat(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Indices that are repeated as often as a tensor says."""
        value = known_values.find_value(args[0])
        if value is not None and kwargs.get("output_size") is None:
            self.ledger.work.read_back(args[0])
            with _disable_current_modes():
                kwargs = {**kwargs, "output_size": int(value.sum())}
        return self._run(func, args, kwargs)

    def _unique(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.ledger.work.read_back(args[0])
        self._assume(_LARGEST.format("unique"), at_most=True)
        tensor, flags = args[0], (*args[2:], *kwargs.values())
        inverse, counts = (bool(flags[place : place + 1] and flags[place]) for place in (0, 1))
        return (
            self._make(tensor, (tensor.numel(),), tensor.dtype),
            self._make(tensor, tuple(tensor.shape) if inverse else (0,), torch.long),
            self._make(tensor, (tensor.numel() if counts else 0,), torch.long),
        )

    def _unique_consecutive(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (results := known_values.compute(func, args, kwargs)) is None:
            return self._run(func, args, kwargs)
        self.ledger.work.read_back(args[0])
        outputs = [self._make(args[0], tuple(each.shape), each.dtype) for each in results]
        for output, result in zip(outputs, results, strict=True):
            known_values.give(output, result)
        return tuple(outputs)

    def _split(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A split into as many tokens as each expert gets, which were read as zeros: the first gets all."""
        tensor, sizes, dimension = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dim", 0)
        if sizes and not any(sizes) and tensor.shape[dimension]:
            self._assume("the first part of a split by values was taken to be all of it")
            sizes = [tensor.shape[dimension], *sizes[1:]]
        return self._cache.view(func, (tensor, sizes, dimension), {})

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, indices = args[0], args[1]
        if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            return self._cache.call(func, args, kwargs)
        self.ledger.work.read_back(tensor)
        whole: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                whole.append(index)
            else:
                count = getattr(index, "autods_ones", known_values.count_ones(index))
                if count is None:
                    count = index.numel()
                    self._assume(_LARGEST.format("a mask as index"), at_most=True)
                whole += [self._make(index, (count,), torch.long) for _ in range(index.dim())]
        return self._run(func, (tensor, whole), kwargs)

    def _make(self, like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        out = torch.ops.aten.empty.memory_format(list(shape), dtype=dtype, device=like.device)
        self._enter(out)
        return out

    def _run_custom(self, func: Any, args: Any, kwargs: Any) -> Any:
        kernel = find_kernel(func._schema.name)
        if kernel is not None and kernel.kind == "parts":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        try:
            out = func(*args, **kwargs)
            if kernel is None and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(out)):  # else a question
                self.ledger.assume(_CUSTOM.format(func))
        except Exception as error:
            returns = [str(result.type) for result in func._schema.returns]
            first = next((value for value in args if isinstance(value, FakeTensor)), None)
            unsupported = "Unsupported" in type(error).__name__ or any(
                part in read_text(error) for part in ("no fake impl", "meta kernel", "'Meta' backend")
            )
            if not unsupported or returns != ["Tensor"] or first is None:
                raise
            out = torch.ops.aten.empty_like.default(first)
            self.ledger.assume(
                f"the custom operator {func} has no fake implementation: its result was taken to be like its first"
                " input, its temporaries are not counted, and its time is that of the bytes that it moves"
            )
        self._enter(out)
        if kernel is not None and not self.ledger.one_memory:
            self.ledger.borrow([size] if (size := kernel.count_buffers(bind(func, args, kwargs))) else [])
        self.ledger.work.issue(func, args, kwargs, out)
        return out

    def _assume(self, assumption: str, *, at_most: bool = False) -> None:
        """Note an assumption about the model, with its line."""
        place = model_line()
        if place is not None:
            self.ledger.assume(f"{place}: {assumption}", at_most=at_most)


@contextlib.contextmanager
def _without_values(tensors: Any) -> Iterator[None]:
    """Hide values that fake tensors of the CPU hold: FakeTensorMode would compute with them on a GPU."""
    held = [tensor for tensor in tensors if isinstance(tensor, FakeTensor) and tensor.constant is not None]
    values = [tensor.constant for tensor in held]
    for tensor in held:
        tensor.constant = None
    try:
        yield
    finally:
        for tensor, value in zip(held, values, strict=True):
            tensor.constant = value


# Values that these files read are no assumption about the model: gradient norms, overflow checks, an optimizer's
# scales, losses for a log, weights that are drawn again. Whether there is padding is known from `masks`.
_NO_ASSUMPTION = (
    "/deepspeed/", "/transformers/masking_utils.py", "/transformers/modeling_attn_mask_utils.py",
    "/transformers/optimization.py", "/transformers/trainer.py", "/transformers/generation/", "/accelerate/",
    "/bitsandbytes/", "/torch/utils/data/", "/torch/nn/init.py",
)  # fmt: skip
# Frames between an operator and the model's code.
_LIBRARIES = ("/torch/", "/deepspeed/", "/autods/", "<frozen", "<string>", "/contextlib.py")


def model_line() -> str | None:
    """file:line of the nearest caller outside torch, DeepSpeed and autods; None below one of `_NO_ASSUMPTION`."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _NO_ASSUMPTION):
            return None
        if not any(part in name for part in _LIBRARIES):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None
