"""The batches that a script trains on: their size against the config's, the longest of them, tokens of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..batch import tokens_per_sample
from .users import Place, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A DataLoader that the script made: how many samples it gives at a time, if that is fixed, and where."""

    batch_size: int | None
    place: Place | None


@dataclass(slots=True)
class Batches:
    """Told of the arguments of each training forward. longest_shape: of the largest tensor of the longest batch."""

    seen: int = 0
    tokens_per_sample: int | None = None
    longest_shape: tuple[int, ...] = ()
    loaders: list[Loader] = field(default_factory=list)
    _elements: int = 0
    _kept: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def saw(self, given: Sequence[Any], micro_batch: int) -> None:
        """Raises WorkloadError when the first batch does not have the micro batch's size."""
        self.seen += 1
        if self.seen == 1:
            tensors = list(_tensors(given))
            self.tokens_per_sample = tokens_per_sample(tuple(tensors))
            self._check([tuple(tensor.shape) for tensor in tensors], micro_batch)

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember the batch when it is the longest so far."""
        tensors = list(_tensors((*args, *kwargs.values())))
        elements = sum(tensor.numel() for tensor in tensors)
        if tensors and elements > self._elements:
            self._elements, self._kept = elements, (args, dict(kwargs))
            self.longest_shape = tuple(max(tensors, key=lambda tensor: tensor.numel()).shape)

    def evaluate(self, engine: Any) -> float | None:
        """The loss of the longest batch, without a gradient and the engine back in training; where the model returns no
        loss, the mean of the first output, which tells two sets of weights apart as well."""
        import torch

        if self._kept is None:
            return None
        args, kwargs = self._kept
        engine.eval()
        with torch.no_grad():
            out = engine(*args, **kwargs)
        engine.train()
        loss = loss_of(out)
        if loss is not None:
            return float(loss)
        first = next((one for one in _tensors((out,)) if one.is_floating_point()), None)
        return None if first is None else float(first.double().mean())

    def _check(self, shapes: Sequence[tuple[int, ...]], micro_batch: int) -> None:
        sizes = [shape[0] for shape in shapes if shape]
        if not sizes or micro_batch in sizes or any(one.batch_size == micro_batch for one in self.loaders):
            return  # packed or time-first batches are no mistake where a loader has the size
        size = max(set(sizes), key=sizes.count)
        loader = next((one for one in reversed(self.loaders) if one.batch_size == size), None)
        where = loader.place if loader is not None else None
        raise refusal(
            f"its batches hold {size} samples, where the config says {micro_batch} (train_micro_batch_size_per_gpu)",
            at=where,
            mend=_mend(where),
        )


def loss_of(out: Any) -> Any:
    """The scalar loss in what a model returned, or None."""
    import torch

    first = out[0] if isinstance(out, tuple | list) and out else out
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", first)
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _mend(place: Place | None) -> str:
    said = f"`{place.code}` has to" if place and place.code else "let its loader"
    return f"{said} take the size from the command line, given as {{micro_batch_size}} after --"


def _tensors(given: Any) -> Iterator[Any]:
    """All tensors in it, through dicts, tuples and lists."""
    import torch

    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping):
        for one in given.values():
            yield from _tensors(one)
    elif isinstance(given, tuple | list):
        for one in given:
            yield from _tensors(one)
