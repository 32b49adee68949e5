"""The batches that a script trains on: their size against the config's, the longest of them, tokens of a sample."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..batch import seed_all, tokens_per_sample
from .callsite import Place, caller, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A DataLoader that the script made: how many samples it gives at a time, if that is fixed, and where. own: by the
    script's own call; a library makes another of it, in accelerate's `prepare` say."""

    batch_size: int | None
    place: Place | None
    own: bool = True


@dataclass(slots=True)
class Batches:
    """Told of the arguments of each training forward. longest_shape: of the largest tensor of the longest batch. call:
    how a forward is asked for again, of the engine, the arguments and the keywords."""

    call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] = lambda engine, args, kwargs: engine(*args, **kwargs)
    seen: int = 0
    tokens_per_sample: int | None = None
    longest_shape: tuple[int, ...] = ()
    loaders: list[Loader] = field(default_factory=list)
    _first: set[int] = field(default_factory=set)
    _elements: int = 0
    _kept: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def watch_loaders(self) -> None:
        """Note every DataLoader that is made from here on."""
        from torch.utils.data import DataLoader

        real = DataLoader.__init__

        @functools.wraps(real)
        def made(loader: Any, *args: Any, **kwargs: Any) -> None:
            real(loader, *args, **kwargs)
            size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            place, line = caller(), sys._getframe(1)
            own = place is not None and (place.file, place.line) == (line.f_code.co_filename, line.f_lineno)
            self.loaders.append(Loader(batch_size=size, place=place, own=own))

        setattr(DataLoader, "__init__", made)  # noqa: B010

    def saw(self, given: Sequence[Any], micro_batch: int) -> bool:
        """Whether it is a whole micro batch: what is left at the end of the data is not. Raises WorkloadError when the
        first batch already has another size."""
        self.seen += 1
        tensors = list(tensors_in(given))
        shapes = [tuple(tensor.shape) for tensor in tensors if tensor.dim()]
        if self.seen == 1:
            self.tokens_per_sample = tokens_per_sample(tuple(tensors))
            self._check(shapes, micro_batch)
            self._first = {shape[0] for shape in shapes}
        if not shapes or micro_batch not in self._first:
            return True  # samples are packed, or do not come first
        return any(shape[0] == micro_batch for shape in shapes)

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember the batch when it is the longest so far."""
        tensors = list(tensors_in((*args, *kwargs.values())))
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
        seed_all(0)  # layers of experts choose tokens at random in evaluation, too: the same ones each time
        engine.eval()
        with torch.no_grad():
            out = self.call(engine, args, kwargs)
        engine.train()
        loss = loss_of(out)
        if loss is not None:
            return float(loss)
        first = next((one for one in tensors_in((out,)) if one.is_floating_point()), None)
        return None if first is None else float(first.double().mean())

    def _check(self, shapes: Sequence[tuple[int, ...]], micro_batch: int) -> None:
        sizes = [shape[0] for shape in shapes]
        fitting = [one for one in reversed(self.loaders) if one.batch_size in (micro_batch, *sizes)]
        loader = next((one for one in fitting if one.own), next(iter(fitting), None))
        if not sizes or micro_batch in sizes:
            return
        size = max(set(sizes), key=sizes.count)
        if loader is None or loader.batch_size != micro_batch:
            raise refusal(
                f"its batches hold {size} samples, where the config says {micro_batch} "
                "(train_micro_batch_size_per_gpu)",
                at=None if loader is None else loader.place,
                hint=_mend(None if loader is None else loader.place),
            )
        # The loader has the size. Packed samples are one long row, and some models take time before the batch.
        if 1 < size < micro_batch and not any(micro_batch in shape[1:2] for shape in shapes):
            raise refusal(
                f"its data ends before a micro batch of {micro_batch} is full: it holds {size} samples",
                at=loader.place,
                hint="give it more data",
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


def tensors_in(given: Any) -> Iterator[Any]:
    """All tensors in it, through dicts, tuples and lists."""
    import torch

    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping):
        for one in given.values():
            yield from tensors_in(one)
    elif isinstance(given, tuple | list):
        for one in given:
            yield from tensors_in(one)
