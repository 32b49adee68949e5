"""Hooks around `deepspeed.initialize` and the engine that a script makes."""

from __future__ import annotations

import base64
import copy
import functools
import importlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...config.deepspeed import without_monitors
from ...types import ScriptKind
from .. import pipeline
from ..model_facts import parameters_of
from .callsite import Place, caller, everywhere, refusal
from .data import loss_of
from .session import Enough, Session


def watch(engine: Any, session: Session) -> None:
    """Tell the session of each call from here on. Optimizer steps are counted at the accumulation's boundary: a plain
    script calls `step` once a micro batch, a trainer once an optimizer step."""
    _wrap(engine, "forward", session, functools.partial(_forward, session, engine))
    _wrap(engine, "backward", session, functools.partial(_backward, session))
    _wrap(engine, "step", session, functools.partial(_step, session, engine))
    _wrap(engine, "train", session, functools.partial(_train, session))
    if hasattr(engine.optimizer, "step"):
        _wrap(engine.optimizer, "step", session, functools.partial(_step_of_optimizer, session))
    if hasattr(engine, "train_batch"):
        _wrap(engine, "train_batch", session, functools.partial(_train_batch, session))


def _wrap(engine: Any, name: str, session: Session, watched: Callable[..., Any]) -> None:
    real = getattr(engine, name)

    @functools.wraps(real)
    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        if session.busy:
            return real(*args, **kwargs)
        session.insist()
        try:
            return watched(real, *args, **kwargs)
        except Enough:
            raise
        except BaseException as error:
            session.failure = error
            raise

    setattr(engine, name, types.MethodType(call, engine))  # schedulers of torch want an optimizer's step to be one


