"""Lightning's DeepSpeedStrategy: the config goes in where the strategy is made, without accumulation steps: those come
of the Trainer's `accumulate_grad_batches`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
from typing import Any

from ...trainer_config import for_lightning
from . import filling
from .session import Session
from .users import refusal

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def install(session: Session) -> None:
    """For the rest of this process."""
    os.environ["TORCHELASTIC_RUN_ID"] = "autods"  # ranks are there already: it must start none
    session.file = for_lightning(filling.trials_config(session))
    session.merge, session.own = _counted(session), filling.own_of(session)
    for package in _PACKAGES:
        with contextlib.suppress(ImportError):  # only one of the two may be installed
            _install(session, package)


def _install(session: Session, package: str) -> None:
    trainer = importlib.import_module(package).Trainer
    strategy = importlib.import_module(f"{package}.strategies").DeepSpeedStrategy
    strategy.__init__ = _with_our_config(session, strategy.__init__)
    trainer.__init__ = _without_sanity_check(trainer.__init__)
    filling.does_nothing(session, strategy, "save_checkpoint")
    filling.does_nothing(session, trainer, "save_checkpoint")
    if session.job.device == "cpu":
        _stand_in(package, strategy)


def _with_our_config(session: Session, real: Any) -> Any:
    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        session.batches.call = _as_a_training_step(self)
        self.config = for_lightning(filling.in_place_of(session, dict(self.config or {})))
        self.config["train_micro_batch_size_per_gpu"] = session.job.micro_batch

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
    merged = filling.as_filled(session)

    def checked(filled: Any) -> dict[str, Any]:
        found, asked = filled.get("gradient_accumulation_steps"), session.job.accumulation
        if found != asked:
            raise refusal(
                f"its accumulate_grad_batches is {found}, where the trial asks for {asked}",
                mend="let it take them from the command line, given as {gradient_accumulation_steps} after --",
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
