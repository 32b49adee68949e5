"""The states of a rank's training: what DeepSpeed's checkpoint holds, what it leaves out, and how both come back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...workload.protocol import WorkloadError
from ..model_facts import find_card
from .checkpoints import RANKS, STATE, Layout, SavedCheckpoint, can_load_directly, find_obstacle
from .resharding import count_steps, read_states, set_steps, write_states

# Settings of a parameter group that its optimizer reads, in the words of torch's and DeepSpeed's optimizers.
_SETTINGS = ("lr", "initial_lr", "weight_decay", "betas", "eps", "momentum", "alpha", "bias_correction")


def find_replica(engine: Any) -> tuple[int, int]:
    """Return this rank's number among the replicas that the batch counts, and how many there are.

    Neighbouring ranks that share a sequence are one; their engine may have no group, or one of all ranks.
    """
    from deepspeed import comm

    group, replicas = getattr(engine, "data_parallel_group", None), int(engine._config.world_size)
    if group is not None and int(engine.dp_world_size) <= replicas:
        return int(comm.get_rank(group=group)), int(engine.dp_world_size)
    if replicas == 1:
        return 0, 1
    return int(comm.get_rank()) * replicas // int(comm.get_world_size()), replicas


def describe_layout(engine: Any) -> Layout:
    """How the states of this engine lie on its ranks."""
    # AutoTP, or an mpu of the script, splits layers: the files of each such rank hold other parts of equal names.
    splits_layers = int(getattr(engine, "mp_world_size", 1)) > 1
    divided = hasattr(engine, "num_stages") or bool(getattr(engine, "has_moe_layers", False)) or splits_layers
    return Layout.from_config(engine._config._param_dict, int(engine.world_size), divided=divided)


def base_optimizer(engine: Any) -> Any:
    """The optimizer that DeepSpeed's wraps, or that trains alone."""
    return engine.basic_optimizer or engine.optimizer


# Checkpoints.


def save_engine(engine: Any, folder: Path) -> None:
    """Save this rank's part of DeepSpeed's files; all ranks call it."""
    engine.save_checkpoint(str(folder), tag=STATE, save_latest=False)


def finish_writing(engine: Any) -> None:
    """Wait for a writer that works beside the training (`checkpoint.writer.decoupled`); all ranks call it."""
    writer: Any = getattr(engine, "checkpoint_engine", None)
    if hasattr(writer, "is_decoupled") and writer.is_decoupled():
        engine._commit_decoupled_checkpoint()  # DeepSpeed itself does so in the next step


def save_rank_file(
    engine: Any, folder: Path, *, rank: int, state: Mapping[str, Any], schedules: Sequence[Any] = ()
) -> None:
    """Save what DeepSpeed's files leave out. `state` is the script's or its trainer's."""
    import torch

    groups = [{key: value for key, value in group.items() if key != "params"} for group in param_groups(engine)]
    content = {
        "random": random_states(),
        "state": dict(state),
        "schedules": list(schedules),
        "groups": groups,
        "names": name_groups(engine),
        "loss_scale": read_loss_scale(engine),
        "step": count_steps(base_optimizer(engine)),
    }
    torch.save(content, folder / RANKS / rank_file(rank))


def load(engine: Any, checkpoint: SavedCheckpoint, *, strict: bool = True) -> None:
    """Load a checkpoint into a new engine: weights, optimizer, schedule and loss scale; all ranks call it.

    `strict` False: the checkpoint may lack frozen parameters. Raises WorkloadError where the layout does not allow it.
    """
    layout = describe_layout(engine)
    if (obstacle := find_obstacle(checkpoint, layout)) is not None:
        raise WorkloadError(f"{checkpoint.path} cannot be loaded here: {obstacle}")
    saved = read_rank_file(checkpoint.path / RANKS / rank_file(0))
    if can_load_directly(checkpoint.manifest, layout, type(base_optimizer(engine)).__name__):
        path, _ = engine.load_checkpoint(str(checkpoint.path), tag=STATE, load_module_strict=strict)
        if path is None:
            raise RuntimeError(f"DeepSpeed found nothing to load in {checkpoint.path}")
        if layout.offload_optimizer == "nvme" and saved["step"] is not None:
            set_steps(base_optimizer(engine), saved["step"])  # it copies the swapped tensors back, and no more
    else:
        states = read_states(checkpoint.path / STATE, checkpoint.layout.stage, saved["names"])
        write_states(engine, states, engine.param_names)
        set_loss_scale(engine, saved["loss_scale"])
    # A schedule sets the rate of the step after the next one; DeepSpeed may leave the other settings as they were.
    set_groups(engine, saved["groups"])


