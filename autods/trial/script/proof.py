"""The exam of a script: its parts in the trial's hands, and between them steps that the script trains itself."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...outcomes import Examined
from .. import exam as exams
from ..longest import Longest
from ..rendezvous import Ranks
from ..spec import RankJob
from .batches import Batches

_APART = "the longest batch, evaluation and the checkpoint were not checked: the script ended its process group"
_UNSEEN = "evaluation was not run and the loaded checkpoint not compared: the engine was given no tensors to repeat"
_ENDED = "the script ended before a step was trained between saving and loading its checkpoint"


@dataclass(slots=True)
class Proof:
    """`goes_on` after each step of the script until it says no. examined: then `Examined` of this rank as a dict.

    steps: of the script before the first part.
    """

    job: RankJob
    engine: Any
    batches: Batches
    observer: Any
    ranks: Ranks
    steps: int
    examined: dict[str, Any] | None = None
    _left_out: tuple[str, ...] = ()
    _parts: Generator[int, None, dict[str, Any]] | None = field(default=None)

    def goes_on(self) -> bool:
        """The next part; False after the last."""
        self._parts = self._parts or self._begun()
        try:
            next(self._parts)
        except StopIteration as end:
            self.examined = self._said(end.value)
        return self.examined is None

    def ends_without_steps(self) -> None:
        """The script has ended by itself: what is left, as far as the ranks can still talk."""
        import torch

        self._left_out = (_ENDED, *self._left_out)
        while self.examined is None and torch.distributed.is_initialized():
            self.goes_on()
        if self.examined is None:
            self.examined = asdict(Examined(batch_shape=(), draws=0, left_out=(_APART,)))

    def _said(self, examined: dict[str, Any]) -> dict[str, Any]:
        """With what a script leaves out. Where no batch was seen none was evaluated, whatever the exam believes."""
        if self.batches.longest_shape:
            return {**examined, "left_out": (*examined["left_out"], *self._left_out)}
        return {**examined, "evaluated": False, "restored": None, "left_out": (_UNSEEN, *self._left_out)}

    def _begun(self) -> Generator[int, None, dict[str, Any]]:
        hands = exams.Hands(
            step=lambda index: None,  # the script's own
            evaluate=lambda: self.batches.evaluate(self.engine),
            observe=self.observer,
            synchronize=self.observer.meter.synchronize,
        )
        longest = Longest(batch=None, shape=self.batches.longest_shape, draws=self.batches.seen)
        folder = Path(self.job.checkpoints or self.job.scratch) / "checkpoint"
        return exams.parts_of(self.engine, hands, self.ranks, longest=longest, folder=folder, index=self.steps)
