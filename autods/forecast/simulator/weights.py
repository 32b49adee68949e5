"""Checkpoints that a script reads: of a safetensors file the shapes are taken, and its values are left on the disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...trial.script.users import everywhere

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def install() -> None:
    """For the rest of this process."""
    import safetensors

    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the modes that make tensors fake are those of this thread
    real = safetensors.safe_open

    def opened(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        file = real(filename, framework=framework, device="cpu", **kwargs)
        return _File(file, torch.device(device)) if framework in ("pt", "torch", "pytorch") else file

    everywhere(real, "safe_open", opened)


class _File:
    """`safetensors.safe_open`, whose tensors have no values."""

    def __init__(self, real: Any, device: torch.device) -> None:
        self._real, self._device = real, device

    def __enter__(self) -> _File:
        self._real.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._real.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_slice(self, name: str) -> _Slice:
        """Of a tensor that is not read yet."""
        return _Slice(self._real.get_slice(name), self._device)

    def get_tensor(self, name: str) -> Any:
        """One tensor."""
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Any]:
        """All of them."""
        return {name: self.get_tensor(name) for name in self._real.keys()}  # noqa: SIM118


class _Slice:
    """What `get_slice` returns."""

    def __init__(self, real: Any, device: torch.device) -> None:
        self._real, self._device = real, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __getitem__(self, index: Any) -> Any:
        dtype = _DTYPES.get(self._real.get_dtype())
        if dtype is None:
            return self._real[index]
        with _disable_current_modes():
            shape = torch.empty(tuple(self._real.get_shape()), dtype=dtype, device="meta")[index].shape
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)
