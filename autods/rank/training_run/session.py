"""The hook of a training run in the user's script: `autods.session(engine)`.

In an attempt of `autods run` it restores the last checkpoint, deals out the samples, saves when that is due, and ends
the ranks together. Without a run it deals out samples and counts.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files import exists_now
from ...system.host import installed_versions
from ...system.limits import find_lack
from ...types import Phase
from ...units import format_bytes
from ...workload.protocol import WorkloadError
from ..job import RankJob, RunOrder, find_job
from ..memory import Meter
from ..model_facts import estimate_checkpoint_bytes, seed_all
from ..record import RunResult
from . import states
from .checkpoints import (
    RANKS,
    Manifest,
    SavedCheckpoint,
    checkpoint_folder,
    list_checkpoints,
    list_files,
    read_checkpoint,
    remove_checkpoint,
    remove_old,
    sync_files,
    write_manifest,
)
from .consensus import Consensus
from .samples import SampleOrder, Share, deal_samples, deal_stream, derive_seed
from .schedules import Schedules
from .step_lines import StepLines

NO_SESSION = (
    "the script calls no autods.session(engine): its steps are not counted, --steps does not end it, and nothing is "
    "saved or restored; "
    "docs/run.md shows the three lines"
)
_ROOM_TO_SPARE = 1.05  # of a checkpoint's bytes: the next one is hardly larger
_WRAPPED = ("engine", "_forward_module", "_orig_mod")  # what wrappers of an engine call it
_PEAK_EVERY_S = 0.2  # torch's counters of a card take a tenth of a millisecond to read
_READING_BEAT_S, _READING_LINE_S = 1.0, 30.0  # while a stream is read up to where a run goes on
_OF_WORKERS = (  # options of a loader
    "num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "worker_init_fn", "timeout"
)  # fmt: skip
_WRITTEN_BADLY = ("PytorchStreamWriter", "iostream error", "inline_container", "unexpected pos")  # on a full disk


class Stopped(BaseException):
    """The driver asked the ranks to save and to end. No Exception, so that `except Exception` does not catch it."""


class NoObserver:
    """The phases of a rank that nobody watches."""

    meter = Meter()
    step = 0

    def __call__(self, phase: Phase, step: int) -> None:
        self.step = step

    touch = __call__


# Of this process: its session, which an adapter may make; who hears the phases of the next one, and has the rank's
# meter.
current: Session | None = None
observer: Any = NoObserver()


def session(engine: Any) -> Session:
    """Return the session of DeepSpeed's engine, which has the states of the last checkpoint if the run has one.

    `engine` may also be what accelerate's `prepare` or Fabric's `setup` made of the model. Call it once on every rank,
    right after the engine is made.
    """
    global current
    current = Session(find_engine(engine), find_job(), observer)
    current.restore()
    return current


def note(text: str) -> None:
    """Print a line into the log of rank 0, which the user of a run sees."""
    if os.environ.get("RANK", "0") == "0":
        print(f"autods: {text}", file=sys.stderr, flush=True)


def find_engine(model: Any) -> Any:
    """Return DeepSpeed's engine in a model that a library has wrapped. Raises WorkloadError where there is none."""
    engine = model
    while engine is not None and not hasattr(engine, "train_micro_batch_size_per_gpu"):
        engine = next((inner for name in _WRAPPED if (inner := getattr(engine, name, None)) is not None), None)
    if engine is None:
        raise WorkloadError(
            f"autods.session got {type(model).__name__}, which is no engine of DeepSpeed",
            hint="give it the engine of deepspeed.initialize, or the model that accelerator.prepare or fabric.setup "
            "returned with DeepSpeed",
        )
    return engine


def describe_end() -> RunResult:
    """Return how this rank's session ended. Save its step, if nothing has."""
    if current is None:  # a script that trains and saves by itself
        return RunResult(ended="done", step=None)
    current.finish()
    return RunResult(ended="stopped" if current.stopped else "done", step=current.step, unsaved=current.unsaved)


