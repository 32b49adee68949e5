"""Hooks around `deepspeed.initialize` and the engine that a script makes."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...config.deepspeed import get_key, without_monitors
from ...system.stacks import Place, find_caller
from ...types import ModelFacts, Phase
from .. import pipeline
from ..model_facts import count_parameters
from ..patching import declare
from .engine_config import read_config
from .session import Session
from .user_errors import script_error

INITIALIZE = declare("deepspeed.initialize", "the engine gets the trial's config and is watched")
_ZERO_INIT = declare(
    "deepspeed.zero.Init.__init__", "parameters are partitioned by the trial's stage, not the script's"
)
_DESTROY = declare("torch.distributed.destroy_process_group", "an exam ends while the ranks can still communicate")


def install(session: Session) -> None:
    """Install the hooks for the rest of this process, and those of the library that the script uses."""
    import deepspeed  # noqa: F401  the modules that import its symbols are patched too

    if session.job.job == "survey":
        pipeline.build_all_layers()
    INITIALIZE.wrap(_initialize, session, everywhere=True)
    _ZERO_INIT.wrap(_partition, session)
    _DESTROY.wrap(destroy_process_group, session, everywhere=True)
    kind = session.job.source.script_kind
    if kind not in (None, "deepspeed"):  # a library calls `deepspeed.initialize` for the script
        importlib.import_module(f".adapters.{kind}", __package__).install(session)


def watch_engine(engine: Any, session: Session) -> None:
    """Report each call of the engine to the session from now on.

    Optimizer steps are counted at the boundary of accumulation: a plain script calls `step` once a micro batch, a
    trainer once an optimizer step. A script, or Lightning's Fabric, may also step the engine's optimizer alone.
    """
    hooks: Mapping[str, Callable[..., Any]] = {
        "forward": functools.partial(_forward, engine),
        "backward": _backward,
        "step": functools.partial(_step, lambda: bool(engine.is_gradient_accumulation_boundary())),
        "train": _train,
        "train_batch": _train_batch,
    }
    for name, hook in hooks.items():
        if hasattr(engine, name):
            _watch(engine, name, session, hook)
    if hasattr(engine.optimizer, "step"):
        _watch(engine.optimizer, "step", session, functools.partial(_step, lambda: True))


def skip_methods(
    session: Session, owner: str, *names: str, phase: Phase = "save", returns: Callable[[], Any] = lambda: None
) -> None:
    """Let methods of a library's class do nothing: they are not a part of training.

    `owner` is the dotted name of the class. Some supported releases lack some of the methods.
    """

    def skip(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        session.begin_skipped(phase)
        return returns()

    for name in names:
        declare(f"{owner}.{name}", f"a trial does not {phase}", optional=True).wrap(skip)


def destroy_process_group(session: Session, original: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Finish the exam before the ranks lose their means of communication."""
    is_world = group is None or group is importlib.import_module("torch.distributed").group.WORLD
    if is_world and session.engine is not None and len(session.recorder.times) > session.job.steps.warmup:
        session.finish_exam()
    return original(group, *args, **kwargs)


# Calls of the engine.


def _watch(owner: Any, name: str, session: Session, hook: Callable[..., Any]) -> None:
    """Replace a method of one object. The hook gets the session and the original method first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        if session.hooks_paused:
            return original(*args, **kwargs)
        with session.watch_call():
            return hook(session, original, *args, **kwargs)

    setattr(owner, name, types.MethodType(call, owner))  # torch's schedulers need an optimizer's step to be a method


def _forward(engine: Any, session: Session, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    import torch

    training = torch.is_grad_enabled() and engine.training
    session.begin_forward(args, kwargs, training=training)
    output = original(*args, **kwargs)
    if training:
        session.end_forward(output)
    return output


def _backward(session: Session, original: Any, /, loss: Any = None, *args: Any, **kwargs: Any) -> Any:
    session.begin_backward(loss)
    return original(loss, *args, **kwargs)


def _step(is_boundary: Callable[[], bool], session: Session, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    boundary = is_boundary()
    session.begin_phase("step")
    with session.pause_hooks():  # the engine steps its optimizer
        result = original(*args, **kwargs)
    session.end_step(boundary=boundary)
    return result


def _train(session: Session, original: Any, /, mode: bool = True) -> Any:
    if not mode:
        session.begin_other("evaluate")
    return original(mode)


def _train_batch(session: Session, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A pipeline runs the whole optimizer step in one call, and calls its own methods inside it."""
    session.begin_forward((), {}, training=True)
    with session.pause_hooks():
        loss = original(*args, **kwargs)
    session.note_loss(loss)
    session.end_step(boundary=True)
    return loss


