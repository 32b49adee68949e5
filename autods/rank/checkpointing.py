"""Whether and how a model recomputes its activations: none, all or some layers, or from inputs on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")  # in transformers 5.2x and later, and before
_CHECKPOINT = "_gradient_checkpointing_func"  # what a layer of transformers calls to run with checkpointing


def list_recomputing(model: Any) -> list[Any]:
    """List the outermost modules of a model that can recompute their activations in backward."""
    if _find_switch(model, "enable") is not None:
        return [model] if getattr(model, "supports_gradient_checkpointing", True) else []
    return [module for child in model.children() for module in list_recomputing(child)]


def recomputes(model: Any) -> bool:
    """Whether a module of transformers recomputes its activations now."""
    return bool(_list_switched_on(model))


def _list_switched_on(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]


def list_alike_layers(model: Any) -> list[list[Any]]:
    """List the layers that can be recomputed one by one, for each stack of layers."""
    from torch import nn

    stacks = [
        [layer for layer in module if isinstance(getattr(layer, "gradient_checkpointing", None), bool)]
        for part in list_recomputing(model)
        for module in part.modules()
        if isinstance(module, nn.ModuleList)
    ]
    return [stack for stack in stacks if stack]


def set_checkpointing(model: Any, checkpointing: bool | int, *, inputs_on_host: bool = False) -> None:
    """Make the model recompute its activations in backward, or keep them; with k, recompute one of k alike layers.

    With `inputs_on_host` the hidden states from which a layer recomputes wait for backward in pinned host memory.
    One that recomputes already goes on in its own way. transformers does it without reentering autograd, as every
    stage of DeepSpeed allows: `deepspeed/runtime/base_optimizer.py` has the extra care that the reentrant kind needs.
    """
    on = bool(checkpointing)
    for module in list_recomputing(model):
        if on and not recomputes(module):
            _find_switch(module, "enable")()
            _rest_without_gradients(module)
        elif not on and (disable := _find_switch(module, "disable")) is not None:
            disable()
    for stack in list_alike_layers(model) if checkpointing > 1 else ():
        for place, layer in enumerate(stack):
            layer.gradient_checkpointing = place % checkpointing == 0
    for module in _list_switched_on(model) if on and inputs_on_host else ():
        if (checkpoint := getattr(module, _CHECKPOINT, None)) is not None:
            setattr(module, _CHECKPOINT, _CheckpointOnHost(checkpoint))


class _CheckpointOnHost:
    """A function like `torch.utils.checkpoint.checkpoint` that saves the first tensor of its arguments on the host.

    Further tensors, such as masks, are those of many layers, and stay. Both copies are in the stream that computes,
    as those of `torch.autograd.graph.save_on_cpu`. DeepSpeed's own pool works through deepspeed.checkpointing alone.
    Its variant for transformers (0.19.8) keeps all that it has copied back until backward is over. It also misses
    inputs that the hooks of stage 3 have replaced.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        import torch

        hidden = next((value for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()), None)
        if hidden is None:
            return self.checkpoint(function, *args, **kwargs)
        known = hidden.data_ptr(), hidden.shape  # the tensor itself would live as long as the hook

        def pack(tensor: Any) -> Any:
            if (tensor.data_ptr(), tensor.shape) != known:
                return tensor
            on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
            return tensor.device, on_host.copy_(tensor, non_blocking=True)

        def unpack(packed: Any) -> Any:
            return packed[1].to(packed[0], non_blocking=True) if isinstance(packed, tuple) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.checkpoint(function, *args, **kwargs)


def _rest_without_gradients(model: Any) -> None:
    """Let the model recompute nothing in a forward without gradients.

    In training mode transformers' layers drop the cache of a generation where they recompute.
    """
    for module in model.modules():
        if _find_switch(type(module), "enable") is not None:
            rest = _Rest(module)
            module.register_forward_pre_hook(rest.begin)
            module.register_forward_hook(rest.end, always_call=True)


class _Rest:
    """Hooks of a model's forward. A model with such hooks can be pickled."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.resting: list[Any] = []  # modules that recompute otherwise

    def begin(self, *_: Any) -> None:
        import torch

        if not torch.is_grad_enabled():
            self.resting = _list_switched_on(self.model)
        for module in self.resting:
            module.gradient_checkpointing = False

    def end(self, *_: Any) -> None:
        for module in self.resting:
            module.gradient_checkpointing = True
        self.resting = []


def _find_switch(model: Any, action: str) -> Any:
    """The model's method that turns gradient checkpointing on ('enable') or off ('disable'), or None."""
    names = (f"{name}_{action}" for name in _SWITCHES)
    return next((getattr(model, name) for name in names if hasattr(model, name)), None)
