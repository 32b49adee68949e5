"""LoRA on the model of a Hugging Face config, by peft: `--lora RANK[,TARGETS]`.

The config's weights are frozen. Two narrow matrices beside each targeted linear layer train, as `peft.get_peft_model`
makes them.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from ..errors import EnvironmentBroken, InputError
from .protocol import WorkloadError

ALL_LINEAR = "all-linear"
_MOST_RANK = 2**16
_SHOWN = 12  # names of layers in a message
_HINT = f"give --lora 16, or --lora 16,q_proj,v_proj; without names it is {ALL_LINEAR}"


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of this rank beside the linear layers with these names. Its text is what `parse_lora` reads."""

    rank: int
    targets: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join((str(self.rank), *self.targets))

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of `peft.LoraConfig`. The scale α/r is 2, as is usual; memory and time do not depend on it."""
        targets = ALL_LINEAR if self.targets == (ALL_LINEAR,) else list(self.targets)
        return {"r": self.rank, "lora_alpha": 2 * self.rank, "target_modules": targets}


def parse_lora(value: str | int) -> Lora:
    """The LoRA that 'RANK' or 'RANK,TARGET,…' asks for. Raises InputError where that is none."""
    rank, *targets = (word.strip() for word in str(value).split(","))
    if not rank.isdecimal() or not 0 < int(rank) <= _MOST_RANK or not all(targets):
        raise InputError(f"--lora {value!s:.80}: a rank from 1 to {_MOST_RANK:,} is needed", hint=_HINT)
    if ALL_LINEAR in targets and len(targets) > 1:
        raise InputError(f"--lora {value!s:.80}: {ALL_LINEAR} stands alone", hint=_HINT)
    return Lora(rank=int(rank), targets=tuple(dict.fromkeys(targets)) or (ALL_LINEAR,))


def require_peft() -> None:
    """Raises EnvironmentBroken where peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise EnvironmentBroken("--lora: peft makes the adapters, and it is not installed\n  pip install peft")


def add_lora(model: Any, *, lora: Lora, place: str) -> Any:
    """Return the model with its weights frozen and the adapters beside them, in the dtype of the weights.

    Raises WorkloadError, with the config's `place`, for targets that the model does not have.
    """
    from peft import LoraConfig, get_peft_model

    names = _name_linear_layers(model)
    if missing := [name for name in lora.targets if name != ALL_LINEAR and name not in names]:
        listed = ", ".join(names[:_SHOWN]) + ("…" if len(names) > _SHOWN else "")
        raise WorkloadError(
            f"--lora: the model has no linear layer {missing[0]!r}", place=place, hint=f"it has {listed}"
        )
    try:
        return get_peft_model(model, LoraConfig(**lora.config), autocast_adapter_dtype=False)
    except ValueError as error:  # no linear layer at all, or one that peft does not support
        reason = " ".join(str(error).split())
        raise WorkloadError(f"--lora: peft refuses the model: {reason:.200}", place=place, hint=_HINT) from None


def _name_linear_layers(model: Any) -> list[str]:
    """The last part of each linear layer's name, as targets are given, each once."""
    import torch
    from transformers.pytorch_utils import Conv1D

    linear = (torch.nn.Linear, Conv1D)
    names = (name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, linear))
    return list(dict.fromkeys(names))
