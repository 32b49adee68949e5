"""The protocol that every kind of workload is brought to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    import torch

Batch = Mapping[str, Any] | Sequence[Any]


class WorkloadError(InputError):
    """The user's code does not keep the contract of `Workload`. Raised in a rank; it crosses to the driver as text."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the batch it is trained on.

    build_model() -> nn.Module; its forward returns a scalar loss, or an object or dict with `.loss`.
    build_batch(micro_batch_size) -> dict (passed as keywords) or tuple (passed in order) of CPU tensors of the worst
        shape, the first dimension of each being micro_batch_size.
    build_longest_batch(micro_batch_size) -> the largest batch that training can meet, where build_batch draws its
        shapes at random.
    build_optimizer(parameters) -> torch.optim.Optimizer, if the DeepSpeed config shall not name one.
    loss(model, batch) -> scalar tensor, if forward does not return it.
    deepspeed_config: the base config that the workload brings, read by the driver; `--base-config` wins.
    """

    build_model: Callable[[], torch.nn.Module]
    build_batch: Callable[[int], Batch]
    build_optimizer: Callable[[Any], Any] | None = None
    loss: Callable[[Any, Batch], Any] | None = None
    deepspeed_config: Mapping[str, Any] | None = None
    build_longest_batch: Callable[[int], Batch] | None = None
