"""The batches that a script trains on: their size, the longest of them, the tokens of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...system.stacks import Frame, find_caller
from ..model_facts import seed_all, text_shapes
from ..patching import declare
from .user_errors import script_error

_LOADER = declare(
    "torch.utils.data.DataLoader.__init__", "the line that makes a loader is named when its size is wrong"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A DataLoader that the script made; `batch_size` is None where it varies."""

    batch_size: int | None
    place: Frame | None


@dataclass(slots=True)
class Batches:
    """The arguments of a script's training forwards.

    `longest_shape` is the shape of the largest tensor in the longest batch. `forward` takes the arguments of a forward
    where a library calls the engine in another way; None: the engine takes them. `tokens` counts those of all forwards
    of the `whole_steps`, whose batches have all their samples: a model may get each text of a pair in a forward of its
    own.
    """

    forward: Callable[..., Any] | None = None
    seen: int = 0
    tokens: int = 0
    whole_steps: int = 0
    longest_shape: tuple[int, ...] = ()
    loaders: list[Loader] = field(default_factory=list)
    _step_tokens: int = 0
    _first_sizes: set[int] = field(default_factory=set)
    _longest_elements: int = 0
    _longest: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def watch_loaders(self) -> None:
        """Note each DataLoader that is made from now on."""

        def init(original: Any, loader: Any, /, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            self.loaders.append(Loader(batch_size=size, place=find_caller()))

        _LOADER.wrap(init)

    def check(
        self, arguments: Sequence[Any], micro_batch: int, *, shifts_labels: bool = False, takes_size: bool = True
    ) -> bool:
        """Whether a forward's arguments are a whole micro batch; the rest at the end of the data is not.

        Raises WorkloadError when the first batch has another size already. `takes_size`: the script's command line has
        the size. See `text_shapes` for `shifts_labels`.
        """
        self.seen += 1
        self._step_tokens += sum(rows * tokens for rows, tokens in text_shapes(arguments, shifts_labels=shifts_labels))
        shapes = [tuple(tensor.shape) for tensor in iter_tensors(arguments) if tensor.dim()]
        if self.seen == 1:
            self._check_first(shapes, micro_batch, takes_size=takes_size)
            self._first_sizes = {shape[0] for shape in shapes}
        if not shapes or micro_batch not in self._first_sizes:
            return True  # samples are packed, or are not the first dimension
        return any(shape[0] == micro_batch for shape in shapes)

    def end_step(self, *, is_whole: bool) -> None:
        """An optimizer step has ended: count its tokens, if its batches had all their samples."""
        if is_whole:
            self.tokens += self._step_tokens
            self.whole_steps += 1
        self._step_tokens = 0

    def _check_first(self, shapes: Sequence[tuple[int, ...]], micro_batch: int, *, takes_size: bool) -> None:
        sizes = [shape[0] for shape in shapes]
        if not sizes or micro_batch in sizes:
            return
        size = max(set(sizes), key=sizes.count)
        # The first loader with one of these sizes: a library may have made another of it, as accelerate's `prepare`.
        loader = next((loader for loader in self.loaders if loader.batch_size in (micro_batch, *sizes)), None)
        place = None if loader is None else loader.place
        if loader is None or loader.batch_size != micro_batch:
            subject = f"`{place.code}` has to" if place and place.code else "let its loader"
            error = script_error(
                f"its batches hold {size} samples, where the config says {micro_batch} "
                "(train_micro_batch_size_per_gpu)",
                at=place,
                hint=f"{subject} take the size from the command line, given as {{micro_batch_size}} after --; "
                f"`autods plan --micro-batch {size}` forecasts it as it is",
            )
            error.own_batch = None if takes_size else size
            raise error
        # The loader has the right size. Packed samples are one long row, and some models put time before the batch.
        if 1 < size < micro_batch and not any(micro_batch in shape[1:2] for shape in shapes):
            problem = f"its data ends before a micro batch of {micro_batch} is full: it holds {size} samples"
            raise script_error(problem, at=place, hint="give it more data")

    def keep_longest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the batch if it is the longest so far, without the graph that computed its tensors."""
        import torch
        from torch.utils._pytree import tree_map_only

        tensors = list(iter_tensors((args, kwargs)))
        elements = sum(tensor.numel() for tensor in tensors)
        if tensors and elements > self._longest_elements:
            self._longest = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, dict(kwargs)))
            self._longest_elements = elements
            self.longest_shape = tuple(max(tensors, key=lambda tensor: tensor.numel()).shape)

    def evaluate(self, engine: Any) -> float | None:
        """The loss of the longest batch in evaluation; the engine is in training mode afterwards.

        Where the model returns no loss, the mean of its first output, which also differs between two sets of weights.
        """
        import torch

        if self._longest is None:
            return None
        args, kwargs = self._longest
        seed_all(0)  # mixture-of-experts layers choose tokens at random in evaluation too
        engine.eval()
        with torch.no_grad():
            output = (self.forward or engine)(*args, **kwargs)
        engine.train()
        if (loss := find_loss(output)) is not None:
            return float(loss)
        first = next((tensor for tensor in iter_tensors(output) if tensor.is_floating_point()), None)
        return None if first is None else float(first.double().mean())


def find_loss(output: Any) -> Any:
    """The scalar loss tensor in a model's output, or None."""
    import torch

    first = output[0] if isinstance(output, tuple | list) and output else output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", first)
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def iter_tensors(value: Any) -> Iterator[Any]:
    """All tensors in a value, through dicts, tuples and lists."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from iter_tensors(item)
