"""Between the script and DeepSpeed: the trial's config goes in at `deepspeed.initialize`, the engine's calls are seen.

A kind of script that comes to its engine by a library's own way has a module here, a row of `KINDS`, with
`install(session)`, called before the script starts.
"""

from __future__ import annotations

import base64
import copy
import functools
import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ds_config import without_monitors
from ...values import ScriptKind
from .. import pipeline
from ..survey import parameters_of
from .engine import watch
from .session import Session
from .users import Place, caller, everywhere, refusal

# Modules of this package that know a library. One that calls `deepspeed.initialize` itself needs none.
KINDS: Mapping[ScriptKind, str] = {"hf_trainer": "huggingface", "accelerate": "accelerate", "lightning": "lightning"}


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
        importlib.import_module(f".{KINDS[kind]}", __package__).install(session)


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
            mend="one engine can be tuned, beside models that are only evaluated: give a script that trains one",
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
            mend='give deepspeed.initialize an optimizer, model_parameters, or a config with "optimizer"',
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
            mend="give it config=…, or args with deepspeed_config: --deepspeed_config {ds_config} after --",
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
