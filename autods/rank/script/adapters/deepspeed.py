"""DeepSpeed: `initialize` gets the chosen config, `zero.Init` the chosen stage, and the engine's calls are reported.

A trainer calls `deepspeed.initialize` for the script, so these hooks serve every kind of script.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import hjson

from ....config.deepspeed import SEQUENCE_RANKS, count_sharers, get_key
from ....system.stacks import Frame, find_caller
from ...checkpointing import set_checkpointing
from ...patching import declare, when_imported
from ..engine_config import read_config
from ..policy import Injection, Policy
from ..user_errors import script_error

_INITIALIZE = declare("deepspeed.initialize", "the engine gets the chosen config and is watched")
_ZERO_INIT = declare("deepspeed.zero.Init.__init__", "parameters are partitioned by the chosen stage, not the script's")
_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_REGISTER_ULYSSES = declare(
    f"{_ULYSSES}.UlyssesSPAttentionHF.register_with_transformers", "its attention refuses any other micro batch"
)
_DESTROY = declare("torch.distributed.destroy_process_group", "the ranks communicate once more before they part")


def install(injection: Injection) -> None:
    """Install the hooks for the rest of this process."""
    import deepspeed  # noqa: F401  the modules that import its symbols are patched too

    _INITIALIZE.wrap(_initialize, injection, everywhere=True)
    _ZERO_INIT.wrap(_partition, injection)
    _DESTROY.wrap(destroy_process_group, injection.policy, everywhere=True)
    when_imported(_ULYSSES, lambda: _REGISTER_ULYSSES.wrap(register_ulysses, injection.job.micro_batch))


def watch_engine(engine: Any, policy: Policy) -> None:
    """Report each call of the engine to the policy from now on.

    Optimizer steps are those that the engine counts: a plain script calls `step` once a micro batch, a trainer once an
    optimizer step. A script, or Lightning's Fabric, may also step the engine's optimizer alone.
    """
    hooks: Mapping[str, Callable[..., Any]] = {
        "forward": functools.partial(_forward, engine),
        "backward": _backward,
        "step": functools.partial(_step, engine),
        "train": _train,
        "train_batch": _train_batch,
        "eval_batch": _eval_batch,
        "save_checkpoint": _save,
        "save_16bit_model": _save,
        "load_checkpoint": load_checkpoint,
    }
    for name, hook in hooks.items():
        if hasattr(engine, name):
            _watch(engine, name, policy, hook)
    if hasattr(engine.optimizer, "step"):
        _watch(engine.optimizer, "step", policy, _step_optimizer)


def destroy_process_group(policy: Policy, original: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Tell the policy before the ranks lose their means of communication."""
    if group is None or group is importlib.import_module("torch.distributed").group.WORLD:
        policy.leave_group()
    return original(group, *args, **kwargs)


