"""Hugging Face Accelerate: `Accelerator.prepare` calls the engine with the config of its DeepSpeedPlugin.

The script or the environment makes the plugin; in both cases the trial's config is put into it.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

from ...patching import declare
from ..engine_config import LibraryConfig, read_config
from ..engine_hooks import skip_methods
from ..session import Session

# Keys of a DeepSpeed config that a script can set as fields of the plugin instead, with the names of the fields.
_PLUGIN_FIELDS = {"gradient_clipping": "gradient_clipping"}
_DUMMY_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
_PLUGIN = declare("accelerate.utils.DeepSpeedPlugin.__post_init__", "the plugin gets the trial's config")
_PREPARE = declare("accelerate.Accelerator._prepare_deepspeed", "a DummyOptim shows that the config names an optimizer")
_HALVE_BATCH = declare(
    "accelerate.utils.memory.should_reduce_batch_size", "an out-of-memory ends the trial, not half of its batch"
)
_BACKEND = declare("accelerate.PartialState._prepare_backend", "CPU ranks stand in for GPUs")


def install(session: Session) -> None:
    """Install the patches for the rest of this process."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = session.config = LibraryConfig(session.job)
    _PLUGIN.install(_with_trials_config(config, _PLUGIN.original()))
    _PREPARE.install(_with_dummy_optimizer(session, config, _PREPARE.original()))
    skip_methods(session, "accelerate.Accelerator", "save_state", "save_model", "init_trackers", "log")
    _HALVE_BATCH.install(lambda error: False, everywhere=True)
    if session.job.device == "cpu":
        _BACKEND.install(_with_gloo(_BACKEND.original()))


def _with_trials_config(config: LibraryConfig, original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = self.hf_ds_config
        if given is None:
            given = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        users = read_config(getattr(given, "config", given)) if given not in (None, "none") else {}
        if users is not None:
            fields = {key: getattr(self, name) for key, name in _PLUGIN_FIELDS.items()}
            users = {**{key: value for key, value in fields.items() if value is not None}, **users}
            self.hf_ds_config = config.replace(users)
        original(self, *args, **kwargs)

    return init


def _with_dummy_optimizer(session: Session, config: LibraryConfig, original: Any) -> Any:
    """In a survey, let the config name an optimizer for a script that gives a DummyOptim."""
    from accelerate.utils import DummyOptim

    @functools.wraps(original)
    def prepare(self: Any, *args: Any) -> Any:
        plugins = self.deepspeed_plugin.deepspeed_config
        has_dummy = any(isinstance(argument, DummyOptim) for argument in args)
        if session.stops_at_engine and has_dummy and "optimizer" not in plugins:
            plugins["optimizer"] = copy.deepcopy(_DUMMY_OPTIMIZER)
            config.given = {**(config.given or {}), "optimizer": _DUMMY_OPTIMIZER}
        return original(self, *args)

    return prepare


def _with_gloo(original: Any) -> Any:
    """Give ranks without a GPU a backend: without one, accelerate takes each of them for a single process."""

    @functools.wraps(original)
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, kind = original(self, *args, **kwargs)
        return (backend or "gloo"), kind

    return prepare_backend
