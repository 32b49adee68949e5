"""Lightning's DeepSpeedStrategy, for its Trainer and for Fabric: the strategy gets the chosen config when it is made.

The Trainer's config has no accumulation steps: these are its `accumulate_grad_batches`. It owns its loop, and a run
reaches that by a callback. With Fabric the loop is the script's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....config.deepspeed import to_lightning_config
from ....devices import find_device
from ....system.stacks import find_caller
from ...job import RankJob
from ...patching import declare_all, when_imported
from ..engine_config import LibraryConfig
from ..policy import Injection, Policy, TrainerLoop
from ..user_errors import script_error

if TYPE_CHECKING:
    from ...training_run.run_policy import RunPolicy

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
_FIT, _SAVE, _LOAD = "Trainer.fit", f"{_STRATEGY}.save_checkpoint", f"{_STRATEGY}.load_checkpoint"
_STEP = f"{_STRATEGY}.optimizer_step"
_BACKWARD = "plugins.precision.DeepSpeedPrecision.backward"
_LOADER = "trainer.connectors.data_connector._DataConnector._prepare_dataloader"
_SIGNALS = "trainer.connectors.signal_connector._SignalConnector.register_signal_handlers"
_BATCHES, _EPOCHS = "loops.training_epoch_loop._TrainingEpochLoop", "loops.fit_loop._FitLoop"
_BEGIN_EPOCH, _END_BATCH, _END_EPOCH = f"{_BATCHES}.reset", f"{_BATCHES}.on_advance_end", f"{_EPOCHS}.on_advance_end"
_BEGIN = f"{_STRATEGY}.on_train_start"
_OF_TRAINER = (_FIT, _SAVE, _LOAD, _LOADER, _BACKWARD, _SIGNALS, _BEGIN, _BEGIN_EPOCH, _END_BATCH, _END_EPOCH)
_PATCHES = {
    package: declare_all(
        package,
        (
            *(f"{_STRATEGY}.__init__", f"{entry}.__init__", _CPU_COUNT, _GPU, _GPU_INDEX, _ARGUMENTS),
            *(_OF_TRAINER if entry == "Trainer" else (_STEP,)),
        ),
        "the strategy gets the chosen config, CPU ranks stand in for GPUs, and a run saves and resumes",
    )
    for package, entry in _ENTRIES.items()
}
_TORCH_STATES = ("state_dict", "optimizer_states")  # of Lightning's checkpoint: DeepSpeed's files have them


class LightningConfig(LibraryConfig):
    """A config whose accumulation steps are checked when the engine is made: they are an argument of the Trainer."""

    def _complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        steps = config.get("gradient_accumulation_steps")
        if steps != self.job.accumulation:
            raise script_error(
                f"its accumulate_grad_batches is {steps}, and its config needs {self.job.accumulation}",
                hint="let it take them from the command line, given as {gradient_accumulation_steps} after --",
            )
        return super()._complete(config)


def install(injection: Injection) -> None:
    """Install the patches for the rest of this process, as soon as the libraries are imported."""
    os.environ["TORCHELASTIC_RUN_ID"] = "autods"  # ranks exist already: Lightning must not start any
    injection.config = LightningConfig(injection.job, convert=to_lightning_config)
    for package, entry in _ENTRIES.items():
        when_imported(package, functools.partial(_install_in, injection, package, is_trainer=entry == "Trainer"))


def _install_in(injection: Injection, package: str, *, is_trainer: bool) -> None:
    patches, initial = _PATCHES[package], f"{_ENTRIES[package]}.__init__"
    policy = injection.policy
    patches[f"{_STRATEGY}.__init__"].wrap(_replace_config, injection.config, policy if is_trainer else None)
    injection.skip(f"{package}.{_STRATEGY}", "save_checkpoint")
    if not is_trainer:
        patches[_STEP].wrap(step_engine)
    if is_trainer:
        patches[_BACKWARD].wrap(divide_once)
        patches[_SIGNALS].install(lambda connector: None)  # SIGTERM would end it unsaved, SIGUSR1 requeue a Slurm job
        injection.skip(f"{package}.Trainer", "save_checkpoint")
        if policy.host is None:
            patches[initial].wrap(_skip_validation)
            patches[_FIT].wrap(fit_from_start, injection.warnings)
        else:
            LightningLoop(policy.host, injection.job, package).install()
    if find_device(injection.job.device).stands_in:
        patches[initial].wrap(use_cpu_ranks, injection.stand_ins)
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


def fit_from_start(warnings: list[str], original: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A trial resumes no checkpoint."""
    warnings += warn_of_micro_batch_counts(trainer)
    bound = inspect.signature(original).bind(trainer, *args, **kwargs)
    bound.arguments.pop("ckpt_path", None)
    return original(*bound.args, **bound.kwargs)