def register_ulysses(micro_batch: int, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Register Ulysses' attention for the chosen micro batch: scripts read theirs from a config of their own."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["micro_batch_size"] = micro_batch
    return original(*bound.args, **bound.kwargs)


# Calls of the engine.


def _watch(owner: Any, name: str, policy: Policy, hook: Callable[..., Any]) -> None:
    """Replace a method of one object. The hook gets the policy and the original method first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        if policy.hooks_paused:
            return original(*args, **kwargs)
        with policy.watch_call():
            return hook(policy, original, *args, **kwargs)

    setattr(owner, name, types.MethodType(call, owner))  # torch's schedulers need an optimizer's step to be a method


def _forward(engine: Any, policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    import torch

    training = torch.is_grad_enabled() and engine.training
    policy.begin_forward(args, kwargs, training=training)
    output = original(*args, **kwargs)
    if training:
        policy.end_forward(output)
    return output


def _backward(policy: Policy, original: Any, /, loss: Any = None, *args: Any, **kwargs: Any) -> Any:
    policy.begin_backward(loss)
    return original(loss, *args, **kwargs)


def _step(engine: Any, policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    before = engine.global_steps  # without `managed_gradient_accumulation`, a boundary is one while `step` runs alone
    policy.begin_phase("step")
    with policy.pause_hooks():  # the engine steps its optimizer
        result = original(*args, **kwargs)
    policy.end_step(boundary=engine.global_steps != before)
    return result


def _step_optimizer(policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    policy.begin_phase("step")
    with policy.pause_hooks():
        result = original(*args, **kwargs)
    policy.end_step(boundary=True)
    return result


def _train(policy: Policy, original: Any, /, mode: bool = True) -> Any:
    if not mode:
        policy.begin_other("evaluate")
    return original(mode)


def _save(policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    policy.begin_other("save")
    return original(*args, **kwargs)


def _eval_batch(policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A pipeline evaluates in one call: it sets its module to evaluation, not itself."""
    policy.begin_other("evaluate")
    with policy.pause_hooks():
        return original(*args, **kwargs)


def load_checkpoint(policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint, or explain why that fails: DeepSpeed does not say what it lacks in one of another stage."""
    policy.begin_other("load")
    try:
        return original(*args, **kwargs)
    except (AttributeError, AssertionError, KeyError, TypeError) as error:
        raise script_error(
            f"DeepSpeed cannot load its checkpoint ({type(error).__name__}: {error}): another ZeRO stage or number of "
            "ranks may have saved it",
            hint="name the rung that saved it by --ladder, or let the script begin without it; with "
            "autods.session(engine) a run loads its own checkpoints into any rung",
        ) from error


def _train_batch(policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A pipeline runs the whole optimizer step in one call, and calls its own methods inside it."""
    policy.begin_forward((), {}, training=True)
    with policy.pause_hooks():
        loss = original(*args, **kwargs)
    policy.note_loss(loss)
    policy.end_step(boundary=True)
    return loss


# deepspeed.initialize.


def _initialize(injection: Injection, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    policy = injection.policy
    policy.check_goes_on()
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    config, from_file = find_config(arguments)
    has_optimizer = arguments["optimizer"] is not None
    if config is not None and not has_optimizer and not arguments["model_parameters"] and "optimizer" not in config:
        # Nothing to train with: the engine serves a frozen model, such as a reference or a teacher.
        set_config(arguments, policy.adapt_config(injection.config.for_frozen_model(config)))
        return _refuse_training(original(*bound.args, **bound.kwargs), policy, find_caller())
    if policy.engine is not None:
        raise script_error(
            "it calls deepspeed.initialize a second time, to train another model",
            hint="give a script that trains one engine; further engines may only evaluate",
        )
    policy.begin_engine(injection, arguments, config, from_file=from_file)
    if config is not None:  # else DeepSpeed itself reports the problem
        chosen = injection.config.for_engine(config, has_optimizer=has_optimizer)
        check_shared_sequences(arguments["mpu"], chosen)
        set_config(arguments, policy.adapt_config(chosen))
    if not injection.job.source.keeps_checkpointing and hasattr(arguments["model"], "children"):
        set_checkpointing(arguments["model"], injection.job.checkpointing)
    policy.begin_phase("init")
    with policy.watch_call():
        returned = original(*bound.args, **bound.kwargs)
        policy.start_training(returned[0])
    watch_engine(returned[0], policy)
    return returned


def check_shared_sequences(mpu: Any, config: Mapping[str, Any]) -> None:
    """Raises WorkloadError where the ranks of the script's mpu share sequences, and the config tells nothing of that.

    DeepSpeed divides the ranks by the mpu's number; batch sizes and samples per second follow from the config's.
    """
    if mpu is None or hasattr(mpu, "get_data_parallel_world_size"):
        return
    sharers, known = mpu.get_sequence_parallel_world_size(), count_sharers(config, SEQUENCE_RANKS)
    if sharers != known:
        raise script_error(
            f"its mpu lets {sharers} ranks share each sequence, and its DeepSpeed config has {SEQUENCE_RANKS} {known}",
            hint=f'write "{SEQUENCE_RANKS}": {sharers} into that config, or into one for --base-config',
        )


def find_config(arguments: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The config that the script gives, and whether it is a file's. None where DeepSpeed itself reports the problem."""
    args = arguments["args"]
    in_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    in_call = arguments["config"] if arguments["config"] is not None else arguments["config_params"]
    if (in_call is None) == (in_args is None):  # no config, or two of them
        return None, False
    given: Any = in_args if in_call is None else in_call
    config = read_config(given, hjson.loads)
    return config, config is not None and not isinstance(given, Mapping) and os.path.isfile(given)


def set_config(arguments: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Replace the config, whichever way the script gives it."""
    arguments["config"], arguments["config_params"] = config, None
    if arguments["args"] is not None:
        args = arguments["args"] = copy.copy(arguments["args"])
        for name in ("deepspeed_config", "deepscale_config"):
            if getattr(args, name, None) is not None:
                setattr(args, name, None)


def _refuse_training(returned: Any, policy: Policy, place: Frame | None) -> Any:
    """What the script gets for a model that is only evaluated: training it is an error at the given line."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        policy.failure = script_error(
            "it trains an engine that has no optimizer",
            hint='give deepspeed.initialize an optimizer, model_parameters, or a config with "optimizer"',
            at=place,
        )
        raise policy.failure

    returned[0].backward = returned[0].step = refuse
    return returned


def _partition(injection: Injection, original: Any, /, *args: Any, **kwargs: Any) -> None:
    """`deepspeed.zero.Init` partitions parameters if the chosen stage is 3."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments, job = bound.arguments, injection.job
    is_stage_3 = get_key(job.ds_config, "zero_optimization.stage") == 3
    arguments["enabled"] = arguments["enabled"] and is_stage_3 and not job.stops_at_engine
    for name in ("config_dict_or_path", "config"):
        if (given := arguments.get(name)) is not None:
            chosen = injection.config.for_engine(read_config(given, hjson.loads) or {}, has_optimizer=False)
            arguments[name] = injection.policy.adapt_config(chosen)
    original(*bound.args, **bound.kwargs)
