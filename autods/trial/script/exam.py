"""The losses of a script's parity trial."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..distributed import Ranks
from ..loss_parity import generator_state, make_comparable
from .data import iter_tensors

_SUMMED_ELEMENTS = 2**20  # at a time: a copy of a whole embedding may not fit
_HASH_DIGITS = 10  # hexadecimal; their sum over thousands of ranks is still exact in a float64


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
        """Make the engine's losses comparable, and note its weights. Raises Incomparable for mixtures of experts."""
        make_comparable(engine)
        self.weights = _sum_magnitudes(engine.module, self.ranks)

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        import torch

        for tensor in iter_tensors((args, kwargs)):
            self._saw_tensors = True
            self._samples.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
            if tensor.numel():
                plain = tensor.detach().cpu().contiguous()
                self._samples.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
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


def _sum_magnitudes(model: Any, ranks: Ranks) -> float | None:
    """The sum over all ranks' parts of the weights; None where a part lies on NVMe."""

    def sum_chunks(tensor: Any) -> float:
        flat = tensor.detach().reshape(-1)
        return sum(float(chunk.double().abs().sum()) for chunk in flat.split(_SUMMED_ELEMENTS))

    total = 0.0
    for parameter in model.parameters():
        part = getattr(parameter, "ds_tensor", None)
        if part is None:
            total += sum_chunks(parameter) / ranks.world_size  # every rank has all of it
            continue
        if str(getattr(part, "final_location", None)).endswith("nvme"):
            return None
        begin = part.ds_numel * ranks.rank
        total += sum_chunks(part[: max(0, parameter.ds_numel - begin)])  # the rest is padding
    return ranks.mean(total) * ranks.world_size
