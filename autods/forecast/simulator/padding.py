"""Whether the batch's attention masks hold padding: models look at their values, which simulated tensors do not have.

transformers leaves a mask of ones out, and attention takes its kernel without a mask; one with a zero in it becomes a
[batch, 1, sequence, sequence] tensor of scores. So the workload's batch is built once more, of real tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...trial.batch import tensors_of
from ...trial.patching import declare

_MOST_BYTES = 64 << 20  # of real tensors
NO_PADDING = (
    "build_batch's {name} holds no padding, so the model attends without a mask; batches with padding take another"
    " kernel of attention and more memory"
)
UNKNOWN = (
    "whether {name} holds padding is not known, because build_batch does not run without the GPU: none was assumed;"
    " with padding the model takes more memory"
)


_IS_FAKE = declare(
    "transformers.utils.import_utils.is_fake_tensor",
    "models that are traced make an explicit mask, and attention then takes another kernel",
)
_FAST_ALL = declare("transformers.masking_utils.fast_all", "it reads a sum, which does not tell the mask it is of")


def install() -> None:
    """Patch transformers in this process, if it is installed: models treat fake tensors like real ones."""
    with contextlib.suppress(ImportError):
        _IS_FAKE.install(lambda tensor: False)
        _FAST_ALL.install(lambda tensor: tensor.all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """What is known of the batch's masks. said: shape → what to tell the user when the model asks about one that was
    taken to be all ones; padded: the shapes of those that are not."""

    padded: frozenset[tuple[int, ...]] = frozenset()
    said: tuple[tuple[tuple[int, ...], str], ...] = ()

    def is_all(self, shape: tuple[int, ...], assume: Callable[[str], None]) -> bool:
        """Whether a tensor of that shape is taken to be all ones (all true, all as usual)."""
        if shape in self.padded:
            return False
        for own, sentence in self.said:
            if own == shape:
                assume(sentence)
        return True


def look(build_batch: Callable[[int], Any], batch: Any) -> Masks:
    """batch: as the simulated engine gets it; another is built of real tensors when it holds a mask."""
    from torch.utils._python_dispatch import _disable_current_modes

    masks = {name: tensor for name, tensor in tensors_of(batch).items() if _is_mask(name, tensor)}
    if not masks:
        return Masks()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch).values())
    rows = next(iter(masks.values())).shape[0]
    rows = max(1, min(rows, rows * _MOST_BYTES // max(1, size)))
    try:
        with _disable_current_modes():
            real = tensors_of(build_batch(rows))
            holds = {name: not bool(real[name].all()) for name in masks}
    except Exception:  # whatever the user's code does where there is no GPU
        holds = {}
    shapes = {name: tuple(mask.shape) for name, mask in masks.items()}
    padded = frozenset(shape for name, shape in shapes.items() if holds.get(name))
    return Masks(
        padded=padded,
        said=tuple(
            (shape, (NO_PADDING if name in holds else UNKNOWN).format(name=name))
            for name, shape in shapes.items()
            if shape not in padded
        ),
    )


def _is_mask(name: str, tensor: Any) -> bool:
    """Of whole tokens, by its name or its type: masks of scores (3 and 4 dimensions) are taken as they are."""
    return (
        tensor.dim() == 2 and not tensor.is_floating_point() and ("mask" in name or str(tensor.dtype) == "torch.bool")
    )