# deepspeed.initialize.


def _initialize(session: Session, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    session.check_goes_on()
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    config, from_file = find_config(arguments)
    has_optimizer = arguments["optimizer"] is not None
    if config is not None and not has_optimizer and not arguments["model_parameters"] and "optimizer" not in config:
        # Nothing to train with: the engine serves a frozen model, such as a reference or a teacher.
        set_config(arguments, without_monitors(config))
        return _refuse_training(original(*bound.args, **bound.kwargs), session, find_caller())
    if session.engine is not None:
        raise script_error(
            "it calls deepspeed.initialize a second time, to train another model",
            hint="give a script that trains one engine; further engines may only evaluate",
        )
    session.take_model(arguments["model"])
    if session.job.stops_at_engine:
        session.stop_with_facts(_describe_model(session, arguments, config, from_file=from_file))
    if config is not None:
        set_config(arguments, session.config.for_engine(config, has_optimizer=has_optimizer))
    session.begin_phase("init")
    with session.watch_call():
        returned = original(*bound.args, **bound.kwargs)
        session.start_training(returned[0])
    watch_engine(returned[0], session)
    return returned


def find_config(arguments: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The config that the script gives, and whether it is a file's. None where DeepSpeed itself reports the problem."""
    args = arguments["args"]
    in_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    in_call = arguments["config"] if arguments["config"] is not None else arguments["config_params"]
    if (in_call is None) == (in_args is None):  # no config, or two of them
        return None, False
    given: Any = in_args if in_call is None else in_call
    config = read_config(given)
    return config, config is not None and not isinstance(given, Mapping) and Path(given).is_file()


def set_config(arguments: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Replace the config, whichever way the script gives it."""
    arguments["config"], arguments["config_params"] = config, None
    if arguments["args"] is not None:
        args = arguments["args"] = copy.copy(arguments["args"])
        for name in ("deepspeed_config", "deepscale_config"):
            if getattr(args, name, None) is not None:
                setattr(args, name, None)


def _refuse_training(returned: Any, session: Session, place: Place | None) -> Any:
    """What the script gets for a model that is only evaluated: training it is an error at the given line."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        session.failure = script_error(
            "it trains an engine that has no optimizer",
            hint='give deepspeed.initialize an optimizer, model_parameters, or a config with "optimizer"',
            at=place,
        )
        raise session.failure

    returned[0].backward = returned[0].step = refuse
    return returned


def _describe_model(
    session: Session, arguments: Mapping[str, Any], config: Mapping[str, Any] | None, *, from_file: bool
) -> ModelFacts:
    """The facts of the script's model. Raises WorkloadError when the script gives no readable config."""
    if config is None:
        problem = "a config that cannot be read" if arguments["config"] or arguments["args"] else "no config"
        raise script_error(
            f"it gives deepspeed.initialize {problem}",
            hint="give it config=…, or args with deepspeed_config: --deepspeed_config {ds_config} after --",
        )
    in_script = not from_file and session.config.given is None
    return ModelFacts(
        **count_parameters(arguments["model"], by="the script gave deepspeed.initialize"),
        checkpointing=False,  # the script itself decides about recomputing activations
        tokens_per_sample=None,
        has_optimizer=arguments["optimizer"] is not None,
        config=session.config.own_part(config, from_file=from_file),
        config_place=str(find_caller() or "") if in_script else None,
        stood_in=tuple(session.stand_ins),
        writes_confined=session.writes_confined,
    )


def _partition(session: Session, original: Any, /, *args: Any, **kwargs: Any) -> None:
    """`deepspeed.zero.Init` partitions parameters if the trial's stage is 3."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    is_stage_3 = get_key(session.job.ds_config, "zero_optimization.stage") == 3
    arguments["enabled"] = arguments["enabled"] and is_stage_3 and not session.job.stops_at_engine
    for name in ("config_dict_or_path", "config"):
        if (given := arguments.get(name)) is not None:
            arguments[name] = session.config.for_engine(read_config(given) or {}, has_optimizer=False)
    original(*bound.args, **bound.kwargs)
