"""A training run of an unmodified script that uses the Hugging Face Trainer.

The Trainer gets the order's config and sizes, saves by its own `_save_checkpoint` into its own output_dir, and resumes
from there. A checkpoint of the run has a link `trainer` to the Trainer's folder checkpoint-N, `state` to DeepSpeed's
files in it. What the Trainer removes is torn from then on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...config.deepspeed import merge, strip_rung_keys, to_trainer_config
from ...devices import find_device
from ...workload.protocol import WorkloadError
from ..job import RankJob, RunOrder
from ..model_facts import seed_all
from ..patching import declare, declare_all
from ..script.adapters.hf_trainer import ARGUMENTS, CONFIG, END_STEP, TRAIN, suggest_argument
from ..script.engine_config import read_config
from ..script.user_errors import script_error
from . import session as sessions
from . import states
from .checkpoints import STATE, Checkpoint, list_checkpoints, read_checkpoint, remove_checkpoint, remove_torn
from .samples import derive_seed

TRAINER = "trainer"  # in a checkpoint: the link to the Trainer's folder
_EXTRA = "extra"  # in a checkpoint: the script has not asked for it
_UNFINISHED = ".autods-unfinished"  # in the Trainer's folder, until all ranks have saved

_SAVE = declare("transformers.Trainer._save_checkpoint", "the Trainer's checkpoints become those of the run")
_TRAINERS = declare_all(
    "transformers.Trainer",
    ("set_initial_training_values", "_run_epoch", "_load_rng_state", "training_step", "prediction_step"),
    "a run keeps the order of samples, and reports what it does",
)
_LOAD = declare("transformers.trainer.deepspeed_load_checkpoint", "a checkpoint is loaded by any rung and ranks")
_ROTATE = declare("transformers.trainer.rotate_checkpoints", "old checkpoints go when the new one is complete")


def install(job: RankJob) -> None:
    """Install the patches for the rest of this process."""
    sessions.current_observer()("build", 0)
    run = _Run(job)
    CONFIG.wrap(_replace_config, job)
    ARGUMENTS.wrap(_set_arguments, job)
    TRAIN.wrap(run.train)
    END_STEP.wrap(run.end_step)
    run.save_originally = _SAVE.original()
    _SAVE.wrap(run.save)
    _LOAD.wrap(run.load)
    _ROTATE.wrap(run.rotate)
    _TRAINERS["set_initial_training_values"].wrap(run.count_steps)
    _TRAINERS["_run_epoch"].wrap(run.run_epoch)
    _TRAINERS["_load_rng_state"].wrap(run.load_random_states)
    _TRAINERS["training_step"].wrap(run.forward)
    _TRAINERS["prediction_step"].wrap(run.evaluate)


# Before training.


def _replace_config(job: RankJob, original: Any, trainer_config: Any, /, config_file_or_dict: Any) -> None:
    users = read_config(config_file_or_dict)
    if users is not None:
        config_file_or_dict = to_trainer_config(merge(strip_rung_keys(users), job.ds_config))
    original(trainer_config, config_file_or_dict)


def _set_arguments(job: RankJob, original: Any, arguments: Any, /, *args: Any, **kwargs: Any) -> None:
    """TrainingArguments with the sizes of the job. Libraries make others, without DeepSpeed, for default values."""
    if arguments.deepspeed:
        arguments.per_device_train_batch_size = job.micro_batch
        arguments.gradient_accumulation_steps = job.accumulation
        arguments.auto_find_batch_size = False  # it catches an out-of-memory and goes on with half of the batch
        if job.checkpointing:
            arguments.gradient_checkpointing = True
        if job.order is not None and job.order.loads_in_ranks:
            arguments.dataloader_num_workers = 0
            arguments.dataloader_prefetch_factor, arguments.dataloader_persistent_workers = None, False
        if find_device(job.device).stands_in:
            arguments.use_cpu = True
    original(arguments, *args, **kwargs)


class WholeSteps:
    """A sampler with whole global batches in each epoch: filled up from its begin, or cut where the last is dropped.

    Otherwise micro batch and accumulation would decide what the last step of an epoch gets, and how many steps it has.
    `sampler` yields the same samples in each epoch of any attempt: its generator is seeded with `seed` and the epoch.
    """

    def __init__(self, sampler: Any, *, global_batch: int, drop_last: bool, seed: int) -> None:
        self.sampler, self.global_batch, self.drop_last, self.seed = sampler, global_batch, drop_last, seed
        self.ids: list[Any] = []  # of this epoch

    def __len__(self) -> int:
        count, rest = divmod(len(self.sampler), self.global_batch)
        return (count + (rest > 0 and not self.drop_last)) * self.global_batch

    def __iter__(self) -> Iterator[Any]:
        ids = list(self.sampler)
        size = len(self)
        while 0 < len(ids) < size:
            ids += ids[: size - len(ids)]
        self.ids = ids[:size]
        return iter(self.ids)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        elif hasattr(self.sampler, "generator"):
            import torch

            if self.sampler.generator is None:
                self.sampler.generator = torch.Generator()
            self.sampler.generator.manual_seed(self.seed + epoch)

    def list_samples(self, step: int) -> list[Any]:
        """The samples of a step of the run, while its epoch lasts."""
        first = (step - 1) * self.global_batch % len(self)
        return self.ids[first : first + self.global_batch]


def _find_samplers(loader: Any) -> list[Any]:
    """The samplers of a loader that accelerate prepared, from the outermost batch sampler to the innermost."""
    samplers, sampler = [], getattr(loader, "batch_sampler", None)
    while sampler is not None:
        samplers.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return samplers


class TrainerSession(sessions.Session):
    """One rank's training by a Trainer. `write` is the Trainer's own way to save a checkpoint."""

    def __init__(self, trainer: Any, engine: Any, job: RankJob, write: Callable[[], None]) -> None:
        import torch

        self.trainer, self.write = trainer, write
        self.extra = False  # the checkpoint in work is one that the script has not asked for
        self.rotations: list[Callable[[], None]] = []  # that wait for the checkpoint in work
        self.saving = False
        self.whole_steps: WholeSteps | None = None
        self._summed: Any = torch.zeros(())  # losses that the Trainer has not logged
        super().__init__(engine, job, sessions.current_observer())

    @property
    def step(self) -> int:
        """The optimizer steps that are done, those of earlier attempts included."""
        return int(self.trainer.state.global_step)

    @property
    def is_saved(self) -> bool:
        """Whether the run has a checkpoint of this step."""
        return self._saved_step == self.step

    def load(self, checkpoint: Checkpoint, *, strict: bool) -> None:
        """Load weights, optimizer and schedule of a checkpoint. The Trainer loads the rest."""
        self.observer("load", self.step)
        with self._off_the_device():
            states.load(self.engine, checkpoint, strict=strict)

    def note_restored(self) -> None:
        """The states are those of the order's checkpoint, which is this step's."""
        self._saved_step = self._seen_step = self.step

    def report_step(self, summed_loss: Any) -> None:
        """Report a step before the Trainer logs, evaluates or saves. `summed_loss` is of all steps since it logged."""
        if self.order is None or self.step == self._seen_step:
            return
        self._seen_step = self.step
        self.observer("step", self.step)
        summed = summed_loss.detach().clone()
        self._losses = [summed - self._summed.to(summed.device)]
        self._summed = summed
        self.end_step = min(self.trainer.state.max_steps, self.order.steps or self.trainer.state.max_steps)
        self._note_step(self.order)

    def note_logged(self, summed_loss: Any) -> None:
        """The Trainer may have logged: then it sums up anew."""
        self._summed = summed_loss.detach().clone()
        self._step_began_s = time.perf_counter()
        self.observer("forward", self.step)

    def save_if_due(self) -> None:
        """Save what the script does not save by itself; end the training where the order or the driver says so."""
        order, control = self.order, self.trainer.control
        assert order is not None
        if self.done:
            control.should_training_stop = True
        ends = control.should_training_stop
        stops = self.consensus.stop_agreed and not ends
        if not self.is_saved and (ends or stops or self.step % order.checkpoint_every == 0):
            self.save_extra()
        if stops:
            self.stopped = True
            raise sessions.Stopped

    def save_extra(self) -> None:
        """Save a checkpoint that the script has not asked for. It is not pushed to the hub."""
        trainer = self.trainer
        self.extra = True
        try:
            with _changed(trainer.args, push_to_hub=False):
                trainer._save_checkpoint(trainer.model_wrapped, None)  # a subclass may have its own
                if self.is_saved:
                    trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        finally:
            self.extra = False

    def _save_states(self, folder: Path) -> None:
        """Let the Trainer save into its own folder, and link it. A torn one of the same step is removed first."""
        trainer, first = self.trainer, self.consensus.rank == 0
        target = Path(trainer._get_output_dir(None), f"checkpoint-{self.step}").resolve()
        if first:
            if target.exists():
                shutil.rmtree(target)
            target.mkdir(parents=True)
            (target / _UNFINISHED).touch()
        self.consensus.wait()
        self.saving = True
        try:
            with _changed(trainer.args, save_only_model=False):
                self.write()
        finally:
            self.saving = False
        states.save_rank_file(self.engine, folder, rank=self.consensus.rank, state={})
        if first:
            os.symlink(target, folder / TRAINER)
            os.symlink(Path(TRAINER, f"global_step{self.engine.global_steps}"), folder / STATE)
            if self.extra:
                (folder / _EXTRA).touch()

    def _complete(self, job: RankJob, order: RunOrder, folder: Path, save_s: float) -> None:
        (folder / TRAINER / _UNFINISHED).unlink()
        super()._complete(job, order, folder, save_s)

    def _remove_old(self, order: RunOrder) -> None:
        """Only now the Trainer's `save_total_limit` counts. Without it, the script's own checkpoints stay."""
        for rotate in self.rotations:
            rotate()
        self.rotations.clear()
        remove_torn(order.checkpoints)
        best = self.trainer.state.best_model_checkpoint
        for checkpoint in list_checkpoints(order.checkpoints).complete[: -order.keep]:
            if best is None or find_trainer_folder(checkpoint.path) != Path(best).resolve():
                with contextlib.suppress(OSError):
                    self._remove(checkpoint.path)

    def _remove(self, folder: Path) -> None:
        if (folder / _EXTRA).exists():
            shutil.rmtree(find_trainer_folder(folder), ignore_errors=True)
        remove_checkpoint(folder)

    def _list_samples(self, first: int) -> Sequence[int] | None:
        return None if self.whole_steps is None else self.whole_steps.list_samples(self.step)


def find_trainer_folder(checkpoint: Path) -> Path:
    """The Trainer's folder of a checkpoint of the run."""
    return (checkpoint / TRAINER).resolve()


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