class Session:
    """One rank's training. `state` is the user's: a dict that each checkpoint saves and restores.

    `observer` gets the phases; its meter has the peak of the device's memory.
    """

    def __init__(self, engine: Any, job: RankJob | None, observer: Any) -> None:
        self.engine, self.job = engine, job
        self.order = order = None if job is None else job.order
        self.observer = observer
        self.state: dict[str, Any] = {}
        self.schedules = Schedules(engine, note)
        self.stopped = False
        self._stop_file = "" if order is None else str(order.stop_file)
        self.consensus = Consensus(
            deliver=self._write_steps,
            start_copy=states.start_copy,
            find_stop=lambda: exists_now(self._stop_file),
        )
        if order is not None:
            self.consensus.join()
        rank, replicas = states.find_replica(engine)
        self.share = Share(
            rank=rank,
            replicas=replicas,
            micro_batch=int(engine.train_micro_batch_size_per_gpu()),
            accumulation=int(engine.gradient_accumulation_steps()),
        )
        self._check_batch()
        self._saved_step = -1  # of the last checkpoint
        self.unsaved: str | None = None  # why there was no room for the last one that was due
        self._seen_step = self.step
        self.end_step = self.steps  # the last step of the training, as far as that is known
        self._lines = None if order is None else StepLines(order.steps_file)
        self._step_began_s = time.perf_counter()
        self._peak_read_s = 0.0
        self._peak_bytes: int | None = None
        self.losses: list[Any] = []  # of this step's micro batches, on the device
        self._has_dealt = False  # samples, in this process

    # What a script reads.

    @property
    def step(self) -> int:
        """The optimizer steps that are done, those of earlier attempts included."""
        return int(self.engine.global_steps)

    @property
    def samples(self) -> int:
        """The samples of all ranks that the run has trained on."""
        return self.step * self.share.global_batch

    @property
    def steps(self) -> int | None:
        """The optimizer steps at which the run ends; None where the script decides."""
        return None if self.order is None else self.order.steps

    @property
    def done(self) -> bool:
        """Whether the run has done its steps."""
        return self.steps is not None and self.step >= self.steps

    def batches(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        **loader_options: Any,
    ) -> Iterator[Any]:
        """Yield this rank's micro batches on the engine's device, from the step where the run goes on.

        They end after the run's steps, or after `epochs` passes through the data; without both, after one pass. Steps
        are those of the run, so one call deals out all passes. Raises WorkloadError where another has nothing left.
        `loader_options` are those of torch's DataLoader, such as num_workers. A dataset that can only be iterated must
        yield the same samples in the same order on every rank; a resumed run reads and drops what it has trained on.
        """
        import torch
        from torch.utils.data import DataLoader, default_collate

        for name in ("batch_size", "sampler", "batch_sampler", "drop_last"):
            if name in loader_options:
                raise WorkloadError(
                    f"session.batches takes no {name}", hint="the run decides which samples make a micro batch"
                )
        if self.order is not None and self.order.loads_in_ranks:
            loader_options = {name: value for name, value in loader_options.items() if name not in _OF_WORKERS}
        seed = 0 if self.job is None else self.job.seed
        # A loader draws the seed of its workers when its iteration begins. From the rank's own generator, that would
        # take a number which a run without interruption does not take.
        generator = torch.Generator(device=torch.get_default_device())  # the loader draws there
        generator.manual_seed(derive_seed(seed, self.step, self.consensus.rank))
        loader_options = {"generator": generator, **loader_options}
        collate, end = collate_fn or default_collate, self.steps
        follows, self._has_dealt = self._has_dealt, True
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            samples = SampleOrder(len(dataset), seed, shuffle)
            end = self.end_step = last = self._find_end(len(dataset), epochs)
            if follows and self.step >= last and not self.done:  # such as in a loop over epochs
                raise WorkloadError(
                    f"a second session.batches has nothing to deal out: its samples end at step {last}",
                    hint="call it once, with epochs=… for the passes through the dataset",
                )
            sampler = deal_samples(samples, self.share, self.step, end)
            loader: Iterable[Any] = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **loader_options)
        else:
            if epochs is not None:
                raise WorkloadError("the dataset has no length, so its epochs cannot be counted", hint="drop epochs")
            if self.samples:
                note(f"reading {self.samples} samples of the dataset to go on behind them")
            stream = DataLoader(dataset, batch_size=None, collate_fn=_keep, **loader_options)
            dealt = deal_stream(stream, self.share, self.step, self._report_reading())
            loader = (collate(batch) for batch in dealt)
        micro_batches = iter(loader)
        while end is None or self.step < end:
            batch = next(micro_batches, None)
            if batch is None:
                return
            self.observer("forward", self.step)
            yield states.move(batch, self.engine.device)

    def step_done(self, loss: Any = None) -> None:
        """Count a micro batch, after `engine.step()` and the step of a schedule. It may save, and end the run.

        All ranks call it alike. `loss` is that of the micro batch, for the run's journal.
        """
        if loss is not None:
            self.losses.append(loss.detach() if hasattr(loss, "detach") else loss)
        if self.step == self._seen_step or self.order is None:
            self._seen_step = self.step
            return
        self._seen_step = self.step
        self._note_step()
        if self.done or self.step % self.order.checkpoint_every == 0:
            self.save()
        if self.consensus.stop_agreed and not self.done:
            self.stopped = True
            if self._saved_step != self.step:
                self.save()
            raise Stopped
        self.observer("script", self.step)
        self._step_began_s = time.perf_counter()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The script evaluates in this block, between two steps: the run shows that."""
        self.observer("evaluate", self.step)
        yield
        self.observer("script", self.step)

    # Checkpoints.

    def restore(self) -> None:
        """Load the order's checkpoint, if it names one. Every rank has the same states afterwards as when it saved."""
        job, order = self.job, self.order
        if job is None or order is None or order.restore is None:
            return
        checkpoint = read_checkpoint(Path(order.restore))
        saved = self._load(checkpoint)
        if self.step != checkpoint.step:
            raise RuntimeError(f"{order.restore} is of step {checkpoint.step}, and the engine is at {self.step}")
        self.state = saved["state"]
        self.schedules.restore(saved.get("schedules", ()), saved["groups"])
        self._restore_random_states(checkpoint, saved)
        self._saved_step = self._seen_step = self.step
        self._step_began_s = time.perf_counter()

    def _load(self, checkpoint: SavedCheckpoint, *, strict: bool = True) -> dict[str, Any]:
        """Load the engine's states; return what this rank has saved, or the first one where their number differs."""
        self.observer("load", self.step)
        with self._off_the_device():
            states.load(self.engine, checkpoint, strict=strict)
        is_same = self.job is not None and checkpoint.layout.world_size == self.job.world_size
        return states.read_rank_file(checkpoint.path / RANKS / states.rank_file(self.consensus.rank if is_same else 0))

    def _restore_random_states(self, checkpoint: SavedCheckpoint, saved: Mapping[str, Any]) -> None:
        """Let the random generators go on, or begin anew where the number of ranks has changed."""
        assert self.job is not None
        saved_ranks, ranks = checkpoint.layout.world_size, self.job.world_size
        if saved_ranks == ranks:
            states.set_random_states(saved["random"])
            return
        seed_all(derive_seed(self.job.seed, self.step, self.consensus.rank))
        note(f"{ranks} ranks go on from {saved_ranks}: random generators begin anew at step {self.step}")

    def save(self) -> bool:
        """Save a checkpoint now, on every rank; return whether there was room for it on the disk.

        Raises OSError for a save that fails half-way. The torn checkpoint stays, and does not count.
        """
        job, order = self.job, self.order
        if job is None or order is None:
            return False
        if self._saved_step == self.step:
            return True
        self.consensus.flush()
        began = time.perf_counter()
        first = self.consensus.rank == 0
        problem = self._make_room(order) if first else None
        self.unsaved = problem = self.consensus.broadcast(problem)
        if problem is not None:
            note(f"no checkpoint at step {self.step}: {problem}")
            if first and self._lines is not None:
                self._lines.write([{"step": self.step, "unsaved": problem}])
            return False
        folder = checkpoint_folder(order.checkpoints, self.step)
        if first:
            if folder.exists():  # torn: it is not the one that this attempt began from
                remove_checkpoint(folder)
            (folder / RANKS).mkdir(parents=True)
        self.consensus.wait()
        self.observer("save", self.step)
        with self._off_the_device():
            try:
                self._save_states(folder)
                states.finish_writing(self.engine)
                self.consensus.wait()
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    sync_files(folder)
                self.consensus.wait()
                if first:
                    self._complete(job, order, folder, time.perf_counter() - began)
            except RuntimeError as error:  # torch's writer reports a full disk in its own way
                if not any(sign in str(error) for sign in _WRITTEN_BADLY):
                    raise
                free = format_bytes(shutil.disk_usage(self._find_disk(order)).free)
                reason = f"{os.strerror(errno.ENOSPC)}: {free} are free while saving"
                raise OSError(errno.ENOSPC, reason, str(folder)) from None
        self.consensus.wait()  # no rank leaves while the first one still writes
        self._saved_step = self.step
        return True

    def finish(self) -> None:
        """The training is over: save its last step, if that is not saved and the ranks can still communicate."""
        if self.order is not None and not self.stopped and self._saved_step != self.step:
            if self.consensus.can_communicate:
                self.save()
            else:
                note(f"the last checkpoint is of step {self._saved_step}: the ranks left before they could save")
        if self.consensus.can_communicate:
            self.consensus.flush()

    def _save_states(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint; all ranks call it."""
        schedules = self.schedules.states()
        states.save_engine(self.engine, folder)
        states.save_rank_file(self.engine, folder, rank=self.consensus.rank, state=self.state, schedules=schedules)

    def _remove_old(self, order: RunOrder) -> None:
        remove_old(order.checkpoints, order.keep)

    def _remove(self, folder: Path) -> None:
        remove_checkpoint(folder)

    def _complete(self, job: RankJob, order: RunOrder, folder: Path, save_s: float) -> None:
        files, versions = list_files(folder), installed_versions()
        manifest = Manifest(
            step=self.step,
            samples=self.samples,
            global_batch=job.train_batch,
            seed=job.seed,
            layout=states.describe_layout(self.engine),
            optimizer=type(states.base_optimizer(self.engine)).__name__,
            files={name: size for name, size in files.items() if self._goes_on_from(name)},
            others={name: size for name, size in files.items() if not self._goes_on_from(name)},
            versions={name: versions[name] for name in ("autods", "deepspeed", "torch")},
            save_s=save_s,
        )
        write_manifest(folder, manifest)
        self._remove_old(order)

    def _goes_on_from(self, name: str) -> bool:
        """Whether the run needs this file of a checkpoint to go on; else the script may do with it as it likes."""
        return True

    def _make_room(self, order: RunOrder) -> str | None:
        """Return why a checkpoint does not fit on the disk; None if it does.

        Where only the older ones are in the way, they are removed, and the last one stays.
        """
        order.checkpoints.mkdir(parents=True, exist_ok=True)
        complete = list_checkpoints(order.checkpoints).complete
        largest = max((checkpoint.size_bytes for checkpoint in complete), default=0)
        size = largest or estimate_checkpoint_bytes(self.engine.module)
        disk, needed = self._find_disk(order), int(size * _ROOM_TO_SPARE)
        older = [checkpoint.path for checkpoint in complete[:-1] if not self._is_needed(checkpoint.path)]
        while (lack := find_lack(disk, needed)) is not None and older:
            with contextlib.suppress(OSError):
                self._remove(older.pop(0))
        return lack

    def _find_disk(self, order: RunOrder) -> Path:
        """A folder on the disk to which a checkpoint is written."""
        return order.checkpoints

    def _is_needed(self, folder: Path) -> bool:
        """Whether a checkpoint stays where an older one has to go."""
        return False

    @contextlib.contextmanager
    def _off_the_device(self) -> Iterator[None]:
        """A checkpoint passes through host memory, which is no part of an emulated device's budget."""
        self.observer.meter.lift()
        yield
        self.observer.meter.return_to_device()

    # The journal of steps.

    def _note_step(self) -> None:
        """Report the step to the other ranks. Rank 0 writes its line once all have: about a second later."""
        loss, self.losses = states.average(self.losses), []
        line = None
        if self.consensus.rank == 0:
            first = (self.step - 1) * self.share.global_batch
            now = time.perf_counter()
            line = {
                "step": self.step,
                "steps": self.end_step,
                "samples": [first, first + self.share.global_batch],
                "seconds": round(now - self._step_began_s, 6),
                "device_peak_bytes": self._read_peak(now),
            }
        self.consensus.report(line, loss)

    def _write_steps(self, steps: Sequence[tuple[Mapping[str, Any] | None, float | None]]) -> None:
        """Write the lines of some steps, with their losses."""
        lines = []
        for line, loss in steps:
            if line is not None:
                is_number = loss is not None and math.isfinite(loss)  # JSON has no infinity
                lines.append({**line, "loss": loss if is_number else None})
        if self._lines is not None and lines:
            self._lines.write(lines)

    def _read_peak(self, now: float) -> int | None:
        if now - self._peak_read_s > _PEAK_EVERY_S:
            self._peak_read_s = now
            self._peak_bytes = self.observer.meter.device_peak()
        return self._peak_bytes

    def _report_reading(self) -> Callable[[int], None]:
        """Return a function that tells how many samples of a stream were read that the run has trained on."""
        began_s = beat_s = line_s = time.monotonic()

        def report(count: int) -> None:
            nonlocal beat_s, line_s
            now = time.monotonic()
            if now - beat_s >= _READING_BEAT_S:
                beat_s = now
                self.observer("script", self.step)
            if now - line_s >= _READING_LINE_S:
                line_s = now
                left_s = (now - began_s) / count * (self.samples - count)
                note(f"{count:,} of {self.samples:,} samples are read; it takes about {left_s:.0f} s more")

        return report

    def _find_end(self, count: int, epochs: int | None) -> int:
        """The step before which the batches of a dataset end."""
        ends = [] if self.steps is None else [self.steps]
        if epochs is not None or self.steps is None:
            ends.append(count * (1 if epochs is None else epochs) // self.share.global_batch)
        return min(ends)

    def _check_batch(self) -> None:
        if self.job is not None and self.share.global_batch != self.job.train_batch:
            share = self.share
            raise WorkloadError(
                f"its engine trains on {share.global_batch} samples a step, not {self.job.train_batch} as the run",
                hint=f"let deepspeed.initialize get the config {{ds_config}}: micro batch {share.micro_batch} × "
                f"accumulation {share.accumulation} × {share.replicas} ranks does not come from it",
            )


def _keep(sample: Any) -> Any:
    return sample
