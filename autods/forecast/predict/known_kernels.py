"""Kernels of other libraries: FLOPs, bytes and buffers by the shapes of a call (configs/forecast/kernels.toml)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from ...schema import read_toml_as
from ...system.host import data_folder

_TIMES = " * "


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKernel:
    """A row of the table: calls of these `names`. The file says how its fields are read.

    `dtype` is that of its arithmetic; none: of its first tensor.
    """

    names: tuple[str, ...]
    source: str
    kind: Literal["attention", "matmul", "kernel", "reduction", "parts"]
    passes: float = 1
    flops: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    grouped_buffers: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    causal: str = ""
    window: str = ""
    dtype: str = ""

    def count_flops(self, arguments: Mapping[str, Any]) -> float | None:
        """Return the FLOPs of a call; None where an argument that decides them has no value."""
        return self._add_up(self.flops, arguments, {"keys": self._count_keys(arguments)})

    def count_buffers(self, arguments: Mapping[str, Any]) -> int:
        """Return the bytes that a call holds beside its arguments and results."""
        groups = self._count_groups(arguments)
        products = self.buffers + (self.grouped_buffers if groups > 1 else ())
        return int(self._add_up(products, arguments, {"groups": groups}) or 0)

    def _count_groups(self, arguments: Mapping[str, Any]) -> float:
        """Return how many heads of queries share one of keys; 1 where the call does not tell."""
        queries, keys = (_size(factor, arguments) for factor in self.heads or ("1", "1"))
        return queries / keys if queries and keys else 1.0

    def _count_keys(self, arguments: Mapping[str, Any]) -> float | None:
        keys = next((size for factor in self.keys if (size := _size(factor, arguments))), None)
        if keys is None:
            return None
        causal, window = arguments.get(self.causal, False), arguments.get(self.window)
        seen = keys / 2 if causal else keys
        return min(seen, window + 1) if window is not None and window >= 0 else seen

    @staticmethod
    def _add_up(
        products: tuple[str, ...], arguments: Mapping[str, Any], named: Mapping[str, float | None]
    ) -> float | None:
        total = 0.0
        for product in products:
            factors = product.split(_TIMES)
            sizes = [named[factor] if factor in named else _size(factor, arguments) for factor in factors]
            known = [size for size in sizes if size is not None]
            if len(known) < len(sizes):
                return None
            total += math.prod(known)
        return total


def _size(factor: str, arguments: Mapping[str, Any]) -> float | None:
    """Return a factor's value in this call; None where the call does not have it."""
    if factor.isdigit():
        return float(factor)
    name, _, part = factor.partition(".")
    value = arguments.get(name)
    if value is None:
        return None
    if not part:
        return float(value)
    return float(value.numel() if part == "numel" else value.shape[int(part)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    kernel: tuple[KnownKernel, ...]


@cache
def find_kernel(name: str) -> KnownKernel | None:
    """Return the first row for an operator or Triton function of this name, if any."""
    path = data_folder("configs") / "forecast" / "kernels.toml"
    rows = _read(path).kernel
    return next((row for row in rows if any(fnmatchcase(name, pattern) for pattern in row.names)), None)


@cache
def _read(path: Any) -> _File:
    return read_toml_as(_File, path, name="table of kernels")
