"""An optimizer that lies on the device in part: `offload_optimizer.ratio` below 1, of ZeRO stage 3.

DeepSpeed 0.19.8 steps the sub-groups that stay on the device by a `backup_optimizer`. Its first parameter group keeps
the learning rate that it began with, whatever a schedule says, and no checkpoint holds its moments (stage3.py, lines
317, 326, 1256 and 3442). Here both optimizers read the same settings and keep their moments in the same place, so a
schedule reaches both and a checkpoint holds both. On CPU ranks DeepSpeed takes the host's optimizer for all sub-groups,
because device and host have one name there; here they are divided as on cards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patching import declare

_STEP = declare(
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._optimizer_step",
    "the part of an optimizer that stays on the device follows schedules, and checkpoints hold it",
    optional=True,
)
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_HOST = "cpu"
_CPU_DEVICE = "cpu:0"  # the same to torch; DeepSpeed compares names


def mend_partial_offload() -> None:
    """Let both parts of a stage 3 optimizer follow the same settings, for the rest of this process."""
    _STEP.wrap(_step_sub_group)


def _step_sub_group(step: Callable[..., None], zero: Any, sub_group: int) -> None:
    """Step a sub-group by the optimizer of its part; `zero` is DeepSpeed's optimizer of stage 3."""
    import torch

    if hasattr(zero, "backup_optimizer"):
        host, on_device = zero.optimizer, _divide(zero, sub_group)
        if zero.backup_optimizer.state is not host.state:  # the first step, or a checkpoint was loaded
            zero.backup_optimizer = _make_device_optimizer(host)
        for group, scheduled in zip(zero.backup_optimizer.param_groups, host.param_groups, strict=True):
            group.update({name: scheduled[name] for name in _SETTINGS})
        weights = zero.fp32_partitioned_groups_flat[sub_group]
        state = host.state.get(weights, {})
        if (
            "step" in state
        ):  # a checkpoint may have had the sub-group in the other part, whose counter is of another type
            count = state["step"]
            if on_device:
                state["step"] = torch.as_tensor(count, dtype=torch.float32, device=weights.device)
            elif torch.is_tensor(count):
                state["step"] = int(count)
    step(zero, sub_group)


def _divide(zero: Any, sub_group: int) -> bool:
    """Return whether the sub-group lies on the device; names CPU ranks' device apart from their host."""
    from deepspeed.accelerator import get_accelerator

    places = zero.subgroup_to_device
    if get_accelerator().device_name() == _HOST and sub_group < int((1 - zero.partial_offload) * len(places)):
        places[sub_group] = _CPU_DEVICE
    return bool(places[sub_group] != _HOST)


def _make_device_optimizer(host: Any) -> Any:
    """Return torch's Adam or AdamW, as the host's optimizer is, whose states are those of the host's.

    It is the fused one, as on rungs without offload: torch's default takes a temporary of 4 bytes an element.
    """
    import torch

    kind = torch.optim.AdamW if host.adam_w_mode else torch.optim.Adam
    optimizer = kind([{"params": []} for _ in host.param_groups], fused=True)
    optimizer.state = host.state
    return optimizer