def _forward(session: Session, engine: Any, real: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    training = torch.is_grad_enabled() and engine.training
    session.forward(args, kwargs, training=training)
    out = real(*args, **kwargs)
    if training:
        session.forwarded(loss_of(out))
    return out


def _backward(session: Session, real: Any, loss: Any = None, *args: Any, **kwargs: Any) -> Any:
    session.backward()
    session.lost(loss_of(loss))
    return real(loss, *args, **kwargs)


def _step(session: Session, engine: Any, real: Any, *args: Any, **kwargs: Any) -> Any:
    boundary = bool(engine.is_gradient_accumulation_boundary())
    session.phase("step")
    session.in_step = True
    try:
        done = real(*args, **kwargs)
    finally:
        session.in_step = False
    session.stepped(boundary=boundary)
    return done


def _step_of_optimizer(session: Session, real: Any, *args: Any, **kwargs: Any) -> Any:
    """A script, or Lightning's Fabric, may step the optimizer that the engine made, and never the engine."""
    if session.in_step:
        return real(*args, **kwargs)
    session.phase("step")
    done = real(*args, **kwargs)
    session.stepped(boundary=True)
    return done


def _train(session: Session, real: Any, mode: bool = True) -> Any:
    if not mode:
        session.other("evaluate")
    return real(mode)


def _train_batch(session: Session, real: Any, *args: Any, **kwargs: Any) -> Any:
    """A pipeline runs the whole optimizer step in one call, and its own parts inside it."""
    session.forward((), {}, training=True)
    session.busy = True
    try:
        loss = real(*args, **kwargs)
    finally:
        session.busy = False
    session.lost(loss_of(loss))
    session.stepped(boundary=True)
    return loss


# Modules of this package that know a library. One that calls `deepspeed.initialize` itself needs none.
KINDS: Mapping[ScriptKind, str] = {"hf_trainer": "hf_trainer", "accelerate": "accelerate", "lightning": "lightning"}


def install(session: Session) -> None:
    """For the rest of this process."""
    import deepspeed
    import torch

    if session.job.job == "survey":
        pipeline.lay_out()
    real = deepspeed.initialize
    everywhere(real, "initialize", functools.wraps(real)(functools.partial(_initialize, session, real)))
    everywhere(deepspeed.zero.Init, "Init", _partitioning(session, deepspeed.zero.Init))
    ends = torch.distributed.destroy_process_group
    everywhere(ends, "destroy_process_group", functools.wraps(ends)(functools.partial(_ended, session, ends)))
    kind = session.job.source.script_kind
    if kind is not None and kind in KINDS:
        importlib.import_module(f".integrations.{KINDS[kind]}", __package__).install(session)


def _initialize(session: Session, real: Any, *args: Any, **kwargs: Any) -> Any:
    session.insist()
    given = inspect.signature(real).bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    users, from_file = _config_of(asked)
    own_optimizer = asked["optimizer"] is not None
    if users is not None and _only_serves(asked, users):
        asked["config"], asked["config_params"] = without_monitors(users), None
        asked["args"] = _without_config(asked["args"])
        return _serving(real(*given.args, **given.kwargs), session, caller())
    if session.engine is not None:
        raise refusal(
            "it calls deepspeed.initialize a second time, to train another model",
            hint="one engine can be tuned, beside models that are only evaluated: give a script that trains one",
        )
    session.takes(asked["model"])
    if session.looks_only:
        session.looked(_facts(session, asked, users, from_file=from_file, own_optimizer=own_optimizer))
    if users is not None:
        asked["config"], asked["config_params"] = session.final(users, own_optimizer=own_optimizer), None
        asked["args"] = _without_config(asked["args"])
    session.phase("init")
    try:
        made = real(*given.args, **given.kwargs)
    except BaseException as error:
        session.failure = error
        raise
    session.began(made[0])
    watch(made[0], session)
    return made


def _ended(session: Session, real: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The last moment at which the ranks can talk is the end of what a trial may do."""
    if group is None or group is importlib.import_module("torch.distributed").group.WORLD:
        session.parts()
    return real(group, *args, **kwargs)


def _only_serves(asked: Mapping[str, Any], users: Mapping[str, Any]) -> bool:
    """Whether nothing is there that an engine could train with: it is a frozen model's, a reference or a teacher."""
    return asked["optimizer"] is None and not asked["model_parameters"] and "optimizer" not in users


def _serving(made: Any, session: Session, place: Place | None) -> Any:
    """What the script gets for such a model: an engine as the script asked for it, whose steps are nobody's."""

    def train(*args: Any, **kwargs: Any) -> Any:
        session.failure = refusal(
            "it trains an engine that has no optimizer",
            hint='give deepspeed.initialize an optimizer, model_parameters, or a config with "optimizer"',
            at=place,
        )
        raise session.failure

    made[0].backward = made[0].step = train
    return made


def _config_of(asked: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The config that the script gives, whichever way, and whether a file holds it. None: what DeepSpeed refuses."""
    args = asked["args"]
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = asked["config"] if asked["config"] is not None else asked["config_params"]
    if given is not None and of_args is not None:
        return None, False  # two of them: DeepSpeed says so
    given = of_args if given is None else given
    if given is None:
        return None, False
    config = config_given(given)
    return config, config is not None and not isinstance(given, Mapping) and Path(given).is_file()


def config_given(given: Any) -> dict[str, Any] | None:
    """Of a dict, a path or base64. None: it is none, and whoever takes it says what is wrong."""
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    try:
        if Path(given).is_file():
            return dict(json.loads(Path(given).read_text()))
        return dict(json.loads(base64.urlsafe_b64decode(given).decode()))
    except (ValueError, TypeError, OSError):
        return None


def _without_config(args: Any) -> Any:
    if args is None:
        return None
    bare = copy.copy(args)
    for name in ("deepspeed_config", "deepscale_config"):
        if getattr(bare, name, None) is not None:
            setattr(bare, name, None)
    return bare


def _facts(
    session: Session,
    asked: Mapping[str, Any],
    users: Mapping[str, Any] | None,
    *,
    from_file: bool,
    own_optimizer: bool,
) -> dict[str, Any]:
    """`ModelFacts` as a dict. Recomputing activations is the script's own affair."""
    if users is None:
        given = "a config that cannot be read" if asked["config"] or asked["args"] else "no config"
        raise refusal(
            f"it gives deepspeed.initialize {given}",
            hint="give it config=…, or args with deepspeed_config: --deepspeed_config {ds_config} after --",
        )
    return {
        **parameters_of(asked["model"], by="the script gave deepspeed.initialize"),
        "checkpointing": False,
        "tokens_per_sample": None,
        "has_optimizer": own_optimizer,
        "config": session.own_config(users, from_file=from_file),
        "config_place": None if from_file or session.given is not None else str(caller() or ""),
        "stood_in": tuple(session.stood_in),
    }


def _partitioning(session: Session, real: Any) -> Any:
    """`deepspeed.zero.Init`, which cuts parameters where the trial's stage does, whatever the script's config says."""
    stage = (session.job.ds_config.get("zero_optimization") or {}).get("stage")

    class Init(real):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(real.__init__).bind(self, *args, **kwargs)
            given.apply_defaults()
            asked = dict(given.arguments)
            asked.pop("self")
            asked["enabled"] = asked["enabled"] and stage == 3 and not session.looks_only
            for name in ("config_dict_or_path", "config"):
                if asked.get(name) is not None:
                    users, _ = _config_of({"args": None, "config": asked[name], "config_params": None})
                    asked[name] = session.final(users or {}, own_optimizer=False)
            super().__init__(**asked)

    return functools.wraps(real, updated=())(Init)
