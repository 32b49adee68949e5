"""The Hugging Face Trainer: TrainingArguments compares its arguments with its DeepSpeed config, long before the engine.

So the chosen config is put in there, with "auto" for each value that an argument holds. A policy that trains on gets
the Trainer's loop: it saves by its own `_save_checkpoint` into its own output_dir, and resumes from there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....config.deepspeed import to_trainer_config
from ....devices import find_device
from ....system.stacks import find_caller
from ....workload.script_source import has_placeholder
from ...patching import declare, declare_all, find_original, when_imported
from ..engine_config import LibraryConfig, read_config
from ..policy import Injection, TrainerLoop, Zeros
from ..surroundings import note_use
from ..user_errors import script_error

if TYPE_CHECKING:
    from ...training_run.run_policy import RunPolicy

FOLDER = "trainer"  # in a checkpoint: the link to the Trainer's folder
_STATES = "state"  # in a checkpoint: the link to DeepSpeed's files in it
_EXTRA = "extra"  # in a checkpoint: the script has not asked for it
_RESUMED = ("trainer_state.json", "scheduler.pt")  # what the Trainer reads to go on, beside DeepSpeed's files
_UNFINISHED = ".autods-unfinished"  # in the Trainer's folder, until all ranks have saved

_DROPPED = (
    "with DeepSpeed the Trainer drops its optimizers=(…) and makes an optimizer and a schedule of its "
    "TrainingArguments; give a subclass of it create_optimizer and create_scheduler"
)
_END_STEP = "_maybe_log_save_evaluate"  # the Trainer's method
_CONFIG = declare(
    "transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig.__init__", "the Trainer gets the chosen config"
)
_ARGUMENTS = declare("transformers.TrainingArguments.__post_init__", "the Trainer's batch size is the chosen one")
_TRAINERS = declare_all(
    "transformers.Trainer",
    ("train", _END_STEP, "_save_checkpoint", "set_initial_training_values", "_run_epoch",
     "_load_rng_state", "prediction_step"),
    "a trial only trains; a run keeps the order of samples, saves and resumes",
)  # fmt: skip
_LOAD = declare("transformers.trainer.deepspeed_load_checkpoint", "a checkpoint is loaded by any rung and ranks")
_ROTATE = declare("transformers.trainer.rotate_checkpoints", "old checkpoints go when the new one is complete")


def install(injection: Injection) -> None:
    """Install the patches for the rest of this process, as soon as the library is imported."""
    injection.config = config = LibraryConfig(injection.job, convert=to_trainer_config)
    when_imported("transformers", functools.partial(_install_patches, injection, config))


def _install_patches(injection: Injection, config: LibraryConfig) -> None:
    _CONFIG.wrap(_replace_config, config)
    _ARGUMENTS.wrap(_set_arguments, injection)
    injection.skip("transformers.Trainer", "evaluate", "predict", phase="evaluate", returns=Zeros)
    injection.skip("transformers.Trainer", "save_model", folder="output_dir")
    injection.skip(
        "transformers.Trainer", "save_state", "_save_checkpoint", "init_hf_repo", "push_to_hub",
        "_push_from_checkpoint", "create_model_card",
    )  # fmt: skip
    if injection.policy.host is None:
        _TRAINERS["train"].wrap(train_from_start, injection.warnings)
        _TRAINERS[_END_STEP].wrap(lambda original, *args, **kwargs: None)
    else:
        HfTrainerLoop(injection.policy.host).install()


# Before training.


def _replace_config(config: LibraryConfig, original: Any, trainer_config: Any, /, config_file_or_dict: Any) -> None:
    users = read_config(config_file_or_dict)
    # The original reports what is wrong with a config that cannot be read.
    original(trainer_config, config_file_or_dict if users is None else to_trainer_config(config.replace(users)))


def _set_arguments(injection: Injection, original: Any, arguments: Any, /, *args: Any, **kwargs: Any) -> None:
    """TrainingArguments with the chosen sizes, or an error with the line that cannot be trained with."""
    job, policy = injection.job, injection.policy
    if policy.host is None:
        arguments.report_to, arguments.push_to_hub = "none", False
    arguments.auto_find_batch_size = False  # it catches an out-of-memory and goes on with half of the batch
    # At a SIGTERM each rank would save by its own clock, and end as if it were done. The command stops all together.
    arguments.enable_jit_checkpoint = False
    if not arguments.deepspeed:  # libraries make such arguments for default values: `train` checks those that it uses
        arguments._autods_made = find_caller()
        original(arguments, *args, **kwargs)
        return
    stands_in = find_device(job.device).stands_in
    if stands_in and not arguments.use_cpu:
        arguments.use_cpu = True
        note_use(injection.stand_ins, "a GPU for its TrainingArguments")
    if not stands_in and arguments.use_cpu:
        problem = "its TrainingArguments train on the CPU"
        raise script_error(problem, hint="drop `--use_cpu` after --, or give --device cpu")
    for name, needed, placeholder in (
        ("per_device_train_batch_size", job.micro_batch, "micro_batch_size"),
        ("gradient_accumulation_steps", job.accumulation, "gradient_accumulation_steps"),
    ):
        value = getattr(arguments, name)
        if value != needed and has_placeholder(job.source.argv, placeholder):  # it is given, and does not get there
            problem = f"its {name} is {value}, and its config needs {needed}"
            raise script_error(problem, hint=f"let it take the value that {{{placeholder}}} stands for")
        setattr(arguments, name, needed)
    if policy.loads_in_ranks:
        arguments.dataloader_num_workers = 0
        arguments.dataloader_prefetch_factor = None
    if policy.loads_in_ranks or policy.host is not None:
        # Workers that stay draw their seed once, and anew where a run goes on: then dropout differs in later epochs.
        arguments.dataloader_persistent_workers = False
    original(arguments, *args, **kwargs)


def train_from_start(
    warnings: list[str],
    original: Any,
    trainer: Any,
    /,
    resume_from_checkpoint: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A trial resumes no checkpoint."""
    _check_has_config(trainer)
    if _drops_optimizers(trainer):
        warnings.append(_DROPPED)
    return original(trainer, None, *args, **kwargs)


