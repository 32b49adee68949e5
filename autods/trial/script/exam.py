"""The exam of a script, and the losses by which two configs are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...types import Examined
from .. import exam
from ..batch import Longest
from ..distributed import Ranks
from ..job import RankJob
from ..loss_parity import Incomparable, forget_steps, generators, without_dropout
from ..model_facts import is_moe
from .data import Batches, tensors_in

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
        hands = exam.Hands(
            step=lambda index: None,  # the script's own
            evaluate=lambda: self.batches.evaluate(self.engine),
            observe=self.observer,
            synchronize=self.observer.meter.synchronize,
        )
        longest = Longest(batch=None, shape=self.batches.longest_shape, draws=self.batches.seen)
        folder = Path(self.job.checkpoints or self.job.scratch) / "checkpoint"
        return exam.parts_of(self.engine, hands, self.ranks, longest=longest, folder=folder, index=self.steps)


_CHUNK = 2**20  # elements that are summed at a time: a copy of a whole embedding may not fit
_EXACT = 10  # hexadecimal digits: their sum over thousands of ranks is still exact in a float64


@dataclass(slots=True)
class Parity:
    """Told of the engine, of each training forward and each loss. losses: of each optimizer step, the mean of all micro
    batches of all ranks. weights: of the whole model before the first step."""

    ranks: Ranks
    losses: list[float] = field(default_factory=list)
    weights: float | None = None
    _given: Any = field(default_factory=hashlib.sha256)
    _saw: bool = False
    _before: bytes = b""
    _micro: list[float] = field(default_factory=list)

    def began(self, engine: Any) -> None:
        """Take dropout out of the engine's model, and note its weights. Raises Incomparable for layers of experts."""
        if any(is_moe(module) for module in engine.module.modules()):
            raise Incomparable(
                "an expert drops tokens by chance, so two runs never train on the same ones",
                hint="nothing is wrong: compare the loss curves of longer runs",
            )
        without_dropout(engine.module)
        forget_steps(getattr(engine, "basic_optimizer", None))
        self.weights = _sum_of(engine.module, self.ranks)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A training forward begins."""
        for tensor in tensors_in((args, dict(kwargs))):
            self._saw = True
            self._given.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
            self._given.update(_bytes_of(tensor))
        self._before = generators()

    def forwarded(self) -> None:
        """It has ended; the state of the generators counts where it drew from them."""
        if generators() != self._before:
            self._given.update(self._before)

    def lost(self, loss: Any) -> None:
        """The loss of a micro batch; None: it was not seen."""
        if loss is not None:
            self._micro.append(float(loss))

    def stepped(self) -> None:
        """An optimizer step has ended. Every rank has to call."""
        total, count = self.ranks.mean(sum(self._micro)), self.ranks.mean(float(len(self._micro)))
        if count:
            self.losses.append(total / count)
        self._micro = []

    def said(self) -> dict[str, Any]:
        """`outcomes.Trained` as plain values. Every rank has to call."""
        mine = float(int(self._given.hexdigest()[:_EXACT], 16))
        saw = self.ranks.mean(float(self._saw)) == 1
        return {"samples": f"{self.ranks.mean(mine):.6f}" if saw else None, "weights": self.weights}


def _bytes_of(tensor: Any) -> bytes:
    import torch

    plain = tensor.detach().cpu().contiguous()
    data: bytes = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return data


def _sum_of(model: Any, ranks: Ranks) -> float | None:
    """Of the magnitudes of all weights; None where a rank's part lies on NVMe."""
    total = 0.0
    for parameter in model.parameters():
        part = getattr(parameter, "ds_tensor", None)
        if part is None:
            total += _magnitude(parameter) / ranks.world_size  # every rank has it whole
            continue
        if str(getattr(part, "final_location", None)).endswith("nvme"):
            return None
        begin = part.ds_numel * ranks.rank
        total += _magnitude(part[: max(0, parameter.ds_numel - begin)])  # what is beyond is padding
    return ranks.mean(total) * ranks.world_size


def _magnitude(tensor: Any) -> float:
    flat = tensor.detach().reshape(-1)
    return sum(float(chunk.double().abs().sum()) for chunk in flat.split(_CHUNK))