class _Run:
    """The calls of the Trainer in one process. Its session begins when the engine exists."""

    def __init__(self, job: RankJob) -> None:
        assert job.order is not None
        self.job, self.order = job, job.order
        self.session: TrainerSession | None = None
        self.trainer: Any = None
        self.whole_steps: WholeSteps | None = None
        self.save_originally: Any = None

    def train(
        self, original: Any, trainer: Any, /, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train from the order's checkpoint. Without one, from where the script says."""
        order = self.order
        if not trainer.args.deepspeed:
            raise script_error(
                "its TrainingArguments have no DeepSpeed config", hint=suggest_argument("deepspeed", "ds_config")
            )
        if self.trainer is not None:
            raise script_error(
                "it trains a second time", hint="give a script that calls trainer.train() once: a run is one training"
            )
        self.trainer = trainer
        sessions.current_observer()("init", 0)
        if trainer.args.process_index == 0:
            for mark in Path(trainer.args.output_dir).glob(f"checkpoint-*/{_UNFINISHED}"):
                shutil.rmtree(mark.parent)
        _wait_for_ranks()
        if order.restore is not None:
            resume_from_checkpoint = find_trainer_folder(Path(order.restore))
            if not resume_from_checkpoint.is_dir():
                raise WorkloadError(f"{order.restore} has no checkpoint of the Trainer")
            resume_from_checkpoint = str(resume_from_checkpoint)
            if trainer.args.ignore_data_skip:
                self.note("ignore_data_skip is off: a run goes on behind the samples that it has seen")
            trainer.args.ignore_data_skip = False
            trainer.args.restore_callback_states_from_checkpoint = True
        return original(trainer, resume_from_checkpoint, *args, **kwargs)

    def count_steps(self, original: Any, trainer: Any, /, args: Any, dataloader: Any) -> Any:
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
            if type(sampler).__name__ == "LengthGroupedSampler":
                sampler.batch_size = self.job.train_batch  # it groups by a rank's share, which may change
            self.whole_steps = batches.sampler = WholeSteps(
                sampler, global_batch=self.job.train_batch, drop_last=batches.drop_last, seed=seed
            )
        elif not samplers or not hasattr(dataloader, "__len__"):
            self.note(
                "a streaming dataset is read anew up to where the run goes on; that holds in its first pass, and "
                "where it yields the same samples in the same order"
            )
        elif type(samplers[-1]).__name__ != "BatchRebalanceSampler":
            self.note("the script makes its own batches: a change of the micro batch may change the order of samples")
        return original(trainer, args, dataloader)

    def run_epoch(self, original: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """An epoch. accelerate does not tell it to the sampler of a loader that skips batches, with several ranks."""
        session = self.find_session(trainer)
        if session.done or session.step >= trainer.state.max_steps:  # else it trains one more
            trainer.control.should_training_stop = True
            return None
        epoch, loader = kwargs["epoch"], kwargs["train_dataloader"]
        for sampler in _find_samplers(loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        return original(trainer, *args, **kwargs)

    def find_session(self, trainer: Any) -> TrainerSession:
        """The session, which begins at the first call."""
        if self.session is None:
            self.begin_session(trainer, trainer.model_wrapped)
        assert self.session is not None
        return self.session

    def begin_session(self, trainer: Any, engine: Any) -> None:
        def write() -> None:
            self.save_originally(trainer, trainer.model_wrapped, None)

        self.session = TrainerSession(trainer, engine, self.job, write)
        self.session.whole_steps = self.whole_steps
        sessions.begin(self.session)

    # Steps.

    def forward(self, original: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.session is not None:
            self.session.observer("forward", self.session.step)
        return original(trainer, *args, **kwargs)

    def evaluate(self, original: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.session is not None:
            self.session.observer("evaluate", self.session.step)
        return original(trainer, *args, **kwargs)

    def end_step(self, original: Any, trainer: Any, /, tr_loss: Any, *args: Any, **kwargs: Any) -> Any:
        session = self.find_session(trainer)
        session.report_step(tr_loss)
        result = original(trainer, tr_loss, *args, **kwargs)
        session.save_if_due()
        session.note_logged(tr_loss)
        return result

    # Checkpoints.

    def save(self, original: Any, trainer: Any, /, model: Any, trial: Any) -> None:
        """The script's own settings ask for a checkpoint. One without the optimizer's states is not the run's."""
        session = self.session
        without_states = trainer.args.save_only_model and trainer.state.global_step % self.order.checkpoint_every
        if session is None or trial is not None or session.saving or (without_states and not session.extra):
            original(trainer, model, trial)
        else:
            session.save()

    def load(self, original: Any, engine: Any, checkpoint_path: Any, /, load_module_strict: bool = True) -> Any:
        """Load a checkpoint of the run, or the best one at the end; others as the Trainer does."""
        if self.session is None:
            self.begin_session(self.trainer, engine)
        session = self.session
        assert session is not None
        path = Path(checkpoint_path).resolve()
        for checkpoint in list_checkpoints(self.order.checkpoints).complete:
            if find_trainer_folder(checkpoint.path) == path:
                session.load(checkpoint, strict=load_module_strict)
                if checkpoint.step == session.step:
                    session.note_restored()
                return None
        return original(engine, checkpoint_path, load_module_strict=load_module_strict)

    def load_random_states(self, original: Any, trainer: Any, /, checkpoint: Any) -> None:
        """The ranks' random generators go on, or begin anew where their number has changed."""
        order = self.order
        if order.restore is None or read_checkpoint(Path(order.restore)).layout.world_size == self.job.world_size:
            original(trainer, checkpoint)
            return
        step = int(trainer.state.global_step)
        seed_all(derive_seed(self.job.seed, step, trainer.args.process_index))
        self.note(f"the number of ranks has changed: random generators begin anew at step {step}")

    def rotate(self, original: Any, /, *args: Any, **kwargs: Any) -> None:
        session = self.session
        if session is not None and session.saving:
            session.rotations.append(functools.partial(original, *args, **kwargs))
        else:
            original(*args, **kwargs)

    def note(self, text: str) -> None:
        if self.trainer is not None and self.trainer.args.process_index == 0:
            print(f"autods: {text}", file=sys.stderr, flush=True)


def _wait_for_ranks() -> None:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
