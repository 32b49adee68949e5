"""The order of a run's samples: the same for every micro batch, accumulation and number of ranks.

The samples are one endless stream. Each epoch is a permutation of the dataset, drawn from the run's seed and the
epoch's number alone. Optimizer step s trains on positions [s·G, (s+1)·G) of the stream, where G is the global batch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...workload.protocol import WorkloadError

_WORD = 2**32


@dataclass(slots=True)
class SampleOrder:
    """The stream of samples of a dataset with `count` samples. `shuffle` False keeps the dataset's order."""

    count: int
    seed: int
    shuffle: bool = True

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
                parts.append(_draw_permutation(self.count, self.seed, epoch)[offset : offset + size])
            else:
                parts.append(numpy.arange(offset, offset + size))
            first += size
        return numpy.concatenate(parts) if len(parts) > 1 else parts[0]


@functools.lru_cache(maxsize=1)
def _draw_permutation(count: int, seed: int, epoch: int) -> Any:
    """The samples of an epoch. numpy keeps the stream of RandomState the same in all releases."""
    import numpy

    words = [seed // _WORD % _WORD, seed % _WORD, epoch // _WORD, epoch % _WORD]
    return numpy.random.RandomState(words).permutation(count)


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


def deal_samples(order: SampleOrder, share: Share, first_step: int, end_step: int | None) -> Iterator[list[int]]:
    """Yield a rank's micro batches from one optimizer step on, before another; None: without end."""
    for step in itertools.count(first_step) if end_step is None else range(first_step, end_step):
        for first, last in share.spans(step):
            yield order.ids(first, last).tolist()


class WholeSteps:
    """A sampler with whole global batches in each epoch: filled up from its begin, or cut where the last is dropped.

    Otherwise micro batch and accumulation would decide what the last step of an epoch gets, and how many steps it has.
    `sampler` yields the same samples in each epoch of any attempt: its generator is seeded with `seed` and the epoch.
    """

    def __init__(self, sampler: Any, *, global_batch: int, drop_last: bool, seed: int) -> None:
        self.sampler, self.global_batch, self.drop_last, self.seed = sampler, global_batch, drop_last, seed

    def __len__(self) -> int:
        count, rest = divmod(len(self.sampler), self.global_batch)
        return (count + (rest > 0 and not self.drop_last)) * self.global_batch

    def __iter__(self) -> Iterator[Any]:
        ids = list(self.sampler)
        size = len(self)
        while 0 < len(ids) < size:
            ids += ids[: size - len(ids)]
        return iter(ids[:size])

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        elif hasattr(self.sampler, "generator"):
            import torch

            if self.sampler.generator is None:
                self.sampler.generator = torch.Generator()
            self.sampler.generator.manual_seed(self.seed + epoch)


def deal_stream(
    samples: Iterable[Any], share: Share, first_step: int, note_dropped: Callable[[int], None] = lambda dropped: None
) -> Iterator[list[Any]]:
    """Yield a rank's micro batches of a dataset that can only be read in order.

    Each rank reads every sample and keeps its share; samples before `first_step` are read and dropped. `note_dropped`
    is called for each of these with their number so far. At its end the dataset is read again. Raises WorkloadError for
    a dataset that yields nothing.
    """
    stream, position = _repeat(samples), first_step * share.global_batch
    for dropped, _ in enumerate(itertools.islice(stream, position), 1):
        note_dropped(dropped)
    for step in itertools.count(first_step):
        for first, last in share.spans(step):
            next(itertools.islice(stream, first - position, first - position), None)  # those of other ranks
            yield list(itertools.islice(stream, last - first))
            position = last


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


def derive_seed(*numbers: int) -> int:
    """Return a seed of 32 bits made from some numbers, the same in every process and release."""
    return int(hashlib.sha256(" ".join(map(str, numbers)).encode()).hexdigest()[:8], 16)
