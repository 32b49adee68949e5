"""A cache of operators' output shapes, so that each is worked out once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .ledger import Ledger
from .torch_patches import FAKE_DEVICE

_device_of = operator.attrgetter(FAKE_DEVICE)  # the property of the same name is Python code
_aten = torch.ops.aten
# They change the shape or storage of an argument, or make what FakeTensor keeps as a constant.
_NEVER = {
    _aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default, _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset, _aten.set_.source_Tensor, _aten.set_.default, _aten.resize_.default,
}  # fmt: skip
_ARGUMENT, _NEW, _CONSTANT = range(3)
Step = tuple[Any, ...]
Recipe = tuple[type | None, tuple[Step, ...]]


class _Unfit(Exception):
    """This call cannot be remembered."""


class Recipes:
    """For one FakeTensorMode; the caller runs what is not known."""

    def __init__(self, mode: Any, ledger: Ledger) -> None:
        self._mode, self._ledger = mode, ledger
        self._known: dict[Any, Recipe | None] = {}

    @staticmethod
    def fits(func: Any) -> bool:
        """Whether calls of this operator may be remembered at all."""
        tags = func.tags
        return func not in _NEVER and not (
            torch.Tag.data_dependent_output in tags
            or (torch.Tag.dynamic_output_shape in tags and func is not _aten.index.Tensor)
            or torch.Tag.inplace_view in tags
        )

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
        """The operator's result; booked if it is new, by us or by `run`."""
        parts: list[Any] = [func, torch.get_default_dtype()]
        try:
            _describe(args, parts)
            if kwargs:
                parts.append(tuple(kwargs))
                _describe(kwargs.values(), parts)
            key = tuple(parts)
            known = self._known.get(key, _Unfit)
        except (_Unfit, TypeError):  # TypeError: something that cannot be hashed
            return run(func, args, kwargs)
        if known is None:
            return run(func, args, kwargs)
        if isinstance(known, tuple):
            container, steps = known
            if container is None:
                return self._make(steps[0], args, kwargs)
            return container([self._make(step, args, kwargs) for step in steps])
        out = run(func, args, kwargs)
        self._known[key] = self._learn(out, args, kwargs, key)
        return out

    def view(self, func: Any, args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
        """A view by torch's own kernel for meta tensors: slices come at many offsets, and are not worth remembering."""
        if not args or type(args[0]) is not FakeTensor or args[0].constant is not None:
            return run(func, args, kwargs)
        mode = self._mode
        device = _device_of(args[0])
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            mode.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                out = func(*args, **kwargs)
            finally:
                mode.in_kernel_invocation = False
        if isinstance(out, (list, tuple)):
            return type(out)([self._wrap(one, device) for one in out])
        return self._wrap(out, device)

    def _wrap(self, plain: Any, device: Any) -> Any:
        tensor = torch.Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
        )
        setattr(tensor, FAKE_DEVICE, device)
        return tensor

    def _learn(self, out: Any, args: Any, kwargs: Any, key: Any) -> Recipe | None:
        container = type(out) if isinstance(out, (tuple, list)) else None
        if container not in (None, tuple, list):
            return None
        outs = out if container is not None else (out,)
        try:
            parts: list[Any] = list(key[:2])
            _describe(args, parts)
            if kwargs:
                parts.append(tuple(kwargs))
                _describe(kwargs.values(), parts)
            if tuple(parts) != key:  # an argument changed its shape
                return None
            return container, tuple(_step(one, args, kwargs) for one in outs)
        except _Unfit:
            return None

    def _make(self, step: Step, args: Any, kwargs: Any) -> Any:
        kind = step[0]
        if kind == _NEW:
            _, size, stride, dtype, device, count = step
            with torch._C._DisableTorchDispatch():
                plain = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            tensor = self._wrap(plain, device)
            self._ledger.enter_new(tensor, count, device)
            return tensor
        if kind == _ARGUMENT:
            return _pick(step[1], args, kwargs)
        return step[1]


def _describe(args: Any, parts: list[Any]) -> None:
    """Append all that the result may depend on, unless it is a view: then it depends on offsets, too."""
    for one in args:
        kind = type(one)
        if kind is FakeTensor:
            if one.constant is not None or one.layout is not torch.strided:
                raise _Unfit
            parts += (one.dtype, one.shape, one.stride(), _device_of(one))
        elif kind is list or kind is tuple:
            parts.append(len(one))
            _describe(one, parts)
        elif isinstance(one, (torch.Tensor, torch.SymInt, torch.Generator)):
            raise _Unfit
        else:
            parts += (kind, one)


def _step(out: Any, args: Any, kwargs: Any) -> Step:
    if out is None or isinstance(out, (bool, int, float)):
        return _CONSTANT, out
    if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
        raise _Unfit
    if out.is_conj() or out.is_neg() or out.is_quantized:
        raise _Unfit
    storage = out.untyped_storage()
    for place, source in _tensors(args, kwargs):
        if source is out:
            return _ARGUMENT, place
    for _, source in _tensors(args, kwargs):
        if source.untyped_storage()._cdata == storage._cdata:
            raise _Unfit  # a view of it, at an offset that the key does not hold
    size = storage.nbytes()
    spanned = 0
    if out.numel():
        spanned = 1 + sum((length - 1) * stride for length, stride in zip(out.shape, out.stride(), strict=True))
    if out.storage_offset() or size != spanned * out.element_size():
        raise _Unfit
    return _NEW, out.shape, out.stride(), out.dtype, out.device, size


def _tensors(args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Every tensor among the arguments with its place: (index or name) and, in a list, the index in it."""
    found: list[tuple[Any, Any]] = []
    for index, one in [*enumerate(args), *kwargs.items()]:
        if type(one) is FakeTensor:
            found.append(((index,), one))
        elif isinstance(one, (list, tuple)):
            found += [((index, inner), tensor) for inner, tensor in enumerate(one) if type(tensor) is FakeTensor]
    return found


def _pick(place: Any, args: Any, kwargs: Any) -> Any:
    first = place[0]
    one = kwargs[first] if type(first) is str else args[first]
    return one if len(place) == 1 else one[place[1]]