def _replace_config(
    config: LibraryConfig, policy: Policy | None, original: Any, strategy: Any, /, *args: Any, **kwargs: Any
) -> None:
    """`policy` is None for Fabric, whose training step is the script's."""
    original(strategy, *args, **kwargs)
    strategy.config = config.replace(dict(strategy.config or {}))
    if policy is not None:
        strategy.config = to_lightning_config(strategy.config)
        strategy.config["train_micro_batch_size_per_gpu"] = config.job.micro_batch
        policy.evaluate_with(functools.partial(_repeat_training_step, strategy))


def step_engine(original: Any, strategy: Any, /, optimizer: Any, **kwargs: Any) -> Any:
    """Step the engine, which accumulates and counts. Fabric does not take it for one with this release of DeepSpeed."""
    return original(strategy, strategy.model or optimizer, **kwargs)


def divide_once(original: Any, precision: Any, /, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Lightning has divided the loss by the accumulation, and DeepSpeed would again: gradients would depend on it."""
    divides = {"scale_wrt_gas": False} if model.automatic_optimization else {}
    original(precision, tensor, model, *args, **kwargs, **divides)


def _repeat_training_step(strategy: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A Lightning module may have no forward."""
    module = strategy.lightning_module
    module.log = module.log_dict = lambda *args, **kwargs: None  # the Trainer refuses to log between two steps
    try:
        return strategy.training_step(*args, **kwargs)
    finally:
        del module.log, module.log_dict


# The Trainer's loop.


class RankSamples:
    """A sampler of one rank's micro batches, from a sampler of all ranks' samples. Its length is that of an epoch.

    The epoch `first_epoch` begins behind its first micro batches, which this rank has trained on.
    """

    def __init__(
        self, samples: Any, *, micro_batch: int, rank: int, ranks: int, first_epoch: int = 0, trained: int = 0
    ) -> None:
        self.samples, self.micro_batch, self.rank, self.ranks = samples, micro_batch, rank, ranks
        self.first_epoch, self.trained = first_epoch, trained
        self.set_epoch(first_epoch)

    def __len__(self) -> int:
        return len(self.samples) // self.ranks

    def __iter__(self) -> Iterator[Any]:
        ids, size = list(self.samples), self.micro_batch
        first = self.trained if self.epoch == self.first_epoch else 0
        for index in range(first, len(self) // size):
            start = (index * self.ranks + self.rank) * size
            yield from ids[start : start + size]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch = epoch
        self.samples.set_epoch(epoch)


class LightningLoop(TrainerLoop):
    """The loop of Lightning's Trainer. Its own states lie in the ranks' files of a checkpoint.

    A checkpoint holds a whole step: callbacks have seen it, and so has a validation or an end of the epoch that follows
    it. Lightning saves before these, and does not make up for all of them when it resumes.
    """

    def __init__(self, host: RunPolicy, job: RankJob, package: str) -> None:
        self.host, self.job, self.package = host, job, package
        self.trainer: Any = None
        self._resumes = False  # a checkpoint of the run is loaded, and its epoch has not gone on yet
        self._metrics: Mapping[str, Any] = {}  # of that checkpoint
        self._dumped: Mapping[str, Any] | None = None  # Lightning's states of the checkpoint in work
        self._saving = False

    def install(self) -> None:
        """Install the patches of the loop for the rest of this process."""
        patches = _PATCHES[self.package]
        patches[_FIT].wrap(self.fit)
        patches[_SAVE].wrap(self.save_checkpoint)
        patches[_LOAD].wrap(self.load_checkpoint)
        patches[_LOADER].wrap(self.deal_samples)
        patches[_BEGIN].wrap(self.begin)
        patches[_BEGIN_EPOCH].wrap(self.begin_epoch)
        patches[_END_BATCH].wrap(self.end_batch)
        patches[_END_EPOCH].wrap(self.end_epoch)

    @property
    def last_step(self) -> int | None:
        trainer, ends = self.trainer, []
        if trainer.max_steps > -1:
            ends.append(int(trainer.max_steps))
        if (trainer.max_epochs or -1) > -1:
            ends.append(trainer.max_epochs * int(trainer.num_training_batches) // self.job.accumulation)
        return min(ends, default=None)

    @property
    def ends(self) -> bool:
        trainer = self.trainer
        is_last_epoch = -1 < (trainer.max_epochs or -1) <= trainer.fit_loop.epoch_progress.current.processed
        is_last_step = -1 < trainer.max_steps <= trainer.global_step
        return bool(trainer.should_stop or is_last_step or is_last_epoch)

    def end(self) -> None:
        self.trainer.should_stop = True
        self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step

    def fit(self, original: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Train from the run's checkpoint. Without one, from where the script says."""
        if not isinstance(trainer.strategy, pkgutil.resolve_name(f"{self.package}.{_STRATEGY}")):
            raise script_error(
                f"its Trainer has the {type(trainer.strategy).__name__}, which does not train with DeepSpeed",
                hint="give the Trainer strategy=DeepSpeedStrategy(…)",
            )
        self.trainer = trainer
        for text in warn_of_micro_batch_counts(trainer):
            self.host.note(f"warning: {text}")
        trainer.callbacks.insert(0, self._make_callback())
        bound = inspect.signature(original).bind(trainer, *args, **kwargs)
        start = self.host.begin_loop(self)
        if start is not None:
            bound.arguments["ckpt_path"] = str(start)
        return original(*bound.args, **bound.kwargs)

    def _make_callback(self) -> Any:
        loop = self

        class RunCallback(importlib.import_module(self.package).Callback):  # type: ignore[misc]
            def on_train_start(self, trainer: Any, module: Any) -> None:
                trainer.callback_metrics.update(loop._metrics)  # the sanity check has cleared them

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if not trainer.fit_loop._should_accumulate():
                    loop.host.session.report_step()

            def on_train_end(self, trainer: Any, module: Any) -> None:
                loop.host.session.finish()

        return RunCallback()

    def begin(self, original: Any, strategy: Any, /) -> None:
        """The last hook before the first step: those of callbacks and of the module may have drawn random numbers."""
        original(strategy)
        session = self.host.session
        session.restore_random_states()
        if session.done:  # the run was killed between its last save and its end
            self.end()

    def begin_epoch(self, original: Any, batches: Any, /) -> None:
        """Let an epoch that goes on do nothing twice. One that was saved at its end is over: another begins."""
        if self._resumes and batches.batch_progress.is_last_batch:
            batches.restarting = False
        original(batches)
        if self._resumes:
            self._resumes = self.trainer.fit_loop._restarting = batches.restarting = False

    def end_batch(self, original: Any, batches: Any, /, *args: Any, **kwargs: Any) -> None:
        """A batch, and the validation that follows it, is done."""
        original(batches, *args, **kwargs)
        if not batches.batch_progress.is_last_batch and not batches._should_accumulate():
            self.host.session.end_loop_step()

    def end_epoch(self, original: Any, epochs: Any, /) -> None:
        """An epoch is done, and with it its last step."""
        original(epochs)
        if epochs.epoch_loop.batch_progress.is_last_batch:
            self.host.session.end_loop_step()

    def deal_samples(
        self, original: Any, connector: Any, /, dataloader: Any, shuffle: bool, mode: Any, **kwargs: Any
    ) -> Any:
        """Let a loader for training deal out whole steps, from where the run goes on."""
        from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

        if mode != "train":
            return original(connector, dataloader, shuffle, mode, **kwargs)
        if (
            not isinstance(dataloader, DataLoader)
            or isinstance(dataloader.dataset, IterableDataset)
            or type(dataloader.batch_sampler) is not BatchSampler
            or isinstance(dataloader.sampler, DistributedSampler)
        ):
            raise script_error(
                "the samples of its training loader cannot be dealt out by a run: they are streamed, or the script "
                "divides them by itself",
                hint="give trainer.fit a DataLoader of a dataset with a length, without a batch sampler or "
                "DistributedSampler",
            )
        if dataloader.batch_size != self.job.micro_batch:
            raise script_error(
                f"its training loader has batches of {dataloader.batch_size}, and its config needs "
                f"{self.job.micro_batch}",
                hint="let it take the size from the command line, given as {micro_batch_size} after --",
            )
        update = importlib.import_module(f"{self.package}.utilities.data")._update_dataloader
        fit_loop = self.trainer.fit_loop
        epoch, trained = fit_loop.epoch_progress.current.processed, fit_loop.epoch_loop.batch_progress
        batches = 0 if trained.is_last_batch else trained.current.processed  # 0: it was saved at the end of an epoch
        samples = self.host.order_samples(
            dataloader.sampler, drop_last=dataloader.drop_last, seed=int(os.environ.get("PL_GLOBAL_SEED", "0"))
        )
        strategy = self.trainer.strategy
        share = RankSamples(
            samples,
            micro_batch=self.job.micro_batch,
            rank=strategy.global_rank,
            ranks=strategy.world_size,
            first_epoch=epoch,
            trained=batches,
        )
        return update(dataloader, share, mode=mode)

    # Checkpoints.

    def save(self, folder: Path, wait: Callable[[], None]) -> Mapping[str, Any]:
        """Lightning's states: those of its loops, callbacks and schedules."""
        self._saving = True
        try:
            self.trainer.save_checkpoint(folder, weights_only=False)  # else it says that this is its default
        finally:
            self._saving = False
        assert self._dumped is not None
        return {**self._dumped, "accumulation": self.job.accumulation, "metrics": self.read_metrics()}

    def read_metrics(self) -> dict[str, Any]:
        """What schedules and callbacks monitor: it may be of a validation that does not follow soon."""
        return {name: value.detach().cpu() for name, value in self.trainer.callback_metrics.items()}

    def save_checkpoint(
        self, original: Any, strategy: Any, /, checkpoint: Mapping[str, Any], filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Keep Lightning's states where the run saves; the script's own checkpoints are saved as ever."""
        if self._saving:
            self._dumped = {key: value for key, value in checkpoint.items() if key not in _TORCH_STATES}
        else:
            original(strategy, checkpoint, filepath, *args, **kwargs)

    def load_checkpoint(self, original: Any, strategy: Any, /, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint of the run, with any accumulation; others as Lightning does."""
        states = self.host.restore(Path(checkpoint_path), strict=strategy.lightning_module.strict_loading)
        if states is None:
            return original(strategy, checkpoint_path, *args, **kwargs)
        if states["accumulation"] != self.job.accumulation:
            rescale_batches(states["loops"]["fit_loop"], states["accumulation"], self.job.accumulation)
        self.go_on_from(states)
        return dict(states)

    def go_on_from(self, states: Mapping[str, Any]) -> None:
        """Training begins where these states were saved."""
        self._resumes, self._metrics = True, states.get("metrics", {})


def warn_of_micro_batch_counts(trainer: Any) -> list[str]:
    """Name the arguments of a Trainer that count micro batches of a rank, in a sentence; a share is a float."""
    names = ("limit_train_batches", "val_check_interval")
    counted = [f"{name}={value}" for name in names if isinstance(value := getattr(trainer, name), int)]
    if not counted:
        return []
    return [
        f"its Trainer's {' and '.join(counted)} count micro batches: with another micro batch they stand for other "
        "samples; a share such as 0.5 does not depend on it"
    ]


def rescale_batches(fit_loop: Mapping[str, Any], before: int, after: int) -> None:
    """Let the saved progress count the micro batches of another accumulation."""
    progress = fit_loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts.update({name: count // before * after for name, count in counts.items()})
