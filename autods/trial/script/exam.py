"""Exams of a script: the worst case of a winner, and the losses of a parity trial."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...types import Examined
from .. import exam
from ..distributed import Ranks
from ..job import RankJob
from ..loss_parity import Incomparable, generator_state, reset_step_counts, turn_off_dropout
from ..model_facts import LongestBatch, is_moe
from .data import Batches, iter_tensors

_NO_COMMUNICATION = (
    "the longest batch, evaluation and the checkpoint were not checked: the script ended its process group"
)
_NO_TENSORS = "evaluation was not run and the loaded checkpoint not compared: the engine was given no tensors to repeat"
_NO_STEP = "the script ended before a step was trained between saving and loading its checkpoint"
_SUMMED_ELEMENTS = 2**20  # at a time: a copy of a whole embedding may not fit
_HASH_DIGITS = 10  # hexadecimal; their sum over thousands of ranks is still exact in a float64


@dataclass(slots=True)
class WorstCaseExam:
    """The exam of a winner, with the script's own optimizer steps between its parts.

    `first_step` is the index of the next step. `examined` is `types.Examined` of this rank as a dict, after the end.
    """

    job: RankJob
    engine: Any
    batches: Batches
    observer: Any
    ranks: Ranks
    first_step: int
    examined: dict[str, Any] | None = None
    _skipped: tuple[str, ...] = ()
    _parts: Generator[int, None, dict[str, Any]] | None = field(default=None)

    def advance(self) -> bool:
        """Run the next part, after a step of the script. False after the last part."""
        self._parts = self._parts or self._begin()
        try:
            next(self._parts)
        except StopIteration as end:
            self.examined = self._add_skipped(end.value)
        return self.examined is None

    def finish_without_steps(self) -> None:
        """Run the remaining parts after the script has ended, while the ranks can still communicate."""
        import torch

        self._skipped = (_NO_STEP, *self._skipped)
        while self.examined is None and torch.distributed.is_initialized():
            self.advance()
        if self.examined is None:
            self.examined = asdict(Examined(batch_shape=(), draws=0, left_out=(_NO_COMMUNICATION,)))

    def _begin(self) -> Generator[int, None, dict[str, Any]]:
        ops = exam.EngineOps(
            step=lambda index: None,  # the script itself steps
            evaluate=lambda: self.batches.evaluate(self.engine),
            observe=self.observer,
            synchronize=self.observer.meter.synchronize,
        )
        longest = LongestBatch(batch=None, shape=self.batches.longest_shape, draws=self.batches.seen)
        folder = Path(self.job.checkpoints or self.job.scratch) / "checkpoint"
        return exam.exam_parts(self.engine, ops, self.ranks, longest=longest, folder=folder, index=self.first_step)

    def _add_skipped(self, examined: dict[str, Any]) -> dict[str, Any]:
        """The exam cannot know that no batch was seen, and so none was evaluated."""
        if self.batches.longest_shape:
            return {**examined, "left_out": (*examined["left_out"], *self._skipped)}
        return {**examined, "evaluated": False, "restored": None, "left_out": (_NO_TENSORS, *self._skipped)}


@dataclass(slots=True)
class LossRecorder:
    """Records the samples and losses of a parity trial, so that the trials of two configs can be compared.

    `losses` has the mean over all micro batches of all ranks for each optimizer step. `weights` is the sum of the
    magnitudes of the whole model's weights before the first step; None where a part of them lies on NVMe.
    """

    ranks: Ranks
    losses: list[float] = field(default_factory=list)
    weights: float | None = None
    _samples: Any = field(default_factory=hashlib.sha256)
    _saw_tensors: bool = False
    _generators: bytes = b""
    _step_losses: list[float] = field(default_factory=list)

    def start(self, engine: Any) -> None:
        """Turn dropout off in the engine's model, and note its weights. Raises Incomparable for mixtures of experts."""
        if any(is_moe(module) for module in engine.module.modules()):
            raise Incomparable(
                "an expert drops tokens at random, so two runs never train on the same ones",
                hint="nothing is wrong: compare the loss curves of longer runs",
            )
        turn_off_dropout(engine.module)
        reset_step_counts(getattr(engine, "basic_optimizer", None))
        self.weights = _sum_magnitudes(engine.module, self.ranks)

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A training forward begins."""
        for tensor in iter_tensors((args, dict(kwargs))):
            self._saw_tensors = True
            self._samples.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
            self._samples.update(_bytes_of(tensor))
        self._generators = generator_state()

    def end_forward(self) -> None:
        """A training forward has ended. If it drew random numbers, the generators' state is part of the samples."""
        if generator_state() != self._generators:
            self._samples.update(self._generators)

    def add_loss(self, loss: Any) -> None:
        """The loss of a micro batch; None if it is not known."""
        if loss is not None:
            self._step_losses.append(float(loss))

    def end_step(self) -> None:
        """An optimizer step has ended. Every rank has to call this."""
        total, count = self.ranks.mean(sum(self._step_losses)), self.ranks.mean(float(len(self._step_losses)))
        if count:
            self.losses.append(total / count)
        self._step_losses = []

    def describe(self) -> dict[str, Any]:
        """`types.Trained` as a dict. Every rank has to call this."""
        number = float(int(self._samples.hexdigest()[:_HASH_DIGITS], 16))
        all_saw = self.ranks.mean(float(self._saw_tensors)) == 1
        return {"samples": f"{self.ranks.mean(number):.6f}" if all_saw else None, "weights": self.weights}


def _bytes_of(tensor: Any) -> bytes:
    import torch

    plain = tensor.detach().cpu().contiguous()
    data: bytes = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return data


def _sum_magnitudes(model: Any, ranks: Ranks) -> float | None:
    """The sum over all ranks' parts of the weights; None where a part lies on NVMe."""
    total = 0.0
    for parameter in model.parameters():
        part = getattr(parameter, "ds_tensor", None)
        if part is None:
            total += _sum_chunks(parameter) / ranks.world_size  # every rank has all of it
            continue
        if str(getattr(part, "final_location", None)).endswith("nvme"):
            return None
        begin = part.ds_numel * ranks.rank
        total += _sum_chunks(part[: max(0, parameter.ds_numel - begin)])  # the rest is padding
    return ranks.mean(total) * ranks.world_size


def _sum_chunks(tensor: Any) -> float:
    flat = tensor.detach().reshape(-1)
    return sum(float(chunk.double().abs().sum()) for chunk in flat.split(_SUMMED_ELEMENTS))
