"""bitsandbytes' 4-bit weights on the simulated GPU: fake tensors that say of themselves what its layers ask."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...rank.patching import declare, when_imported

_WEIGHTS = declare(
    "bitsandbytes.nn.modules.Params4bit.__new__", "a fake tensor cannot become one of its class", optional=True
)


def install() -> None:
    """Let weights be packed in this process, if bitsandbytes is ever imported."""
    when_imported("bitsandbytes.nn.modules", lambda: _WEIGHTS.install(staticmethod(_make_packer(_WEIGHTS.original()))))


def _make_packer(original: Any) -> Any:
    def make(cls: Any, data: Any = None, requires_grad: bool = False, **named: Any) -> Any:
        """`Params4bit`; of fake weights on a device, a parameter that is packed at once, not when it is moved there."""
        if not isinstance(data, FakeTensor):
            return original(cls, data, requires_grad, **named)
        import bitsandbytes

        fields = {name: named.get(name, value) for name, value in _DEFAULTS.items()}
        if data.device.type != "meta" and not fields["bnb_quantized"]:
            layout = {
                name: fields[name] for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")
            }
            data, fields["quant_state"] = bitsandbytes.functional.quantize_4bit(data.contiguous(), **layout)
            fields["bnb_quantized"] = True
        weights = torch.nn.Parameter(data, requires_grad)
        for name, value in fields.items():
            setattr(weights, name, value)
        if fields["module"] is not None:
            fields["module"].quant_state = fields["quant_state"]
        return weights

    return make


_DEFAULTS = {
    "quant_state": None, "blocksize": 64, "compress_statistics": True, "quant_type": "fp4",
    "quant_storage": torch.uint8, "module": None, "bnb_quantized": False,
}  # fmt: skip
