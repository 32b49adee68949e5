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

from ....config.deepspeed import BATCH_KEYS, to_lightning_config
from ...patching import declare, declare_all
from ..engine_config import LibraryConfig
from ..engine_hooks import skip_methods
from ..session import Session
from ..user_errors import find_caller, script_error

# Either distribution may be installed: `lightning`, or the separate packages.
_TRAINER_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FABRIC_PACKAGES = ("lightning.fabric", "lightning_fabric")
_PACKAGES = (*_TRAINER_PACKAGES, *_FABRIC_PACKAGES)
_GPUS = ("gpu", "cuda")
_CPU_RANKS = "CPU ranks stand in for GPUs"
_STRATEGIES = {
    package: declare(f"{package}.strategies.DeepSpeedStrategy.__init__", "the strategy gets the trial's config")
    for package in _PACKAGES
}
_TRAINERS = {
    package: declare(f"{package}.Trainer.__init__", f"a trial does not validate, and {_CPU_RANKS}")
    for package in _TRAINER_PACKAGES
}
_FABRICS = {package: declare(f"{package}.Fabric.__init__", _CPU_RANKS) for package in _FABRIC_PACKAGES}
_DEVICE_COUNTS = {
    package: declare(f"{package}.accelerators.CPUAccelerator.auto_device_count", _CPU_RANKS) for package in _PACKAGES
}
_DEVICE_CHECKS = {
    package: declare_all(
        f"{package}.strategies.deepspeed",
        ("CUDAAccelerator", "_validate_device_index_selection", "argparse"),
        _CPU_RANKS,
    )
    for package in _PACKAGES
}


class LightningConfig(LibraryConfig):
    """A config whose accumulation steps are checked when the engine is made: they are an argument of the Trainer."""

    def _merge(self, config: Mapping[str, Any]) -> dict[str, Any]:
        steps = config.get("gradient_accumulation_steps")
        if steps != self.job.accumulation:
            raise script_error(
                f"its accumulate_grad_batches is {steps}, and the trial needs {self.job.accumulation}",
                hint="let it take them from the command line, given as {gradient_accumulation_steps} after --",
            )
        return super()._merge(config)


def install(session: Session) -> None:
    """Install the patches for the rest of this process."""
    os.environ["TORCHELASTIC_RUN_ID"] = "autods"  # ranks exist already: Lightning must not start any
    config = session.config = LightningConfig(session.job, convert=to_lightning_config)
    for package in _PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
            if package in _TRAINER_PACKAGES:
                _install_trainer(session, config, package)
            else:
                _install_fabric(session, config, package)


def with_cpu_ranks(original: Any, stand_ins: list[str]) -> Any:
    """The `__init__` of a Trainer or of Fabric, with arguments about GPUs changed to mean the CPU ranks."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("accelerator") in _GPUS:
            stand_ins.append(f"accelerator={kwargs['accelerator']!r} ({find_caller()})")
            kwargs["accelerator"] = "cpu"
        devices = kwargs.get("devices")
        if devices in (-1, "-1"):
            kwargs["devices"] = int(os.environ["WORLD_SIZE"])
        elif isinstance(devices, list):  # indices of GPUs
            kwargs["devices"] = len(devices)
        original(self, *args, **kwargs)

    return init


def _install_trainer(session: Session, config: LibraryConfig, package: str) -> None:
    strategy, trainer = _STRATEGIES[package], _TRAINERS[package]
    strategy.install(_with_trainer_config(session, config, strategy.original()))
    init = trainer.original()
    if session.job.device == "cpu":
        init = with_cpu_ranks(init, session.stand_ins)
        _accept_cpu_ranks(package)
    trainer.install(_without_sanity_check(init))
    skip_methods(session, f"{package}.strategies.DeepSpeedStrategy", "save_checkpoint")
    skip_methods(session, f"{package}.Trainer", "save_checkpoint")


def _install_fabric(session: Session, config: LibraryConfig, package: str) -> None:
    strategy, fabric = _STRATEGIES[package], _FABRICS[package]
    strategy.install(_with_fabric_config(config, strategy.original()))
    if session.job.device == "cpu":
        fabric.install(with_cpu_ranks(fabric.original(), session.stand_ins))
        _accept_cpu_ranks(package)
    skip_methods(session, f"{package}.strategies.DeepSpeedStrategy", "save_checkpoint")


def _with_trainer_config(session: Session, config: LibraryConfig, original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        session.batches.forward = _training_step_of(self)
        self.config = to_lightning_config(config.replace(dict(self.config or {})))
        self.config["train_micro_batch_size_per_gpu"] = session.job.micro_batch

    return init


def _with_fabric_config(config: LibraryConfig, original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        given = {key: value for key, value in (self.config or {}).items() if key not in BATCH_KEYS}
        self.config = config.replace(given)

    return init


def _training_step_of(strategy: Any) -> Any:
    """A forward through the strategy's training step: a Lightning module may have no forward."""

    def forward(engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = strategy.lightning_module
        module.log = module.log_dict = lambda *args, **kwargs: None  # the Trainer refuses to log between two steps
        try:
            return strategy.training_step(*args, **kwargs)
        finally:
            del module.log, module.log_dict

    return forward


def _without_sanity_check(original: Any) -> Any:
    """The Trainer's `__init__` without validation before the first step."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "num_sanity_val_steps": 0})

    return init


def _accept_cpu_ranks(package: str) -> None:
    """Let the strategy, which only takes GPUs, take CPU ranks."""
    _DEVICE_COUNTS[package].install(staticmethod(lambda: int(os.environ["WORLD_SIZE"])))
    checks = _DEVICE_CHECKS[package]
    cpu = importlib.import_module(f"{package}.accelerators").CPUAccelerator
    checks["CUDAAccelerator"].install((checks["CUDAAccelerator"].original(), cpu))
    checks["_validate_device_index_selection"].install(lambda devices: None)
    # The strategy gives the engine arguments with the index of a GPU; here it gives none.
    checks["argparse"].install(types.SimpleNamespace(Namespace=lambda device_rank: None))
