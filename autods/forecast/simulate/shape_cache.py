"""A cache of operators' outputs: the shapes that FakeTensorMode finds for a call are found once.

Two steps of Llama-7B under ZeRO-3 take 2.5 seconds of a processor with it, 6.1 with FakeTensorMode's own cache instead
of `ShapeCache.call`, and 10.0 with neither.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .ledger import Ledger
from .torch_patches import FAKE_DEVICE

_device_of = operator.attrgetter(FAKE_DEVICE)  # the property of the same name is Python code, and slower
_make_subclass = torch.Tensor._make_subclass
_aten = torch.ops.aten
# These change the shape or storage of an argument, or make a constant that FakeTensor keeps.
_NEVER = {
    _aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default, _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset, _aten.set_.source_Tensor, _aten.set_.default, _aten.resize_.default,
}  # fmt: skip
_SCALARS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_Run = Callable[[Any, Any, Any], Any]
_Make = Callable[[Any, Any], Any]  # makes one output of a call from its arguments
# The container of the outputs (None for a single one), their makers, and the call's event in the work log.
_Result = tuple[type | None, list[_Make], int | None]


class _NotCacheable(Exception):
    """This call cannot be cached."""


class ShapeCache:
    """Runs operators for one FakeTensorMode: a known call makes its outputs without the mode, others go to `run`."""

    def __init__(self, mode: Any, ledger: Ledger, run: _Run) -> None:
        self._mode, self._ledger, self._run, self._work = mode, ledger, run, ledger.work
        self._results: dict[Any, _Result | None] = {}  # None: such a call is not cacheable
        with mode:
            # What FakeTensor's constructor sets. It takes as long as the rest of an operator, so no output passes it.
            self._attributes = dict(vars(torch.empty(0)))

    @staticmethod
    def allows(func: Any) -> bool:
        """Whether calls of this operator may be cached at all."""
        tags = func.tags
        return func not in _NEVER and not (
            torch.Tag.data_dependent_output in tags
            or (torch.Tag.dynamic_output_shape in tags and func is not _aten.index.Tensor)
            or torch.Tag.inplace_view in tags
        )

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's outputs; new storages are entered in the ledger, here or by `run`."""
        try:
            key = _key(func, args, kwargs)
            known = self._results.get(key, _NotCacheable)
        except (_NotCacheable, TypeError):  # TypeError: an argument that cannot be hashed
            return self._run(func, args, kwargs)
        if known is None:
            return self._run(func, args, kwargs)
        if isinstance(known, tuple):
            container, outputs, event = known
            made: Any = [make(args, kwargs) for make in outputs] if container else outputs[0](args, kwargs)
            result = container(made) if container else made
            if event is None:
                self._work.issue(func, args, kwargs, result)
            else:
                self._work.events.append(event)
            return result
        result = self._run(func, args, kwargs)
        event = self._work.last_issued
        try:
            changed = _key(func, args, kwargs) != key  # an argument has another shape now
            self._results[key] = None if changed else (*self._describe(result, args, kwargs), event)
        except _NotCacheable:
            self._results[key] = None
        return result

    def view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view, by torch's kernel for meta tensors. Slices come at many offsets and are not worth caching."""
        self._work.events.append(self._work.view_code)
        if not args or type(args[0]) is not FakeTensor or args[0].constant is not None:
            return self._run(func, args, kwargs)
        mode = self._mode
        device = _device_of(args[0])
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            mode.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                result = func(*args, **kwargs)
            finally:
                mode.in_kernel_invocation = False
        if isinstance(result, (list, tuple)):
            return type(result)([self._wrap(tensor, device) for tensor in result])
        return self._wrap(result, device)

    def _wrap(self, meta: Any, device: Any) -> Any:
        """A FakeTensor on that device around a meta tensor."""
        tensor = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        vars(tensor).update(self._attributes)
        setattr(tensor, FAKE_DEVICE, device)
        return tensor

    def _describe(self, result: Any, args: Any, kwargs: Any) -> tuple[type | None, list[_Make]]:
        """How to make this result again. Raises _NotCacheable if the key does not determine it."""
        container = type(result) if isinstance(result, (tuple, list)) else None
        if container not in (None, tuple, list):
            raise _NotCacheable
        outputs = (result,) if container is None else result
        return container, [self._describe_output(output, args, kwargs) for output in outputs]

    def _describe_output(self, output: Any, args: Any, kwargs: Any) -> _Make:
        if output is None or isinstance(output, (bool, int, float)):
            return lambda args, kwargs: output
        if type(output) is not FakeTensor or output.constant is not None or output.layout is not torch.strided:
            raise _NotCacheable
        if output.is_conj() or output.is_neg() or output.is_quantized:
            raise _NotCacheable
        storage = output.untyped_storage()
        tensors = list(_tensors(args, kwargs))
        if (pick := next((pick for pick, tensor in tensors if tensor is output), None)) is not None:
            return pick
        if any(tensor.untyped_storage()._cdata == storage._cdata for _, tensor in tensors):
            raise _NotCacheable  # a view of an argument, at an offset that the key does not hold
        size, spanned = storage.nbytes(), 0
        if output.numel():
            spanned = 1 + sum((length - 1) * step for length, step in zip(output.shape, output.stride(), strict=True))
        if output.storage_offset() or size != spanned * output.element_size():
            raise _NotCacheable
        return functools.partial(self._make_again, output.shape, output.stride(), output.dtype, output.device, size)

    def _make_again(self, shape: Any, stride: Any, dtype: Any, device: Any, size: int, args: Any, kwargs: Any) -> Any:
        tensor = self._make(shape, stride, dtype, device)
        self._ledger.enter_new(tensor, size, device)
        return tensor

    def make_like(self, tensor: Any) -> Any:
        """A new tensor like a contiguous one. It is not in the ledger yet."""
        return self._make(tensor.shape, tensor.stride(), tensor.dtype, _device_of(tensor))

    def _make(self, shape: Any, stride: Any, dtype: Any, device: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._wrap(meta, device)


def _key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """All that the outputs of a call depend on, but for offsets of views. Raises _NotCacheable."""
    parts: list[Any] = [func, torch.get_default_dtype()]
    _append_key(args, parts)
    if kwargs:
        parts.append(tuple(kwargs))
        _append_key(kwargs.values(), parts)
    return tuple(parts)


def _append_key(values: Any, parts: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                raise _NotCacheable
            parts += (value.dtype, value.shape, value.stride(), _device_of(value))
        elif kind in _SCALARS:  # asking whether it is a Generator is slow
            parts += (kind, value)
        elif kind is list or kind is tuple:
            parts.append(len(value))
            _append_key(value, parts)
        elif isinstance(value, (torch.Tensor, torch.SymInt, torch.Generator)):
            raise _NotCacheable
        else:
            parts += (kind, value)


def _tensors(args: Any, kwargs: Any) -> Iterator[tuple[_Make, Any]]:
    """Every tensor among the arguments, with a function that picks the tensor at its place."""
    for place, value in [*enumerate(args), *kwargs.items()]:
        if type(value) is FakeTensor:
            yield functools.partial(_pick, place, None), value
        elif isinstance(value, (list, tuple)):
            for index, tensor in enumerate(value):
                if type(tensor) is FakeTensor:
                    yield functools.partial(_pick, place, index), tensor


def _pick(place: int | str, index: int | None, args: Any, kwargs: Any) -> Any:
    value = kwargs[place] if isinstance(place, str) else args[place]
    return value if index is None else value[index]
