"""Hugging Face Accelerate. `Accelerator.prepare` calls the engine with the config of its DeepSpeedPlugin, whether the
script makes one or the environment does: so the trial's config goes into the plugin."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

from ..callsite import everywhere
from ..session import Session
from .config import as_filled, does_nothing, in_place_of, own_of, trials_config

# Of `DeepSpeedPlugin`, which is what a script says of the config where it gives no file.
_SAID = {"gradient_clipping": "gradient_clipping"}
_DUMMY_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}


def install(session: Session) -> None:
    """For the rest of this process."""
    import accelerate
    from accelerate.utils import DeepSpeedPlugin, memory

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    session.file = trials_config(session)
    session.merge, session.own = as_filled(session), own_of(session)
    DeepSpeedPlugin.__post_init__ = _with_our_config(session, DeepSpeedPlugin.__post_init__)
    prepare = accelerate.Accelerator._prepare_deepspeed
    accelerate.Accelerator._prepare_deepspeed = _with_an_optimizer(session, prepare)
    does_nothing(session, accelerate.Accelerator, "save_state", "save_model", "init_trackers", "log")
    # It would catch an out-of-memory and go on with half of the batch.
    everywhere(memory.should_reduce_batch_size, "should_reduce_batch_size", lambda error: False)
    if session.job.device == "cpu":
        _count_ranks(accelerate.PartialState)


def _with_our_config(session: Session, real: Any) -> Any:
    from ..engine_hooks import config_given

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = self.hf_ds_config
        if given is None:
            given = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        users = config_given(getattr(given, "config", given)) if given not in (None, "none") else {}
        if users is not None:
            said = {key: value for key, name in _SAID.items() if (value := getattr(self, name)) is not None}
            self.hf_ds_config = in_place_of(session, {**said, **users})
        real(self, *args, **kwargs)

    return init


def _with_an_optimizer(session: Session, real: Any) -> Any:
    """A script that gives a DummyOptim wants the config to name an optimizer: in a survey, that is how it is seen."""
    from accelerate.utils import DummyOptim

    @functools.wraps(real)
    def prepare(self: Any, *args: Any) -> Any:
        config = self.deepspeed_plugin.deepspeed_config
        if session.looks_only and "optimizer" not in config and any(isinstance(one, DummyOptim) for one in args):
            config["optimizer"] = copy.deepcopy(_DUMMY_OPTIMIZER)
            session.given = {**(session.given or {}), "optimizer": _DUMMY_OPTIMIZER}
        return real(self, *args)

    return prepare


def _count_ranks(state: Any) -> None:
    """accelerate takes ranks without a GPU for one process each; here they stand in for GPUs."""
    real = state._prepare_backend

    @functools.wraps(real)
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, kind = real(self, *args, **kwargs)
        return (backend or "gloo"), kind

    state._prepare_backend = prepare_backend
