"""The policy of a real run of a script: it restores, saves when that is due, deals out samples and stops together.

A script that owns its loop makes its session itself (`autods.session`). For a trainer's loop it is made here.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config.deepspeed import allow_gathering
from ..job import RankJob, RunOrder
from ..patching import declare
from ..script.batches import find_loss
from ..script.policy import Injection, Policy, TrainerLoop
from ..script.user_errors import script_error
from . import schedules, states
from . import session as sessions
from .checkpoints import SavedCheckpoint, list_checkpoints, remove_checkpoint, remove_torn
from .samples import WholeSteps

_LOADS = declare(
    "torch.utils.data._utils.signal_handling._set_worker_signal_handlers",
    "a loader's worker outlives the SIGTERM that a scheduler sends to all processes: its rank still trains and saves",
)


class RunPolicy(Policy):
    """One rank's training run of a script, with the phases of its engine's calls."""

    ends = (sessions.Stopped,)

    def __init__(self, job: RankJob, observer: Any) -> None:
        super().__init__(job, observer)
        assert job.order is not None
        self.host, self.order = self, job.order
        self.loads_in_ranks = job.order.loads_in_ranks
        self._loop: TrainerLoop | None = None
        self._session: LoopSession | None = None
        self._stepped = False

    def prepare(self, injection: Injection) -> None:
        """Workers of a loader end with their rank, or when it tells them to. Schedules are noted."""
        super().prepare(injection)

        def set_handlers(original: Any) -> None:
            original()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        _LOADS.wrap(set_handlers)
        schedules.watch()

    def adapt_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Let a script save its whole model, as under its own stage: without this, stage 3 saves none or raises."""
        return allow_gathering(config)

    def start_training(self, engine: Any) -> None:
        """Check that the engine is one of all ranks."""
        super().start_training(engine)
        if int(engine.world_size) != self.job.world_size:
            raise script_error(
                f"its engine has {engine.world_size} ranks, and the run has {self.job.world_size}",
                hint="start no ranks in the script: autods starts them, with RANK, LOCAL_RANK and WORLD_SIZE set",
            )

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> None:
        """The session of a trainer's loop begins before its first step."""
        if training and self._loop is not None:
            _ = self.session
        super().begin_forward(args, kwargs, training=training)

    def end_forward(self, output: Any) -> None:
        """Keep the loss for a trainer's loop."""
        if self._loop is not None and (loss := find_loss(output)) is not None:
            self.session.losses.append(loss.detach())

    def end_step(self, *, boundary: bool) -> None:
        """The script goes on by itself. Say once that it has made no session until its first step."""
        if not self._stepped and self._loop is None and sessions.current is None:
            sessions.note(f"warning: {sessions.NO_SESSION}")
        self._stepped = True
        if boundary:
            self.observer("script", self.step)

    def conclude(self) -> None:
        """Raises WorkloadError also where the engine has done no step: the script has trained without it."""
        super().conclude()
        if not (self._stepped or self.step):
            raise script_error(
                "it ended, and the engine of deepspeed.initialize has done no step",
                hint="let it train with the engine: engine.backward(loss), then engine.step()",
            )

    def leave_group(self) -> None:
        """Save the last step while the ranks can still communicate; not where an error ends this rank alone."""
        if sys.exc_info()[0] is None and sessions.current is not None:
            sessions.current.finish()

    # A trainer's loop, as its adapter shows it. All ranks call each of these alike.

    @property
    def session(self) -> LoopSession:
        """The session of the trainer's loop. It begins at the first call, when the engine is made."""
        if self._session is None:
            assert self._loop is not None
            sessions.current = self._session = LoopSession(self._loop, self.engine, self.job, self.observer)
        return self._session

    def note(self, text: str) -> None:
        """Print a line for the user of the run."""
        sessions.note(text)

    def begin_loop(self, loop: TrainerLoop) -> Path | None:
        """The trainer begins to train; return what it resumes from, None where the run has no checkpoint."""
        if self._loop is not None:
            raise script_error("it trains a second time", hint="give a script that trains once: a run is one training")
        self._loop = loop
        self.observer("init", 0)
        loop.clean()
        return None if self.order.restore is None else loop.locate(Path(self.order.restore))

    def order_samples(self, sampler: Any, *, drop_last: bool, seed: int) -> WholeSteps:
        """A sampler of all ranks' samples in place of the script's, with whole steps in each epoch.

        The samples of a step are the same, whatever the micro batch and the number of ranks are.
        """
        return WholeSteps(sampler, global_batch=self.job.train_batch, drop_last=drop_last, seed=seed)

    def restore(self, path: Path, *, strict: bool = True) -> Mapping[str, Any] | None:
        """Load the checkpoint of this path into the engine, and return the trainer's states in it.

        None where the run has no checkpoint there. `strict` False: it may lack frozen parameters.
        """
        loop, path = self._loop, path.resolve()
        for checkpoint in list_checkpoints(self.order.checkpoints).complete:
            if loop is not None and loop.locate(checkpoint.path).resolve() == path:
                return self.session.load(checkpoint, strict=strict)
        return None

    def save(self) -> bool:
        """Save a checkpoint that the script asks for, unless the run is not there yet; whether it did."""
        if self._session is None:
            return False
        self._session.save()
        return True


