"""LoRA on the model of a Hugging Face config, by peft: `--lora [4bit:]RANK[,TARGETS]`.

The config's weights are frozen. Two narrow matrices beside each targeted linear layer train, as `peft.get_peft_model`
makes them. With `4bit:` (QLoRA) bitsandbytes holds the frozen linear layers in 4 bits, where transformers'
`from_pretrained` would: all but the head.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from ..errors import EnvironmentBroken, InputError
from .protocol import WorkloadError

ALL_LINEAR = "all-linear"
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
NOT_IN_PARTS = "--zero-init: 4-bit weights are made of whole ones", "drop it: stage 3 divides them after they are made"
_QLORA = "4bit:"
_MOST_RANK = 2**16
_SHOWN = 12  # names of layers in a message
_HINT = f"give --lora 16, --lora 16,q_proj,v_proj, or --lora {_QLORA}16; without names it is {ALL_LINEAR}"
_PACKAGES = {"peft": "makes the adapters", "bitsandbytes": "makes 4-bit weights", "accelerate": "is needed for them"}


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of this rank beside the linear layers with these names. Its text is what `parse_lora` reads.

    With `quantized` the frozen linear layers have 4 bits a weight.
    """

    rank: int
    targets: tuple[str, ...]
    quantized: bool = False

    def __str__(self) -> str:
        return _QLORA * self.quantized + ",".join((str(self.rank), *self.targets))

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of `peft.LoraConfig`. The scale α/r is 2, as is usual; memory and time do not depend on it."""
        targets = ALL_LINEAR if self.targets == (ALL_LINEAR,) else list(self.targets)
        return {"r": self.rank, "lora_alpha": 2 * self.rank, "target_modules": targets}


def parse_lora(value: str | int) -> Lora:
    """The LoRA that '[4bit:]RANK[,TARGET,…]' asks for. Raises InputError where that is none."""
    text = str(value).strip()
    rank, *targets = (word.strip() for word in text.removeprefix(_QLORA).split(","))
    if not rank.isdecimal() or not 0 < int(rank) <= _MOST_RANK or not all(targets):
        raise InputError(f"--lora {value!s:.80}: a rank from 1 to {_MOST_RANK:,} is needed", hint=_HINT)
    if ALL_LINEAR in targets and len(targets) > 1:
        raise InputError(f"--lora {value!s:.80}: {ALL_LINEAR} stands alone", hint=_HINT)
    targets = list(dict.fromkeys(targets)) or [ALL_LINEAR]
    return Lora(rank=int(rank), targets=tuple(targets), quantized=text.startswith(_QLORA))


def require_packages(lora: Lora) -> None:
    """Raises EnvironmentBroken where a package that makes these adapters is not installed."""
    for package in list(_PACKAGES)[: None if lora.quantized else 1]:
        if importlib.util.find_spec(package) is None:
            problem = f"--lora {lora}: {package} {_PACKAGES[package]}, and it is not installed"
            raise EnvironmentBroken(f"{problem}\n  pip install {package}")


def import_packages(lora: Lora) -> None:
    """Import what makes these adapters, once, before ranks are forked."""
    import peft  # noqa: F401

    if lora.quantized:
        import bitsandbytes  # noqa: F401


def add_lora(model: Any, *, lora: Lora, place: str) -> Any:
    """Return the model with its weights frozen and the adapters beside them, in the dtype of the weights.

    Weights of 4 bits are on this rank's device afterwards: bitsandbytes makes them there, layer by layer.

    Raises WorkloadError, with the config's `place`, for targets that the model does not have.
    """
    from peft import LoraConfig, get_peft_model

    names = _name_linear_layers(model)
    if missing := [name for name in lora.targets if name != ALL_LINEAR and name not in names]:
        listed = ", ".join(names[:_SHOWN]) + ("…" if len(names) > _SHOWN else "")
        raise WorkloadError(
            f"--lora: the model has no linear layer {missing[0]!r}", place=place, hint=f"it has {listed}"
        )
    if lora.quantized:
        if any(hasattr(weights, "ds_id") for weights in model.parameters()):  # also where a plan proposes --zero-init
            raise WorkloadError(NOT_IN_PARTS[0], place=place, hint=NOT_IN_PARTS[1])
        _quantize(model)
    try:
        return get_peft_model(model, LoraConfig(**lora.config), autocast_adapter_dtype=False)
    except ValueError as error:  # no linear layer at all, or one that peft does not support
        reason = " ".join(str(error).split())
        raise WorkloadError(f"--lora: peft refuses the model: {reason:.200}", place=place, hint=_HINT) from None


def _quantize(model: Any) -> None:
    """Hold the linear layers in 4 bits a weight, as transformers' quantizer does when it loads a checkpoint in bf16.

    They compute in the dtype of their input. The bytes are uint8, which no engine casts to its own precision.
    """
    import torch
    from deepspeed.accelerator import get_accelerator
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    config = BitsAndBytesConfig(**FOUR_BITS)
    config.bnb_4bit_compute_dtype = None  # its own default is fp32
    quantizer, device = Bnb4BitHfQuantizer(config), get_accelerator().current_device_name()
    whole = dict(model.named_modules())
    quantizer.preprocess_model(model, device_map=None)
    operation = quantizer.get_quantize_ops()
    for name, layer in model.named_modules():
        if layer is whole[name]:
            continue
        weight, bias = f"{name}.weight", whole[name].bias
        made = operation.convert({weight: whole.pop(name).weight.detach().to(device, torch.bfloat16)}, weight, model)
        layer.weight, layer.bias = made[weight], bias
        scales = made[weight].quant_state
        for tensor in (
            (scales.absmax, scales.offset, scales.state2.absmax) if torch.distributed.is_initialized() else ()
        ):
            torch.distributed.broadcast(tensor, 0)  # DeepSpeed does so with parameters alone
        layer.support_avx512bf16_for_cpu = False  # an evaluation would repack weights, and no gradient pass them then
        layer.register_load_state_dict_pre_hook(_load_scales)
    model.is_loaded_in_4bit = True  # as peft asks


def _load_scales(layer: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Take a layer's scales out of a checkpoint: bitsandbytes puts them there, and loads its weights alone."""
    from bitsandbytes.functional import QuantState

    scales = {name: state.pop(name) for name in list(state) if name.startswith(f"{prefix}weight.")}
    if scales:
        layer.quant_state = layer.weight.quant_state = QuantState.from_dict(scales, layer.quant_state.absmax.device)


def _name_linear_layers(model: Any) -> list[str]:
    """The last part of each linear layer's name, as targets are given, each once."""
    import torch
    from transformers.pytorch_utils import Conv1D

    linear = (torch.nn.Linear, Conv1D)
    names = (name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, linear))
    return list(dict.fromkeys(names))