def name_groups(engine: Any) -> list[list[str]]:
    """The names of the trained parameters by group, in the optimizer's order; empty for stages that save them."""
    if engine.zero_optimization_stage() or not isinstance(getattr(engine, "param_names", None), dict):
        return []
    groups = getattr(engine.optimizer, "fp16_groups", None) or [group["params"] for group in param_groups(engine)]
    return [[engine.param_names[parameter] for parameter in group] for group in groups]


def read_loss_scale(engine: Any) -> float | None:
    """The scale of losses in fp16; None where the engine's optimizer has none, as in fp32 without ZeRO."""
    scale: float | None = getattr(_find_scaler(engine.optimizer), "cur_scale", None)
    return scale


def set_loss_scale(engine: Any, scale: float | None) -> None:
    """Go on with the saved scale of fp16. When it grows next is counted anew."""
    if scale is not None and engine.fp16_enabled() and engine.dynamic_loss_scale():
        _find_scaler(engine.optimizer).cur_scale = scale


def _find_scaler(optimizer: Any) -> Any:
    """What holds the scale of losses: ZeRO's optimizers have a scaler, those of stage 0 a config (DeepSpeed 0.19.8)."""
    return optimizer.loss_scaler if hasattr(optimizer, "loss_scaler") else getattr(optimizer, "loss_scale_config", None)


def rank_file(rank: int) -> str:
    """The name of a rank's own file in a checkpoint."""
    return f"rank{rank:05d}.pt"


def read_rank_file(path: Path) -> dict[str, Any]:
    """What a rank has saved beside DeepSpeed's files."""
    import torch

    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return content


def set_groups(engine: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Give the parameter groups the settings that they had, such as their learning rates."""
    for group, values in zip(param_groups(engine), saved, strict=True):
        group.update({key: value for key, value in values.items() if key in group and key in _SETTINGS})


def param_groups(engine: Any) -> Sequence[dict[str, Any]]:
    """The parameter groups of the base optimizer, whose learning rate a schedule sets."""
    groups: Sequence[dict[str, Any]] = base_optimizer(engine).param_groups
    return groups


# Random generators.


def random_states() -> dict[str, Any]:
    """The states of this rank's generators: Python's, NumPy's, torch's on the CPU and on the rank's device."""
    import numpy
    import torch

    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if (card := find_card()) is not None:
        kind, module = card
        states[kind] = module.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set what `random_states` returned."""
    import numpy
    import torch

    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if (card := find_card()) is not None and card[0] in states:
        kind, module = card
        module.set_rng_state(states[kind])


@contextlib.contextmanager
def preserved_random_states() -> Iterator[None]:
    """Let the block draw from generators that it seeds, and set them back after it."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


# Batches and losses.


def move(batch: Any, device: Any) -> Any:
    """Return a batch with its tensors on the device."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def average(losses: Sequence[Any]) -> Any:
    """Return the mean of some losses, as a number or a scalar on the device, which is not waited for; None of none."""
    import torch

    if not losses:
        return None
    if not isinstance(losses[0], torch.Tensor) or losses[0].is_cpu:
        return sum(map(float, losses)) / len(losses)
    return torch.stack([loss.float().reshape(()) for loss in losses]).mean()


def start_copy(losses: Sequence[Any]) -> Callable[[], Sequence[float | None]]:
    """Begin to copy results of `average` to the host; the function that is returned waits for them and reads them."""
    import torch

    on_device = [index for index, loss in enumerate(losses) if isinstance(loss, torch.Tensor)]
    if not on_device:
        return lambda: losses
    stacked = torch.stack([losses[index] for index in on_device])
    on_host = torch.empty_like(stacked, device="cpu", pin_memory=True)  # whatever a script's default device and dtype
    on_host.copy_(stacked, non_blocking=True)
    copied = torch.get_device_module(stacked.device).Event()
    copied.record()

    def read() -> Sequence[float | None]:
        copied.synchronize()
        numbers = dict(zip(on_device, on_host.tolist(), strict=True))
        return [numbers.get(index, loss) for index, loss in enumerate(losses)]

    return read
