"""The dispatch mode that runs operators on fake tensors and records what they allocate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .ledger import PINNED, Ledger
from .padding import Masks
from .shape_cache import Recipes


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


_aten = torch.ops.aten
_BUILT_IN = {"aten", "prims", "prim", "c10d", "_c10d_functional", "profiler", "inductor", "rngprims"}
_device_of = torch.ops.prim.device.default
_META = torch.device("meta")
_CPU = torch.device("cpu")
Handler = Callable[[Any, Any, Any], Any]


def _dispatch(self: Recorder, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func is _device_of:  # every second call
        return _META if self._mode.in_kernel_invocation else args[0].fake_device
    handler = self._handlers.get(func)
    if handler is None:
        handler = self._handlers[func] = self._handler_of(func)
    return handler(func, args, kwargs or {})


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lies above FakeTensorMode; every operator that Python or autograd dispatches passes here."""

    def __init__(self, ledger: Ledger, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._mode = ledger, mode
        self.masks = Masks()  # of the current batch
        self.recipes = Recipes(mode, ledger)
        self._handlers: dict[Any, Handler] = {
            _aten._local_scalar_dense.default: self._scalar,
            _aten.equal.default: self._equal,
            _aten._pin_memory.default: self._pin,
            _aten.nonzero.default: self._nonzero,
            _aten.masked_select.default: self._masked_select,
            _aten.index.Tensor: self._index,
            _aten._unique2.default: self._unique,
            _aten.all.default: self._all,
            _aten.all.dim: self._all,
        }

    def _handler_of(self, func: Any) -> Handler:
        if func.namespace == "c10d":
            return self._collective
        if func._schema.name.startswith("aten::_fused_") and not func._schema.returns:
            return self._in_place
        if func.namespace not in _BUILT_IN:
            return self._custom
        if any(argument.name == "pin_memory" for argument in func._schema.arguments):
            return self._factory
        if not Recipes.fits(func):
            return self._plain
        return self._viewed if func.is_view or func is _aten._unsafe_view.default else self._remembered

    def _remembered(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.recipes.call(func, args, kwargs, self._plain)

    def _viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.recipes.view(func, args, kwargs, self._plain)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.ledger.one_memory:
            self.ledger.copy(copied_by_gloo(func, args))
        return collective(func, args)

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self._book(out, None)
        return out

    def _factory(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (device := kwargs.get("device")) is not None and device.type == "cpu" and device.index is not None:
            kwargs = {**kwargs, "device": _CPU}  # accelerate says cpu:0; a real tensor's device is cpu all the same
        if not kwargs.get("pin_memory"):
            return self._remembered(func, args, kwargs)
        out = func(*args, **{**kwargs, "pin_memory": False})
        self._book(out, PINNED)
        return out

    def _pin(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = torch.ops.aten.empty_like.default(args[0])
        self._book(out, PINNED)
        return out

    def _book(self, out: Any, tier: int | None) -> None:
        if isinstance(out, FakeTensor):
            self.ledger.see(out, tier)
        elif isinstance(out, (tuple, list)):
            for one in out:
                self._book(one, tier)

    def _scalar(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if getattr(tensor, "constant", None) is not None:
            return func(*args, **kwargs)
        value: Any = 1.0 if tensor.is_floating_point() else 0
        if tensor.dtype == torch.bool:
            value = hasattr(tensor, "autods_is_all")
        self._assume(f"the value of a tensor is read, and {value} was taken for it")
        return value

    def _all(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Asked as "are all as usual?" (no padding, one sequence a row): yes, but for a mask that holds padding."""
        out = self._plain(func, args, kwargs)  # another answer for each tensor
        if self.masks.is_all(tuple(args[0].shape), self.ledger.assume):
            out.autods_is_all = True
        return out

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> None:
        """A fused optimizer's step changes what it is given, and some have no fake implementation."""

    def _equal(self, func: Any, args: Any, kwargs: Any) -> bool:
        self._assume("two tensors are compared, and were taken to be equal")
        return bool(args[0].shape == args[1].shape)

    def _nonzero(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        self._assume("the size of a tensor depends on values (nonzero): the largest possible was taken")
        return self._made(tensor, (tensor.numel(), tensor.dim()), torch.long)

    def _masked_select(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._assume("the size of a tensor depends on values (masked_select): the largest possible was taken")
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        return self._made(args[0], (shape.numel(),), args[0].dtype)

    def _unique(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._assume("the size of a tensor depends on values (unique): the largest possible was taken")
        tensor, wanted = args[0], (*args[2:], *kwargs.values())
        inverse, counts = (bool(wanted[place : place + 1] and wanted[place]) for place in (0, 1))
        return (
            self._made(tensor, (tensor.numel(),), tensor.dtype),
            self._made(tensor, tuple(tensor.shape) if inverse else (0,), torch.long),
            self._made(tensor, (tensor.numel() if counts else 0,), torch.long),
        )

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, indices = args[0], args[1]
        if not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices):
            return self._remembered(func, args, kwargs)
        self._assume("the size of a tensor depends on values (a mask as index): the largest possible was taken")
        whole: list[Any] = []
        for one in indices:
            if one is None or one.dtype not in (torch.bool, torch.uint8):
                whole.append(one)
            else:
                whole += [self._made(one, (one.numel(),), torch.long) for _ in range(one.dim())]
        return self._plain(func, (tensor, whole), kwargs)

    def _made(self, like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        out = torch.ops.aten.empty.memory_format(list(shape), dtype=dtype, device=like.device)
        self._book(out, None)
        return out

    def _custom(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            out = func(*args, **kwargs)
            self.ledger.assume(f"of the custom operator {func} only the results are counted, not what it uses inside")
        except Exception as error:
            returns = [str(result.type) for result in func._schema.returns]
            first = next((one for one in args if isinstance(one, FakeTensor)), None)
            unsupported = "Unsupported" in type(error).__name__ or any(
                part in str(error) for part in ("no fake impl", "meta kernel", "'Meta' backend")
            )
            if not unsupported or returns != ["Tensor"] or first is None:
                raise
            out = torch.ops.aten.empty_like.default(first)
            self.ledger.assume(
                f"the custom operator {func} has no fake implementation: its result was taken to be like its first"
                " input, and what it uses inside is not counted"
            )
        self._book(out, None)
        return out

    def _assume(self, what: str) -> None:
        place = outside_frame()
        if place is not None:
            self.ledger.assume(f"{place}: {what}")


# What they read is no assumption about the model: gradient norms, overflow checks, an optimizer's scales, losses for a
# log; whether there is padding is said by `masks`.
_QUIET = (
    "/deepspeed/", "/transformers/masking_utils.py", "/transformers/modeling_attn_mask_utils.py",
    "/transformers/optimization.py", "/transformers/trainer.py", "/accelerate/", "/bitsandbytes/", "/torch/utils/data/",
)  # fmt: skip
# Passed over on the way to the model's code.
_OWN = ("/torch/", "/deepspeed/", "/autods/", "<frozen", "<string>", "/contextlib.py")

# Set after the class is made: torch wraps what it finds in the class in a guard against torch.compile, which costs as
# much as the rest.
Recorder.__torch_dispatch__ = _dispatch  # type: ignore[assignment]


def outside_frame() -> str | None:
    """The nearest caller's file:line, if it is the model's code and not torch's, DeepSpeed's or ours."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _QUIET):
            return None
        if not any(part in name for part in _OWN):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None
