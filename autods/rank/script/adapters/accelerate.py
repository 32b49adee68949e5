"""Hugging Face Accelerate: `Accelerator.prepare` calls the engine with the config of its DeepSpeedPlugin.

The script or the environment makes the plugin; in both cases the chosen config is put into it. The loop is the
script's own.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping
from typing import Any

from ....devices import find_device
from ...patching import declare, when_imported
from ..engine_config import LibraryConfig, read_config
from ..policy import Injection

_DUMMY_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
_PLUGIN = declare("accelerate.utils.DeepSpeedPlugin.__post_init__", "the plugin gets the chosen config")
_PREPARE = declare("accelerate.Accelerator._prepare_deepspeed", "the plugin of this model and a DummyOptim are seen")
_HALVE_BATCH = declare(
    "accelerate.utils.memory.should_reduce_batch_size", "an out-of-memory ends the script, not half of its batch"
)
_BACKEND = declare("accelerate.PartialState._prepare_backend", "CPU ranks stand in for GPUs")


def install(injection: Injection) -> None:
    """Install the patches for the rest of this process, as soon as the library is imported."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    injection.config = config = LibraryConfig(injection.job)
    when_imported("accelerate", functools.partial(_install_patches, injection, config))


def _install_patches(injection: Injection, config: LibraryConfig) -> None:
    _PLUGIN.wrap(_fill_plugin, config)
    _PREPARE.wrap(_prepare, injection, config)
    injection.skip("accelerate.Accelerator", "save_state", folder="output_dir")
    injection.skip("accelerate.Accelerator", "save_model", folder="save_directory")
    injection.skip("accelerate.Accelerator", "init_trackers", "log")
    injection.skip("accelerate.Accelerator", "load_state", phase="load")
    _HALVE_BATCH.install(lambda error: False, everywhere=True)
    if (device := find_device(injection.job.device)).stands_in:
        _BACKEND.wrap(_choose_backend, device.backend)


def _fill_plugin(config: LibraryConfig, original: Any, plugin: Any, /, *args: Any, **kwargs: Any) -> None:
    given = plugin.hf_ds_config
    if given is None:
        given = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    users = read_config(getattr(given, "config", given)) if given not in (None, "none") else _make_config(plugin)
    if users is not None:
        plugin.hf_ds_config = config.replace(users)
        plugin.autods_given = users
    original(plugin, *args, **kwargs)


def _make_config(plugin: Any) -> dict[str, Any]:
    """What accelerate trains with where the script gives no config: only there does the plugin's clipping count."""
    clipping = plugin.gradient_clipping
    if clipping is None:
        clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    clips_at = 1.0 if clipping == "auto" else float(clipping)  # its own default; it leaves a 0 out
    return {"gradient_clipping": clips_at} if clips_at else {}


def _prepare(injection: Injection, config: LibraryConfig, original: Any, accelerator: Any, /, *args: Any) -> Any:
    """A script may have a plugin for each of its models, and one that trains nothing needs no optimizer.

    In a survey, the config names an optimizer for a script that gives a DummyOptim.
    """
    from accelerate.utils import DummyOptim
    from torch.optim import Optimizer

    _warn_of_accumulation(injection, accelerator.gradient_accumulation_steps)
    plugin = accelerator.deepspeed_plugin
    dropped: dict[str, Any] = {}
    config.given = given = getattr(plugin, "autods_given", config.given)
    if not any(isinstance(argument, DummyOptim | Optimizer) for argument in args):
        # An only plugin may train by its config's optimizer alone, as DeepSpeed does.
        is_frozen = injection.policy.engine is not None or isinstance(accelerator.state.deepspeed_plugins, Mapping)
        if is_frozen and "optimizer" in plugin.deepspeed_config and "optimizer" not in (given or {}):
            dropped = {"optimizer": plugin.deepspeed_config.pop("optimizer")}
    elif (
        config.job.stops_at_engine
        and any(isinstance(argument, DummyOptim) for argument in args)
        and "optimizer" not in plugin.deepspeed_config
    ):
        plugin.deepspeed_config["optimizer"] = copy.deepcopy(_DUMMY_OPTIMIZER)
        config.given = {**(given or {}), "optimizer": _DUMMY_OPTIMIZER}
    try:
        return original(accelerator, *args)
    finally:
        plugin.deepspeed_config.update(dropped)  # for a later call, which may train by this plugin


def _warn_of_accumulation(injection: Injection, steps: int) -> None:
    """Say where the script counts its steps by another accumulation: accelerate goes by that of the config."""
    if steps in (1, injection.job.accumulation):
        return
    warning = (
        f"its Accelerator has gradient_accumulation_steps={steps}, and its config decides: a schedule or a number of "
        "steps that the script computes from its own is another; let it take {gradient_accumulation_steps} after --"
    )
    if injection.policy.host is not None:
        injection.policy.host.note(f"warning: {warning}")
    elif warning not in injection.warnings:
        injection.warnings.append(warning)


def _choose_backend(backend: str, original: Any, state: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Without a backend, accelerate takes each rank without a GPU for a single process."""
    chosen, kind = original(state, *args, **kwargs)
    return (chosen or backend), kind
