"""Build a model in parts: `deepspeed.zero.Init` partitions each module over the ranks when its `__init__` has ended.

No rank ever holds the whole model. Weights that a module makes and sets in its own `__init__` keep their values, as do
those that `model.apply(function)` sets in the module that the function gets: DeepSpeed gathers them for that. Any other
access to a weight that is partitioned already would meet an empty tensor, and torch sets those without a word.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..workload.protocol import Workload, WorkloadError
from .patching import declare

_INIT = declare("deepspeed.zero.Init", "one partitions the model already, and a second one would pin its buffers again")

_CHANGES_NO_VALUE = ("_apply", "_apply_in_place", "_save_to_state_dict")  # of nn.Module; the simulated GPU patches one
_HARMLESS = ("requires_grad_", "grad")  # of what returns a tensor


class _Zero3Config:
    """The part of `HfDeepSpeedConfig` that transformers reads; that class needs accelerate to be installed."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.config = dict(ds_config)

    def is_zero3(self) -> bool:
        return True


def partition_at_build(workload: Workload, ds_config: Mapping[str, Any]) -> Workload:
    """The workload with build_model partitioned over the ranks, as ZeRO-3 with this config partitions it.

    transformers is told of stage 3: `from_config` and `from_pretrained` then gather the weights of each module to set
    them. build_model raises WorkloadError where the user's code reads or sets a weight that is partitioned already.
    Otherwise the model would start from wrong weights.
    """

    def build_model() -> Any:
        import deepspeed
        from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

        config = _Zero3Config(ds_config)  # held here: transformers keeps a weak reference
        partitioned = deepspeed.zero.Init(config_dict_or_path=dict(ds_config))
        set_hf_deepspeed_config(config)
        try:
            with _INIT.installed(lambda *args, **kwargs: contextlib.nullcontext()), partitioned, _make_guard():
                return workload.build_model()
        finally:
            unset_hf_deepspeed_config()

    return replace(workload, build_model=build_model)


def _make_guard() -> Any:
    """A mode of torch in which the shape of a partitioned weight is that of the whole, and its values are refused."""
    import deepspeed
    import torch
    from torch.overrides import TorchFunctionMode

    files = (str(deepspeed.__file__), str(torch.__file__), os.path.dirname(__file__))
    deepspeed_folder, *between = (os.path.dirname(file) + os.sep for file in files)  # the last is ours

    def is_harmless_caller() -> bool:
        """Whether DeepSpeed asks, which knows what it does, or a method of `nn.Module` that changes no value."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(tuple(between)):
            if frame.f_code.co_name in _CHANGES_NO_VALUE:
                return True
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(deepspeed_folder)

    answers: Mapping[str, Any] = {
        "shape": lambda weight: weight.ds_shape,
        "ndim": lambda weight: len(weight.ds_shape),
        "dim": lambda weight: len(weight.ds_shape),
        "numel": lambda weight: weight.ds_numel,
        "nelement": lambda weight: weight.ds_numel,
        "size": lambda weight, dim=None: weight.ds_shape if dim is None else weight.ds_shape[dim],
    }

    class Guard(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            weight = next((value for value in (*args, *kwargs.values()) if _is_partitioned(value)), None)
            if weight is None or is_harmless_caller():
                return function(*args, **kwargs)
            name = function.__name__
            if name in ("__get__", "__set__"):
                name = ("" if name == "__get__" else "set ") + function.__self__.__name__
            if name in answers:
                return answers[name](*args, **kwargs)
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                raise _refuse(name, weight) from error
            if name in ("__setitem__", "set data") or (isinstance(result, torch.Tensor) and name not in _HARMLESS):
                raise _refuse(name, weight)
            return result

    return Guard()


def _is_partitioned(value: Any) -> bool:
    status = getattr(value, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"


def _refuse(name: str, weight: Any) -> WorkloadError:
    shape = "x".join(map(str, weight.ds_shape))
    return WorkloadError(
        f"--zero-init: build_model uses a weight ({shape}, in {name}) outside its module's __init__, and by then it is"
        " partitioned: the model would start from wrong weights",
        hint="set it in that __init__ or with model.apply(), or around it write"
        " deepspeed.zero.GatheredParameters(weights, modifier_rank=0); a transformers model: Auto….from_config(config)",
    )
