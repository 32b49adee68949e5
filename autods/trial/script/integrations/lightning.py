"""Lightning's DeepSpeedStrategy, the Trainer's and Fabric's: the config goes in where the strategy is made. A Trainer's
is without accumulation steps: those come of its `accumulate_grad_batches`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
from collections.abc import Callable
from typing import Any

from ....config.deepspeed import BATCH_KEYS, to_lightning_config
from ..callsite import caller, refusal
from ..session import Session
from .config import as_filled, does_nothing, in_place_of, own_of, trials_config

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_OF_FABRIC = ("lightning.fabric", "lightning_fabric")
_GPUS = ("gpu", "cuda")


def install(session: Session) -> None:
    """For the rest of this process."""
    os.environ["TORCHELASTIC_RUN_ID"] = "autods"  # ranks are there already: it must start none
    session.file = to_lightning_config(trials_config(session))
    session.merge, session.own = _counted(session), own_of(session)
    for package in _PACKAGES:
        with contextlib.suppress(ImportError):  # only one of the two may be installed
            trainer = importlib.import_module(package).Trainer
            strategy = _install(session, package, trainer, _with_trainers_config)
            trainer.__init__ = _without_sanity_check(trainer.__init__)
            does_nothing(session, trainer, "save_checkpoint")
            if session.job.device == "cpu":
                _stand_in(package, strategy)
    for package in _OF_FABRIC:
        with contextlib.suppress(ImportError):
            strategy = _install(session, package, importlib.import_module(package).Fabric, _with_our_config)
            if session.job.device == "cpu":
                _stand_in(package, strategy)


def _install(session: Session, package: str, owner: Any, configured: Callable[[Session, Any], Any]) -> Any:
    """The strategy's config, and where the owner, which is told of devices, finds CPU ranks. The strategy."""
    strategy = importlib.import_module(f"{package}.strategies").DeepSpeedStrategy
    strategy.__init__ = configured(session, strategy.__init__)
    does_nothing(session, strategy, "save_checkpoint")
    if session.job.device == "cpu":
        owner.__init__ = _on_cpu_ranks(owner.__init__, session.stood_in)
    return strategy


def _with_trainers_config(session: Session, real: Any) -> Any:
    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        session.batches.call = _as_a_training_step(self)
        self.config = to_lightning_config(in_place_of(session, dict(self.config or {})))
        self.config["train_micro_batch_size_per_gpu"] = session.job.micro_batch

    return init


def _with_our_config(session: Session, real: Any) -> Any:
    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        config = {key: value for key, value in (self.config or {}).items() if key not in BATCH_KEYS}
        self.config = in_place_of(session, config)

    return init


def _on_cpu_ranks(real: Any, stood_in: list[str]) -> Any:
    """What says GPUs, or how many of them, says it of the ranks that stand in for them."""

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("accelerator") in _GPUS:
            stood_in.append(f"accelerator={kwargs['accelerator']!r} ({caller()})")
            kwargs["accelerator"] = "cpu"
        devices = kwargs.get("devices")
        if devices in (-1, "-1"):
            kwargs["devices"] = int(os.environ["WORLD_SIZE"])
        elif isinstance(devices, list):  # their indices
            kwargs["devices"] = len(devices)
        real(self, *args, **kwargs)

    return init


def _as_a_training_step(strategy: Any) -> Any:
    """The strategy turns a training step into a forward of the engine; a module need have no forward of its own."""

    def call(engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = strategy.lightning_module
        module.log = module.log_dict = lambda *args, **kwargs: None  # its Trainer would refuse it between two steps
        try:
            return strategy.training_step(*args, **kwargs)
        finally:
            del module.log, module.log_dict

    return call


def _counted(session: Session) -> Any:
    """What comes to the engine, its accumulation steps compared with the trial's."""
    merged = as_filled(session)

    def checked(filled: Any) -> dict[str, Any]:
        found, asked = filled.get("gradient_accumulation_steps"), session.job.accumulation
        if found != asked:
            raise refusal(
                f"its accumulate_grad_batches is {found}, where the trial asks for {asked}",
                hint="let it take them from the command line, given as {gradient_accumulation_steps} after --",
            )
        return merged(filled)

    return checked


def _without_sanity_check(real: Any) -> Any:
    """Validation before the first step shows nothing that a trial is after."""

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **{**kwargs, "num_sanity_val_steps": 0})

    return init


def _stand_in(package: str, strategy: Any) -> None:
    """CPU ranks where the strategy takes GPUs alone."""
    module: Any = importlib.import_module(strategy.__module__)
    accelerators = importlib.import_module(f"{package}.accelerators")
    accelerators.CPUAccelerator.auto_device_count = staticmethod(lambda: int(os.environ["WORLD_SIZE"]))
    module.CUDAAccelerator = (module.CUDAAccelerator, accelerators.CPUAccelerator)
    module._validate_device_index_selection = lambda devices: None
    module.argparse = types.SimpleNamespace(Namespace=lambda device_rank: None)  # the index of a GPU, for the engine
