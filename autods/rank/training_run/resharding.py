"""Load DeepSpeed's checkpoint into an engine of another rung, another number of ranks or another optimizer class.

DeepSpeed 0.19.8 has its universal checkpoint for this: a second copy on the disk, made by a program of its own. It does
not serve here. Its converter refuses stage 0, an optimizer on NVMe and optimizers other than Adam. Its loader of stage
3 gives all parameter groups the settings of the first one, and one counter of steps to all tensors, which then counts
several times a step. It loads neither buffers nor frozen parameters, and nothing into stage 0 or NVMe. So each rank
reads the parts that it needs from the files of all ranks, which are mapped into memory, not loaded.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..patching import SymbolMissing

FP32 = "fp32"  # the key of the weights beside the optimizer's states
_STEP = "step"


@dataclass(slots=True)
class SavedParameter:
    """The states of one parameter, in consecutive parts: each key has one flat tensor a part, from `starts` on."""

    starts: list[int] = field(default_factory=list)
    parts: list[Mapping[str, Any]] = field(default_factory=list)

    def append(self, part: Mapping[str, Any]) -> None:
        """Add the part that follows."""
        last = self.parts[-1][FP32].numel() + self.starts[-1] if self.parts else 0
        self.starts.append(last)
        self.parts.append(part)

    def read_into(self, target: Any, key: str, start: int) -> None:
        """Copy the elements from `start` on into a flat tensor."""
        index, filled = bisect.bisect_right(self.starts, start) - 1, 0
        while filled < target.numel():
            source = self.parts[index][key]
            offset = start + filled - self.starts[index]
            count = min(source.numel() - offset, target.numel() - filled)
            target.narrow(0, filled, count).copy_(source.narrow(0, offset, count))
            filled, index = filled + count, index + 1


@dataclass(slots=True)
class SavedStates:
    """What the files of a checkpoint hold: `parameters` by name, those that are frozen, buffers, and the counters."""

    parameters: dict[str, SavedParameter] = field(default_factory=dict)
    frozen: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()  # of the optimizer's states
    step: int | None = None  # of the optimizer; None: it does not count


def read_states(folder: Path, stage: int, names: Sequence[Sequence[str]]) -> SavedStates:
    """Map the files in the folder of a checkpoint's tag.

    `names` are those of the trained parameters by group, in the optimizer's order; stage 0 does not save them.
    """
    import torch

    states = SavedStates()
    model_files = sorted(folder.glob("*mp_rank_00_model_states.pt"), key=_rank_in_name)
    models = [_map_file(file) for file in model_files]
    states.counters = models[0]
    states.buffers = {name: models[0]["module"][name] for name in models[0]["buffer_names"]}
    if stage == 0:
        _read_stage_0(states, models[0], names)
    else:
        files = sorted(folder.glob("*_optim_states.pt"), key=_rank_in_name)
        optimizers = [_map_file(file)["optimizer_state_dict"] for file in files]
        if stage == 3:
            _read_stage_3(states, models[0]["param_shapes"], optimizers)
        else:
            _read_stages_1_2(states, optimizers)
    if stage == 3:  # each rank has a share of every frozen parameter
        for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
            shares = torch.cat([model["frozen_param_fragments"][name].flatten() for model in models])
            states.frozen[name] = shares.narrow(0, 0, shape.numel()).view(shape)
    else:
        others = states.parameters.keys() | states.buffers.keys()
        states.frozen = {name: tensor for name, tensor in models[0]["module"].items() if name not in others}
    return states


def _read_stage_0(states: SavedStates, model: Mapping[str, Any], names: Sequence[Sequence[str]]) -> None:
    """Every rank has saved the same. In half precision the weights in fp32 are by parameter or one tensor a group."""
    saved, module = model["optimizer"], model["module"]
    base = saved.get("optimizer_state_dict", saved)
    identities = [identity for group in base["param_groups"] for identity in group["params"]]
    if "fp32_groups_flat" in saved:
        for group, flat, identity in zip(names, saved["fp32_groups_flat"], identities, strict=True):
            state, offset = _take(states, base, identity, flat.numel()), 0
            for name in group:
                count = module[name].numel()
                part = {key: value.narrow(0, offset, count) for key, value in {FP32: flat, **state}.items()}
                states.parameters.setdefault(name, SavedParameter()).append(part)
                offset += count
        return
    weights = [tensor for group in saved["fp32_groups"] for tensor in group] if "fp32_groups" in saved else None
    for index, (name, identity) in enumerate(zip([n for group in names for n in group], identities, strict=True)):
        weight = module[name] if weights is None else weights[index]
        state = _take(states, base, identity, weight.numel())
        states.parameters.setdefault(name, SavedParameter()).append({FP32: weight.flatten(), **state})


def _read_stages_1_2(states: SavedStates, optimizers: Sequence[Mapping[str, Any]]) -> None:
    """Each rank has a flat tensor a group, and a table of which parts of which parameters lie where in it."""
    for optimizer in optimizers:
        base = optimizer["base_optimizer_state"]
        for index, flat in enumerate(optimizer["single_partition_of_fp32_groups"]):
            state = _take(states, base, base["param_groups"][index]["params"][0], flat.numel())
            for name, place in optimizer["param_slice_mappings"][index].items():
                part = {key: value.narrow(0, place.start, place.numel) for key, value in {FP32: flat, **state}.items()}
                states.parameters.setdefault(name, SavedParameter()).append(part)


def _read_stage_3(
    states: SavedStates, shapes: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]
) -> None:
    """Each rank has its share of every parameter, padded, one after the other in a flat tensor a subgroup."""
    for optimizer in optimizers:
        base = optimizer["optimizer_state_dict"]
        identities = [identity for group in base["param_groups"] for identity in group["params"]]
        for subgroup, identity, flat in zip(shapes, identities, optimizer["fp32_flat_groups"], strict=True):
            state, offset = _take(states, base, identity, flat.numel()), 0
            for name, shape in subgroup.items():
                share = -(-shape.numel() // len(optimizers))
                part = {key: value.narrow(0, offset, share) for key, value in {FP32: flat, **state}.items()}
                states.parameters.setdefault(name, SavedParameter()).append(part)
                offset += share


def _take(states: SavedStates, base: Mapping[str, Any], identity: int, count: int) -> dict[str, Any]:
    """The flat tensors of an optimizer's state. A counter of steps is kept: Adam's are the same for all parameters."""
    import torch

    state = base["state"].get(identity, {})
    groups = [group for group in base["param_groups"] if identity in group["params"]]
    step = state.get(_STEP, groups[0].get(_STEP))
    if step is not None:
        states.step = max(int(step), states.step or 0)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
    kept = {key: value.flatten() for key, value in tensors.items() if value.numel() >= count}
    states.keys = tuple(dict.fromkeys([*states.keys, *kept]))
    return kept


# Into an engine.


def write_states(engine: Any, states: SavedStates, names: Mapping[Any, str]) -> None:
    """Give a new engine the states. `names` maps its parameters to their names.

    It uses private parts of DeepSpeed's optimizers. Raises SymbolMissing where this release lacks one.
    """
    import torch
    from deepspeed import __version__

    stage = int(engine.zero_optimization_stage())
    try:
        with torch.no_grad():
            _write_whole(engine, states)
            if stage == 3:
                _write_stage_3(engine.optimizer, states, names)
            elif stage:
                _write_stages_1_2(engine.optimizer, states, names)
            else:
                _write_stage_0(engine, states, names)
    except AttributeError as error:
        raise SymbolMissing(
            f"a checkpoint cannot be read into an engine of DeepSpeed {__version__}: {error}\n"
            "  install the versions of constraints.txt, or go on with the rung and the number of ranks that wrote it"
        ) from error
    if engine.lr_scheduler is not None and states.counters.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(states.counters["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, states.counters[name])


def _write_whole(engine: Any, states: SavedStates) -> None:
    """Buffers and frozen parameters, which are whole on every rank or partitioned by stage 3."""
    import deepspeed

    for name, buffer in engine.module.named_buffers():
        if name in states.buffers:
            buffer.copy_(states.buffers[name])
    for name, parameter in engine.module.named_parameters():
        if name not in states.frozen:
            continue
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if deepspeed.comm.get_rank() == 0:
                    parameter.copy_(states.frozen[name])
        else:
            parameter.copy_(states.frozen[name])


def _write_stage_0(engine: Any, states: SavedStates, names: Mapping[Any, str]) -> None:
    wrapper, base = engine.optimizer, engine.basic_optimizer
    if hasattr(wrapper, "fp32_groups_flat"):  # one tensor a group, for DeepSpeed's FusedAdam
        for group, flat, parameters in zip(
            base.param_groups, wrapper.fp32_groups_flat, wrapper.fp16_groups, strict=True
        ):
            places, offset = [], 0
            for parameter in parameters:
                places.append(_Place(names[parameter], 0, offset, parameter.numel()))
                offset += parameter.numel()
            _fill(base, group, flat, states, places)
            for parameter, place in zip(parameters, places, strict=True):
                parameter.copy_(flat.narrow(0, place.offset, place.count).view_as(parameter))
        return
    masters = getattr(wrapper, "fp32_groups", None) or [group["params"] for group in base.param_groups]
    models = getattr(wrapper, "fp16_groups", masters)
    for group, tensors, parameters in zip(base.param_groups, masters, models, strict=True):
        for tensor, parameter in zip(tensors, parameters, strict=True):
            _fill(base, group, tensor, states, [_Place(names[parameter], 0, 0, parameter.numel())])
            if tensor is not parameter:
                parameter.copy_(tensor)


def _write_stages_1_2(optimizer: Any, states: SavedStates, names: Mapping[Any, str]) -> None:
    base = optimizer.optimizer
    if hasattr(optimizer, "bf16_groups"):  # of stage 1 in bf16 with data_types.grad_accum_dtype fp32: other names
        flats, groups = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
    else:
        flats, groups = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups
    for index, (flat, group) in enumerate(zip(flats, groups, strict=True)):
        places = []
        for parameter in group:
            if (mapping := parameter._hp_mapping) is not None:  # a part of it is this rank's
                here, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
                places.append(_Place(names[parameter], whole.start, here.start, here.numel))
        _fill(base, base.param_groups[index], flat, states, places)
    optimizer.update_lp_params()


def _write_stage_3(optimizer: Any, states: SavedStates, names: Mapping[Any, str]) -> None:
    base = optimizer.optimizer
    optimizer.checkpoint_event_prologue()
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        swaps = optimizer._swappable_optimizer_subgroup(index)
        if swaps:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        places, offset = [], 0
        for parameter in optimizer.fp16_groups[index]:
            share = parameter.partition_numel()
            start = share * optimizer._get_param_partition_rank(parameter)
            count = max(0, min(share, parameter.ds_numel - start))
            places.append(_Place(names[parameter], start, offset, count))
            offset += share
        _fill(base, base.param_groups[optimizer.sub_group_to_group_id[index]], flat, states, places)
        optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if swaps:
            optimizer._optimizer_states_and_gradient_swap_out(index)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
    optimizer.checkpoint_event_epilogue()


@dataclass(frozen=True, slots=True)
class _Place:
    """`count` elements of a parameter from `start` on lie at `offset` of a flat tensor."""

    name: str
    start: int
    offset: int
    count: int


def _fill(base: Any, group: dict[str, Any], tensor: Any, states: SavedStates, places: Sequence[_Place]) -> None:
    """Fill a tensor of weights in fp32 and the optimizer's states of it. What no parameter has is zero: padding."""
    import torch

    state = base.state[tensor]
    targets = {FP32: tensor.data}
    for key in states.keys:
        if not isinstance(state.get(key), torch.Tensor) or state[key].numel() != tensor.numel():
            state[key] = torch.zeros_like(tensor.data)
        targets[key] = state[key].data
    for key, target in targets.items():
        flat = target.view(-1)
        for place in places:
            if place.count:
                states.parameters[place.name].read_into(flat.narrow(0, place.offset, place.count), key, place.start)
    if states.step is not None:
        _set_step(base, group, state, states.step, tensor)