def _check_has_config(trainer: Any) -> None:
    """Without a DeepSpeed config, training is an error at the arguments that have none."""
    if not trainer.args.deepspeed:
        raise script_error(
            "its TrainingArguments have no DeepSpeed config",
            hint="add `--deepspeed {ds_config}` after --, or let `deepspeed=` there take it from the command line",
            at=getattr(trainer.args, "_autods_made", None),
        )


def _drops_optimizers(trainer: Any) -> bool:
    """Whether the script gave its Trainer an optimizer or a schedule, which it does not train with."""
    return trainer.optimizer is not None or trainer.lr_scheduler is not None


# The loop.


class HfTrainerLoop(TrainerLoop):
    """The calls of the Trainer in one process.

    A checkpoint of a run has a link `trainer` to the Trainer's folder checkpoint-N, and `state` to DeepSpeed's files
    in it. What the Trainer removes is torn from then on.
    """

    saves_engine = True

    def __init__(self, host: RunPolicy) -> None:
        self.host = host
        self.trainer: Any = None
        self._write: Any = None  # the Trainer's own way to save a checkpoint
        self._extra = False  # the checkpoint in work is one that the script has not asked for
        self._saving = False
        self._saved_step = -1
        self.rotations: list[Callable[[], None]] = []  # that wait for the checkpoint in work
        self._summed: Any = 0.0  # losses that the Trainer has not logged
        self._wrappers: dict[str, Callable[..., Any]] = {}  # of the Trainer's methods
        self._entered: set[str] = set()  # methods in work

    def install(self) -> None:
        """Install the patches of the loop for the rest of this process."""
        self._write = _TRAINERS["_save_checkpoint"].original()
        wrappers: Mapping[str, Callable[..., Any]] = {
            "train": self.train,
            "set_initial_training_values": self.deal_samples,
            "_run_epoch": self.run_epoch,
            "prediction_step": self.evaluate,
            _END_STEP: self.end_step,
            "_save_checkpoint": self.save_checkpoint,
            "_load_rng_state": self.load_random_states,
        }
        self._wrappers = {name: self._enter_once(name, wrapper) for name, wrapper in wrappers.items()}
        for name, wrapper in self._wrappers.items():
            _TRAINERS[name].wrap(wrapper)
        _LOAD.wrap(self.load)
        _ROTATE.wrap(self.rotate_later)

    def _enter_once(self, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapper of a method; a call from within it is the Trainer's own."""

        def call(original: Any, /, *args: Any, **kwargs: Any) -> Any:
            if name in self._entered:
                return original(*args, **kwargs)
            self._entered.add(name)
            try:
                return wrapper(original, *args, **kwargs)
            finally:
                self._entered.discard(name)

        return call

    def _wrap_replaced(self) -> None:
        """Wrap the methods again that a script has replaced by its own, as axolotl does."""
        for name, wrapper in self._wrappers.items():
            if find_original(method := _TRAINERS[name].original()) is method:
                _TRAINERS[name].wrap(wrapper)

    @property
    def step(self) -> int:
        return int(self.trainer.state.global_step)

    @property
    def last_step(self) -> int | None:
        return int(self.trainer.state.max_steps)

    def train(
        self, original: Any, trainer: Any, /, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train from the run's checkpoint. Without one, from where the script says."""
        _check_has_config(trainer)
        self._wrap_replaced()
        # A subclass may log first, as ms-swift's does: the sum of losses is 0 when it calls the Trainer's own method.
        ends_step = functools.partial(self._wrappers[_END_STEP], getattr(type(trainer), _END_STEP), trainer)
        setattr(trainer, _END_STEP, ends_step)
        self.trainer, arguments = trainer, trainer.args
        if _drops_optimizers(trainer):
            self.host.note(f"warning: {_DROPPED}")
        named = _find_named(resume_from_checkpoint, arguments)
        is_torn = named is not None and Path(named, _UNFINISHED).exists()
        folder = self.host.begin_loop(self)
        if is_torn:  # an attempt ended in its first save: the script has found what `clean` removes
            resume_from_checkpoint = _find_named(True, arguments)
        if folder is not None:
            if arguments.ignore_data_skip:
                self.host.note("ignore_data_skip is off: a run goes on behind the samples that it has seen")
            arguments.ignore_data_skip = False
            arguments.restore_callback_states_from_checkpoint = True
            resume_from_checkpoint = str(folder)
        if arguments.save_total_limit == 1 and arguments.metric_for_best_model is not None:
            # At its end the Trainer would remove all but the best one: then the run would have lost its last steps.
            arguments.save_total_limit = 2
        return original(trainer, resume_from_checkpoint, *args, **kwargs)

    def clean(self) -> None:
        """Remove checkpoints that not all ranks have saved."""
        from torch import distributed

        wait = distributed.barrier if distributed.is_initialized() else lambda: None
        wait()  # all ranks have looked at what the script resumes from
        if self.trainer.args.process_index == 0:
            for mark in Path(self.trainer.args.output_dir).glob(f"checkpoint-*/{_UNFINISHED}"):
                shutil.rmtree(mark.parent)
        wait()

    def locate(self, checkpoint: Path) -> Path:
        """The Trainer's folder of a checkpoint of the run."""
        return (checkpoint / FOLDER).resolve()

    def find_disk(self, checkpoints: Path) -> Path:
        """The Trainer's own folder: it may be on another disk than the run's, which only gets links and small files."""
        folder = Path(self.trainer._get_output_dir(None))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def deal_samples(self, original: Any, trainer: Any, /, args: Any, dataloader: Any) -> Any:
        """The Trainer counts the steps of its loader, which gets whole steps before."""
        if trainer.accelerator.split_batches:
            raise script_error(
                "its accelerator_config has split_batches, which divides the micro batch by the ranks",
                hint="leave it out: per_device_train_batch_size is of one rank",
            )
        samplers = _find_samplers(dataloader)
        # A script may have a sampler of its own kind, or a batch sampler: it is left as it is.
        if len(samplers) > 1 and hasattr(samplers[-2], "drop_last") and hasattr(samplers[-1], "__len__"):
            seed = args.seed if args.data_seed is None else args.data_seed
            batches, sampler = samplers[-2:]
            batches.sampler = self.host.order_samples(sampler, drop_last=batches.drop_last, seed=seed)
            if type(sampler).__name__ == "LengthGroupedSampler":
                sampler.batch_size = batches.sampler.global_batch  # it groups by a rank's share, which may change
        elif not samplers or type(samplers[-1]).__name__ != "BatchRebalanceSampler":
            self.host.note(
                "the script streams its data or makes its own batches: a run goes on exactly where these are the same "
                "for each micro batch, and within the first pass of a stream"
            )
        return original(trainer, args, dataloader)

    def run_epoch(self, original: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """An epoch. accelerate does not tell it to the sampler of a loader that skips batches, with several ranks."""
        if self.host.session.done or self.step >= trainer.state.max_steps:  # else it trains one more
            trainer.control.should_training_stop = True
            return None
        for sampler in _find_samplers(kwargs["train_dataloader"]):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(kwargs["epoch"])
        return original(trainer, *args, **kwargs)

    # Steps.

    def evaluate(self, original: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A batch of an evaluation, which may not call the engine."""
        self.host.begin_other("evaluate")
        return original(trainer, *args, **kwargs)

    def end_step(self, original: Any, trainer: Any, /, tr_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """An optimizer step is done. `tr_loss` is the sum since the Trainer has logged."""
        summed = tr_loss.detach().clone()
        self.host.session.report_step(summed - self._summed)
        self._summed = summed
        result = original(trainer, tr_loss, *args, **kwargs)
        self.host.session.end_loop_step()
        self._summed = tr_loss.detach().clone()  # the Trainer may have logged: then it sums up anew
        return result

    def end(self) -> None:
        self.trainer.control.should_training_stop = True

    @property
    def ends(self) -> bool:
        return bool(self.trainer.control.should_training_stop)

    # Checkpoints.

    def save_checkpoint(self, original: Any, trainer: Any, /, model: Any, trial: Any) -> None:
        """The script's own settings ask for a checkpoint. One without the optimizer's states is not the run's."""
        without_states = trainer.args.save_only_model and not self.host.session.is_due
        if trial is not None or self._saving or (without_states and not self._extra) or not self.host.save():
            original(trainer, model, trial)

    def request_save(self, save: Callable[[], object]) -> None:
        """Save a checkpoint that the script has not asked for. It is not pushed to the hub."""
        trainer = self.trainer
        self._extra = True
        try:
            with _changed(trainer.args, push_to_hub=False):
                trainer._save_checkpoint(trainer.model_wrapped, None)  # calls `save`; a subclass may have its own
                if self._saved_step == self.step:  # there was room
                    trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        finally:
            self._extra = False

    def save(self, folder: Path, wait: Callable[[], None]) -> Mapping[str, Any]:
        """Let the Trainer save into its own folder, and link it. A torn one of the same step is removed first."""
        trainer = self.trainer
        first = trainer.args.process_index == 0
        target = Path(trainer._get_output_dir(None), f"checkpoint-{self.step}").resolve()
        if first:
            if target.exists():
                shutil.rmtree(target)
            target.mkdir(parents=True)
            (target / _UNFINISHED).touch()
        wait()
        self._saving = True
        try:
            with _changed(trainer.args, save_only_model=False):
                self._write(trainer, trainer.model_wrapped, None)
        finally:
            self._saving = False
        self._saved_step = self.step
        if first:
            os.symlink(target, folder / FOLDER)
            os.symlink(Path(FOLDER, f"global_step{trainer.model_wrapped.global_steps}"), folder / _STATES)
            if self._extra:
                (folder / _EXTRA).touch()
        return {}

    def goes_on_from(self, name: str) -> bool:
        """DeepSpeed's files have the weights. Those beside them are the script's: callbacks change and remove them."""
        top, *rest = Path(name).parts
        return top != FOLDER or rest[0].startswith("global_step") or rest[0] in _RESUMED

    def complete(self, folder: Path) -> None:
        (folder / FOLDER / _UNFINISHED).unlink()

    def rotate(self) -> None:
        """Now the Trainer's `save_total_limit` counts. Without it, the script's own checkpoints stay."""
        for rotate in self.rotations:
            rotate()
        self.rotations.clear()

    def discard(self, folder: Path) -> None:
        """Remove the Trainer's folder of a checkpoint that the script has not asked for."""
        if (folder / _EXTRA).exists():
            shutil.rmtree(self.locate(folder), ignore_errors=True)

    def protects(self, folder: Path) -> bool:
        """Whether it is the best checkpoint so far."""
        best = self.trainer.state.best_model_checkpoint
        return best is not None and self.locate(folder) == Path(best).resolve()

    def load(self, original: Any, engine: Any, checkpoint_path: Any, /, load_module_strict: bool = True) -> Any:
        """Load a checkpoint of the run, or the best one at the end; others as the Trainer does."""
        if self.host.restore(Path(checkpoint_path), strict=load_module_strict) is None:
            return original(engine, checkpoint_path, load_module_strict=load_module_strict)
        return None

    def load_random_states(self, original: Any, trainer: Any, /, checkpoint: Any) -> None:
        """The ranks' random generators go on as the run has saved them."""
        if not self.host.session.restore_random_states():
            original(trainer, checkpoint)

    def rotate_later(self, original: Any, /, *args: Any, **kwargs: Any) -> None:
        """Remove old checkpoints, but not while a new one is in work."""
        if self._saving:
            self.rotations.append(functools.partial(original, *args, **kwargs))
        else:
            original(*args, **kwargs)


def _find_named(given: Any, arguments: Any) -> Any:
    """The checkpoint that `resume_from_checkpoint` stands for; None for none."""
    from transformers.trainer_utils import get_last_checkpoint

    if given is True:
        return get_last_checkpoint(arguments.output_dir) if os.path.isdir(arguments.output_dir) else None
    return given or None


def _find_samplers(loader: Any) -> list[Any]:
    """The samplers of a loader that accelerate prepared, from the outermost batch sampler to the innermost."""
    samplers, sampler = [], getattr(loader, "batch_sampler", None)
    while sampler is not None:
        samplers.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return samplers


@contextlib.contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
