"""What follows at each event of a script: the policy of a trial or of a run, which the adapters know as `Policy` alone.

A trainer that owns its loop is shown to a run as a `TrainerLoop`, and the trainer's adapter gets the run as its host.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ...config.trainers import presume_library
from ...types import Phase
from ...workload.protocol import WorkloadError
from ..job import RankJob
from ..patching import declare, when_imported
from .engine_config import EngineConfig
from .user_errors import script_error

_DDP = declare("torch.nn.parallel.DistributedDataParallel.__init__", "a script that trains by it needs no DeepSpeed")
_MOST_OTHER_STEPS = 100  # before the engine is made: a script may train something small first
FORKED = "forked"  # a file in the scratch folder: training was tried in a forked process


class Zeros(dict[str, float]):
    """What a script gets from an evaluation or a checkpoint that is skipped. Each value is 0, so that it can go on."""

    def __missing__(self, key: str) -> float:
        return 0


def make_skipped_folder(folder: str | os.PathLike[str]) -> None:
    """Make the folder of a save that is skipped, if that is possible: the script may add files of its own."""
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)


class Policy:
    """What follows at each event of a script. These defaults let it train on; every rank gets the events alike.

    The script may raise one of `ends` to end on purpose. `observer` gets the phases. `failure` is what ended the
    script, even if it caught that. `hooks_paused`: the engine is not called by the script. `host` serves a trainer that
    owns its loop; None: nothing but training happens, so evaluation, saves and trackers are skipped.
    """

    ends: ClassVar[tuple[type[BaseException], ...]] = ()
    host: Any = None  # a `RunPolicy`
    loads_in_ranks = False  # data loaders start no workers
    writes_confined = False  # the kernel refuses the script's writes outside the trial's folders

    def __init__(self, job: RankJob, observer: Any) -> None:
        self.job, self.observer = job, observer
        self._pid = os.getpid()
        self.engine: Any = None
        self._watched_steps: Any = None  # the handle of a hook
        self.failure: BaseException | None = None
        self.hooks_paused = False

    @property
    def step(self) -> int:
        """The optimizer steps that are done."""
        return 0 if self.engine is None else int(self.engine.global_steps)

    # The process.

    def prepare(self, injection: Injection) -> None:
        """Everything is installed, and the script is about to start."""

    def conclude(self) -> None:
        """The script has ended without an error. Raises WorkloadError when it never trained with DeepSpeed."""
        if Path(self.job.scratch, FORKED).exists():
            raise script_error(
                "it trains in a process that it forked", hint="start no ranks in the script: autods starts them"
            )
        if self.engine is None:
            raise self._lack_engine("it ended and never called deepspeed.initialize")

    def refuse_other_training(self) -> None:
        """Refuse a script that trains without DeepSpeed: it would do so to its end before anything could be said."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        steps = 0

        def count_step(*call: Any) -> None:
            nonlocal steps
            steps += self.engine is None
            if steps > _MOST_OTHER_STEPS and self.engine is None:
                raise self._lack_engine(f"it has taken {_MOST_OTHER_STEPS} optimizer steps without DeepSpeed")

        def wrap_model(original: Any, wrapper: Any, /, *args: Any, **kwargs: Any) -> None:
            if self.engine is None:
                raise self._lack_engine("it trains by torch's DistributedDataParallel, not by DeepSpeed")
            original(wrapper, *args, **kwargs)

        self._watched_steps = register_optimizer_step_pre_hook(count_step)
        when_imported("torch.nn.parallel.distributed", lambda: _DDP.wrap(wrap_model))

    def _lack_engine(self, problem: str) -> WorkloadError:
        return script_error(problem, hint=presume_library(self.job.source).way_to_engine)

    def leave_group(self) -> None:
        """The ranks are about to lose their means of communication."""

    # The engine.

    def adapt_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config for an engine, completed with what is chosen for it."""
        return dict(config)

    def begin_engine(self, injection: Injection, arguments: Mapping[str, Any], config: Any, *, from_file: bool) -> None:
        """The script is about to make its engine; `arguments` are those of `deepspeed.initialize`."""

    def start_training(self, engine: Any) -> None:
        """The engine that trains is made."""
        self.engine = engine
        if self._watched_steps is not None:
            self._watched_steps.remove()

    def evaluate_with(self, forward: Callable[..., Any]) -> None:
        """A library calls the engine in its own way: `forward` takes the arguments of a forward."""

    # Calls of the engine.

    def check_goes_on(self) -> None:
        """The script calls its engine. Raises WorkloadError in a process that the script started."""
        if os.getpid() != self._pid:
            raise script_error(
                "it trains in a process that it started itself",
                hint="start no ranks in the script: autods starts them, with RANK, LOCAL_RANK and WORLD_SIZE set",
            )

    def watch_call(self) -> contextlib.AbstractContextManager[object]:
        """Entered for each call of the engine."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def pause_hooks(self) -> Iterator[None]:
        """Calls of the engine inside are not the script's."""
        self.hooks_paused = True
        try:
            yield
        finally:
            self.hooks_paused = False

    def begin_phase(self, phase: Phase) -> None:
        """A part of a training step begins, or the engine is made."""
        self.observer(phase, self.step)

    def begin_other(self, phase: Phase) -> None:
        """The script evaluates or saves between its steps."""
        self.observer.touch(phase, self.step)

    def begin_skipped(self, phase: Phase) -> None:
        """The script evaluates or saves, which is skipped."""

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> None:
        """A forward begins."""
        if training:
            self.begin_phase("forward")
        else:
            self.begin_other("evaluate")

    def end_forward(self, output: Any) -> None:
        """A training forward has ended."""

    def begin_backward(self, loss: Any) -> None:
        """A backward begins."""
        self.begin_phase("backward")

    def end_step(self, *, boundary: bool) -> None:
        """The engine's step has ended; `boundary`: it was an optimizer step."""

    def note_loss(self, output: Any) -> None:
        """A micro batch has this output or loss."""