def count_steps(base: Any) -> int | None:
    """The optimizer's counter of steps; None where it has none."""
    holders = [*base.state.values(), *base.param_groups]
    return max((int(holder[_STEP]) for holder in holders if _STEP in holder), default=None)


def set_steps(base: Any, step: int) -> None:
    """Set the optimizer's counter of steps for all its tensors."""
    for tensor, state in base.state.items():
        _set_step(base, base.param_groups[0], state, step, tensor)


def _set_step(base: Any, group: dict[str, Any], state: dict[str, Any], step: int, tensor: Any) -> None:
    """Set the optimizer's counter of steps where its class looks for it: each tensor has a counter of its own."""
    import torch

    if type(base).__module__.startswith("torch.optim"):
        on_device = group.get("fused") or group.get("capturable")
        state[_STEP] = torch.tensor(float(step), device=tensor.device if on_device else "cpu")
        return
    state[_STEP] = step  # DeepSpeed's CPU Adam
    group[_STEP] = step  # its FusedAdam


# Files.


def _map_file(path: Path) -> dict[str, Any]:
    import torch

    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    return content


def _rank_in_name(path: Path) -> int:
    """The data-parallel rank in zero_pp_rank_N_mp_rank_00…; 0 where the name has none."""
    _, _, rest = path.name.partition("pp_rank_")
    digits = rest.partition("_")[0]
    return int(digits) if digits.isdigit() else 0
