"""Lightning's DeepSpeedStrategy, for its Trainer and for Fabric: the strategy gets the trial's config when it is made.

The Trainer's config has no accumulation steps: these are its `accumulate_grad_batches`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
from collections.abc import Mapping
from typing import Any

from ....config.deepspeed import to_lightning_config
from ....devices import find_device
from ....system.stacks import find_caller
from ...patching import declare_all
from ..data import Batches
from ..engine_config import LibraryConfig
from ..engine_hooks import skip_methods
from ..session import Session
from ..user_errors import script_error

# Either distribution may be installed: `lightning`, or the separate packages.
_ENTRIES = {
    "lightning.pytorch": "Trainer",
    "pytorch_lightning": "Trainer",
    "lightning.fabric": "Fabric",
    "lightning_fabric": "Fabric",
}
_STRATEGY = "strategies.DeepSpeedStrategy"
_CPU_COUNT = "accelerators.CPUAccelerator.auto_device_count"
_GPU = "strategies.deepspeed.CUDAAccelerator"
_GPU_INDEX = "strategies.deepspeed._validate_device_index_selection"
_ARGUMENTS = "strategies.deepspeed.argparse"
_PATCHES = {
    package: declare_all(
        package,
        (f"{_STRATEGY}.__init__", f"{entry}.__init__", _CPU_COUNT, _GPU, _GPU_INDEX, _ARGUMENTS),
        "the strategy gets the trial's config, nothing is validated, and CPU ranks stand in for GPUs",
    )
    for package, entry in _ENTRIES.items()
}


class LightningConfig(LibraryConfig):
    """A config whose accumulation steps are checked when the engine is made: they are an argument of the Trainer."""

    def _complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        steps = config.get("gradient_accumulation_steps")
        if steps != self.job.accumulation:
            raise script_error(
                f"its accumulate_grad_batches is {steps}, and the trial needs {self.job.accumulation}",
                hint="let it take them from the command line, given as {gradient_accumulation_steps} after --",
            )
        return super()._complete(config)


def install(session: Session) -> None:
    """Install the patches for the rest of this process."""
    os.environ["TORCHELASTIC_RUN_ID"] = "autods"  # ranks exist already: Lightning must not start any
    config = session.config = LightningConfig(session.job, convert=to_lightning_config)
    for package, entry in _ENTRIES.items():
        patches, initial = _PATCHES[package], f"{entry}.__init__"
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
            patches[f"{_STRATEGY}.__init__"].wrap(
                _replace_config, config, session.batches if entry == "Trainer" else None
            )
            skip_methods(session, f"{package}.{_STRATEGY}", "save_checkpoint")
            if entry == "Trainer":
                patches[initial].wrap(_skip_validation)
                skip_methods(session, f"{package}.Trainer", "save_checkpoint")
            if find_device(session.job.device).stands_in:
                patches[initial].wrap(use_cpu_ranks, session.stand_ins)
                # The strategy only takes GPUs, and gives the engine arguments with the index of one.
                patches[_CPU_COUNT].install(staticmethod(lambda: int(os.environ["WORLD_SIZE"])))
                cpu = importlib.import_module(f"{package}.accelerators").CPUAccelerator
                patches[_GPU].install((patches[_GPU].original(), cpu))
                patches[_GPU_INDEX].install(lambda devices: None)
                patches[_ARGUMENTS].install(types.SimpleNamespace(Namespace=lambda device_rank: None))


def use_cpu_ranks(stand_ins: list[str], original: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> None:
    """Call the `__init__` of a Trainer or of Fabric with CPU ranks for GPUs in its arguments."""
    if kwargs.get("accelerator") in ("gpu", "cuda"):
        stand_ins.append(f"accelerator={kwargs['accelerator']!r} ({find_caller()})")
        kwargs["accelerator"] = "cpu"
    devices = kwargs.get("devices")
    if devices in (-1, "-1"):
        kwargs["devices"] = int(os.environ["WORLD_SIZE"])
    elif isinstance(devices, list):  # indices of GPUs
        kwargs["devices"] = len(devices)
    original(trainer, *args, **kwargs)


def _skip_validation(original: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> None:
    original(trainer, *args, **{**kwargs, "num_sanity_val_steps": 0})  # before the first step


def _replace_config(
    config: LibraryConfig, batches: Batches | None, original: Any, strategy: Any, /, *args: Any, **kwargs: Any
) -> None:
    """`batches` is None for Fabric, whose training step is the script's."""
    original(strategy, *args, **kwargs)
    strategy.config = config.replace(dict(strategy.config or {}))
    if batches is not None:
        strategy.config = to_lightning_config(strategy.config)
        strategy.config["train_micro_batch_size_per_gpu"] = config.job.micro_batch
        batches.forward = functools.partial(_repeat_training_step, strategy)


def _repeat_training_step(strategy: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A Lightning module may have no forward."""
    module = strategy.lightning_module
    module.log = module.log_dict = lambda *args, **kwargs: None  # the Trainer refuses to log between two steps
    try:
        return strategy.training_step(*args, **kwargs)
    finally:
        del module.log, module.log_dict