class LoopSession(sessions.Session):
    """One rank's training by a trainer that owns its loop."""

    def __init__(self, loop: TrainerLoop, engine: Any, job: RankJob, observer: Any) -> None:
        assert job.order is not None
        self.loop, self._order = loop, job.order
        self._restored: tuple[SavedCheckpoint, Mapping[str, Any]] | None = None
        super().__init__(engine, job, observer)

    @property
    def step(self) -> int:
        return super().step if self.loop.step is None else self.loop.step

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is saved at this step."""
        return self.step % self._order.checkpoint_every == 0

    def load(self, checkpoint: SavedCheckpoint, *, strict: bool) -> Mapping[str, Any]:
        """Load the engine's states, and return those of the trainer."""
        saved = self._load(checkpoint, strict=strict)
        self._restored = checkpoint, saved
        if checkpoint.step == self.step:
            self._saved_step = self._seen_step = self.step
        state: Mapping[str, Any] = saved["state"]
        return state

    def restore_random_states(self) -> bool:
        """Set this rank's generators as the checkpoint has them; whether one was loaded.

        They begin anew where the number of ranks has changed.
        """
        if self._restored is not None:
            self._restore_random_states(*self._restored)
        return self._restored is not None

    def report_step(self, loss: Any = None) -> None:
        """An optimizer step is done. `loss` None: that of its forwards. `end_loop_step` follows."""
        if self.step == self._seen_step:
            return
        self._seen_step = self.step
        self.observer("step", self.step)
        if loss is not None:
            self.losses = [loss]
        ends = [step for step in (self.loop.last_step, self._order.steps) if step is not None]
        self.end_step = min(ends, default=None)
        self._note_step()
        self.observer("script", self.step)  # logging and callbacks of the user's take as long as they like

    def end_loop_step(self) -> None:
        """The trainer has logged, evaluated and saved after a step: the run may save, and end the ranks together."""
        if self.done:
            self.loop.end()
        stops = self.consensus.stop_agreed and not self.loop.ends
        if self._saved_step != self.step and (self.loop.ends or stops or self.is_due):
            self.loop.request_save(self.save)
        if stops:
            self.stopped = True
            raise sessions.Stopped
        self._step_began_s = time.perf_counter()
        self.observer("script", self.step)

    def _save_states(self, folder: Path) -> None:
        state = self.loop.save(folder, self.consensus.wait)
        if not self.loop.saves_engine:
            states.save_engine(self.engine, folder)
        states.save_rank_file(self.engine, folder, rank=self.consensus.rank, state=state)

    def _goes_on_from(self, name: str) -> bool:
        return self.loop.goes_on_from(name)

    def _find_disk(self, order: RunOrder) -> Path:
        return self.loop.find_disk(order.checkpoints)

    def _is_needed(self, folder: Path) -> bool:
        return self.loop.protects(folder)

    def _complete(self, job: RankJob, order: RunOrder, folder: Path, save_s: float) -> None:
        self.loop.complete(folder)
        super()._complete(job, order, folder, save_s)

    def _remove_old(self, order: RunOrder) -> None:
        """The trainer's own rules come first."""
        self.loop.rotate()
        remove_torn(order.checkpoints)
        for checkpoint in list_checkpoints(order.checkpoints).complete[: -order.keep]:
            if not self._is_needed(checkpoint.path):
                with contextlib.suppress(OSError):
                    self._remove(checkpoint.path)

    def _remove(self, folder: Path) -> None:
        self.loop.discard(folder)
        remove_checkpoint(folder)
