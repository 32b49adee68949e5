"""The order of a run's samples: the same for every micro batch, accumulation and number of ranks.

The samples are one endless stream. Each epoch is a permutation of the dataset, drawn from the run's seed and the
epoch's number alone. Optimizer step s trains on positions [s·G, (s+1)·G) of the stream, where G is the global batch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...workload.protocol import WorkloadError

_WORD = 2**32


@dataclass(slots=True)
class SampleOrder:
    """The stream of samples of a dataset with `count` samples. `shuffle` False keeps the dataset's order."""

    count: int
    seed: int
    shuffle: bool = True
    _permutations: dict[int, Any] = field(default_factory=dict)  # of the last two epochs

    def __post_init__(self) -> None:
        if self.count < 1:
            raise WorkloadError("the dataset has no samples", hint="check its path and its filters")

    def ids(self, first: int, last: int) -> Any:
        """Return the samples at the positions [first, last) of the stream in an array; at least one."""
        import numpy

        parts = []
        while first < last:
            epoch, offset = divmod(first, self.count)
            size = min(last - first, self.count - offset)
            if self.shuffle:
                parts.append(self._permutation(epoch)[offset : offset + size])
            else:
                parts.append(numpy.arange(offset, offset + size))
            first += size
        return numpy.concatenate(parts) if len(parts) > 1 else parts[0]

    def _permutation(self, epoch: int) -> Any:
        """The samples of an epoch. numpy keeps the stream of RandomState the same in all releases."""
        if epoch not in self._permutations:
            import numpy

            words = [self.seed // _WORD % _WORD, self.seed % _WORD, epoch // _WORD, epoch % _WORD]
            self._permutations = dict(list(self._permutations.items())[-1:])
            self._permutations[epoch] = numpy.random.RandomState(words).permutation(self.count)
        return self._permutations[epoch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of each global batch that one rank trains on, in micro batches."""

    rank: int  # among the replicas
    replicas: int
    micro_batch: int
    accumulation: int

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step on all ranks."""
        return self.micro_batch * self.accumulation * self.replicas

    def spans(self, step: int) -> list[tuple[int, int]]:
        """Return the positions [first, last) of this rank's micro batches in an optimizer step."""
        begin = step * self.global_batch
        starts = (begin + (index * self.replicas + self.rank) * self.micro_batch for index in range(self.accumulation))
        return [(start, start + self.micro_batch) for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampler:
    """A batch sampler for torch's DataLoader: a rank's micro batches from the optimizer step `first_step` on.

    It ends before the step `end_step`; None: never.
    """

    order: SampleOrder
    share: Share
    first_step: int = 0
    end_step: int | None = None

    def __iter__(self) -> Iterator[list[int]]:
        steps = itertools.count(self.first_step) if self.end_step is None else range(self.first_step, self.end_step)
        for step in steps:
            for first, last in self.share.spans(step):
                yield self.order.ids(first, last).tolist()

    def __len__(self) -> int:
        if self.end_step is None:
            raise TypeError("a run without a number of steps has no number of batches")
        return max(0, self.end_step - self.first_step) * self.share.accumulation


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


def deal_stream(samples: Iterable[Any], share: Share, first_step: int) -> Iterator[list[Any]]:
    """Yield a rank's micro batches of a dataset that can only be read in order.

    Each rank reads every sample and keeps its share; samples before `first_step` are read and dropped. At its end the
    dataset is read again. Raises WorkloadError for a dataset that yields nothing.
    """
    stream = _repeat(samples)
    _drop(stream, first_step * share.global_batch)
    position = first_step * share.global_batch
    for step in itertools.count(first_step):
        for first, last in share.spans(step):
            _drop(stream, first - position)
            yield list(itertools.islice(stream, last - first))
            position = last
        end = (step + 1) * share.global_batch
        _drop(stream, end - position)
        position = end


def _repeat(samples: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for sample in samples:
            empty = False
            yield sample
        if empty:
            raise WorkloadError(
                "the dataset yields no samples", hint="an iterator that is read once cannot be repeated"
            )


def _drop(stream: Iterator[Any], count: int) -> None:
    next(itertools.islice(stream, count, count), None)


def digest_ids(ids: Sequence[Any]) -> str:
    """Return a digest of a set of samples, an array or other sequence, whatever their order."""
    import numpy

    array = numpy.sort(numpy.asarray(ids))
    is_number = array.dtype.kind in "iu"
    content = array.astype("<i8").tobytes() if is_number else " ".join(map(str, array)).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def derive_seed(*numbers: int) -> int:
    """Return a seed of 32 bits made from some numbers, the same in every process and release."""
    return int(hashlib.sha256(" ".join(map(str, numbers)).encode()).hexdigest()[:8], 16)