@dataclass(slots=True, kw_only=True)
class Injection:
    """What a script gets in one rank. An adapter may replace `config` before the script starts.

    `stand_ins` collects uses of a GPU that a CPU rank skips, `warnings` what its library does otherwise with DeepSpeed.
    """

    job: RankJob
    slot: int
    policy: Policy
    config: EngineConfig
    stand_ins: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def skip(
        self,
        owner: str,
        *names: str,
        phase: Phase = "save",
        returns: Callable[[], Any] = lambda: None,
        folder: str | None = None,
    ) -> None:
        """Let methods of a library's class do nothing where the policy only trains.

        `owner` is the dotted name of the class. Some supported releases lack some of the methods. `folder` is their
        argument with the folder that they save into. It is made and returned.
        """

        def skip(original: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.policy.begin_skipped(phase)
            given = None if folder is None else inspect.signature(original).bind(*args, **kwargs).arguments.get(folder)
            if given is None:
                return returns()
            make_skipped_folder(given)
            return given

        for name in names if self.policy.host is None else ():
            declare(f"{owner}.{name}", f"a trial does not {phase}", optional=True).wrap(skip)


class TrainerLoop:
    """The loop of a trainer that owns it, as its adapter shows it to a run.

    `saves_engine` tells that `save` writes the engine's states too, into `state` of the checkpoint's folder.
    """

    saves_engine: ClassVar[bool] = False

    @property
    def step(self) -> int | None:
        """The optimizer steps that are done, those of earlier attempts included; None: the engine counts them."""
        return None

    @property
    def last_step(self) -> int | None:
        """The step at which the trainer ends; None where that is unknown."""
        return None

    @property
    def ends(self) -> bool:
        """Whether the trainer ends after this step."""
        return False

    def end(self) -> None:
        """Let the trainer end after this step."""
        raise NotImplementedError

    def clean(self) -> None:
        """Remove what an interrupted save left behind. All ranks call it before they train."""

    def locate(self, checkpoint: Path) -> Path:
        """The path from which the trainer itself would resume, for a checkpoint of the run."""
        return checkpoint

    def find_disk(self, checkpoints: Path) -> Path:
        """A folder on the disk that takes most of a checkpoint. `checkpoints` is the run's own."""
        return checkpoints

    def request_save(self, save: Callable[[], object]) -> None:
        """Save a checkpoint that the script has not asked for: `save` makes it, and calls `save` of this loop."""
        save()

    def save(self, folder: Path, wait: Callable[[], None]) -> Mapping[str, Any]:
        """Write what the trainer itself saves, and return its states that this rank's file has to hold.

        All ranks call it; `wait` returns when all of them have called it.
        """
        return {}

    def goes_on_from(self, name: str) -> bool:
        """Whether training needs this file to go on, by its path in the checkpoint."""
        return True

    def complete(self, folder: Path) -> None:
        """All ranks have written this checkpoint. Rank 0 calls this."""

    def rotate(self) -> None:
        """The checkpoint counts, so older ones may go by the trainer's own rules. Rank 0 calls this."""

    def protects(self, folder: Path) -> bool:
        """Whether the trainer still needs this checkpoint."""
        return False

    def discard(self, folder: Path) -> None:
        """Remove what a checkpoint has outside of its folder."""
