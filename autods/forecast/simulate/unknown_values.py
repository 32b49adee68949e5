"""Values that simulated tensors lack: the padding of a batch, the tokens of experts, the end of a generated text."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...rank.model_facts import named_tensors
from ...rank.patching import declare, when_imported

# Padding. transformers leaves out a mask of ones, and attention takes its kernel without a mask. A mask with a zero
# becomes a [batch, 1, sequence, sequence] tensor of scores. So the workload's batch is built a second time, of real
# tensors.

_MOST_BYTES = 64 << 20  # of real tensors
NO_PADDING = (
    "build_batch's {name} holds no padding, so the model attends without a mask; batches with padding take another"
    " kernel of attention and more memory"
)
UNKNOWN = (
    "whether {name} holds padding is not known, because build_batch does not run without the GPU: none was assumed;"
    " with padding the model takes more memory"
)
UPPER_BOUND = (
    "these activations and times are upper bounds: no rung is said not to fit because of them, and no step takes a"
    " least time"
)

_IS_FAKE = declare(
    "transformers.utils.import_utils.is_fake_tensor",
    "models that are traced make an explicit mask, and attention then takes another kernel",
)
_FAST_ALL = declare(
    "transformers.masking_utils.fast_all", "it reads a sum, which does not tell the mask it is of", optional=True
)


_STOPS = declare("transformers.generation.StoppingCriteriaList.__call__", "no token is known that ends a generation")
_UNFINISHED = declare(
    "transformers.generation.GenerationMixin._has_unfinished_sequences", "a generation ends at its longest text"
)


def install(assume: Callable[[str], None]) -> None:
    """Patch transformers in this process, if it is ever imported: models treat fake tensors like real ones.

    `assume` gets a sentence for the user where a model generates.
    """
    when_imported("transformers.utils.import_utils", lambda: _IS_FAKE.install(lambda tensor: False))
    when_imported("transformers.masking_utils", lambda: _FAST_ALL.install(lambda tensor: tensor.all()))
    when_imported("transformers.generation.utils", lambda: _end_generations(assume))


def _end_generations(assume: Callable[[str], None]) -> None:
    """Let `generate` end when it has as many tokens as it may have."""
    is_full = False  # of the loop in work; that of an assistant's model runs inside of another

    def note_length(original: Any, criteria: Any, /, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_full
        is_full = criteria.max_length is not None and tokens.shape[-1] >= criteria.max_length
        return original(criteria, tokens, *args, **kwargs)

    def go_on(original: Any, /, *args: Any, **kwargs: Any) -> bool:
        nonlocal is_full
        if is_full:
            is_full = False
            assume("generated texts were taken to be as long as they may be (max_new_tokens)")
            return False
        return bool(original(*args, **kwargs))

    _STOPS.wrap(note_length)
    _UNFINISHED.wrap(go_on)


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The shapes of the batch's masks. `padded` ones hold padding.

    The others count as all ones, with a sentence for the user if the model asks for their values.
    """

    padded: frozenset[tuple[int, ...]] = frozenset()
    assumptions: tuple[tuple[tuple[int, ...], str], ...] = ()


def inspect_masks(build_batch: Callable[[int], Any], batch: Any) -> Masks:
    """The masks of the simulated engine's batch; if it has any, their values come from a batch of real tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    tensors = named_tensors(batch)
    # Masks of whole tokens; masks of scores (3 and 4 dimensions) are taken as they are.
    masks = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.dim() == 2
        and not tensor.is_floating_point()
        and ("mask" in name or str(tensor.dtype) == "torch.bool")
    }
    if not masks:
        return Masks()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    rows = next(iter(masks.values())).shape[0]
    rows = max(1, min(rows, rows * _MOST_BYTES // max(1, size)))
    try:
        with _disable_current_modes():
            real = named_tensors(build_batch(rows))
            has_padding = {name: not bool(real[name].all()) for name in masks}
    except Exception:  # user code that needs the GPU raises anything
        has_padding = {}
    shapes = {name: tuple(mask.shape) for name, mask in masks.items()}
    padded = frozenset(shape for name, shape in shapes.items() if has_padding.get(name))
    return Masks(
        padded=padded,
        assumptions=tuple(
            (shape, (NO_PADDING if name in has_padding else UNKNOWN).format(name=name))
            for name, shape in shapes.items()
            if shape not in padded
        ),
    )


@dataclass(slots=True)
class _Mask:
    """A one-hot mask that lives. `left` choices have not been given out; a slice has at most `tokens` of them."""

    storage: weakref.ref[Any]
    tokens: int
    left: int


class Choices:
    """The one-hot masks of a simulation, by their storage: how many tokens experts get.

    A router makes a one-hot mask of the experts that each token has chosen, and asks for the tokens of one expert after
    another (`torch.where(mask[expert])`). Together the experts get as many tokens as there are choices. The first ones
    are taken to get all tokens until none are left, which is the largest that any routing needs at a time.
    """

    def __init__(self) -> None:
        self._masks: dict[int, _Mask] = {}

    def note(self, mask: Any, chosen: Any) -> None:
        """Note the one-hot mask of `chosen`, whose last dimension has the choices of one token; of one it is a list."""
        storage = mask.untyped_storage()
        tokens = chosen.numel() if chosen.dim() < 2 else chosen.numel() // max(1, chosen.shape[-1])
        self._masks[storage._cdata] = _Mask(storage=weakref.ref(storage), tokens=tokens, left=chosen.numel())

    def take(self, slice_of_mask: Any) -> int | None:
        """Return how many ones a slice of a mask has, and take them off; None for other tensors."""
        storage = slice_of_mask.untyped_storage()
        mask = self._masks.get(storage._cdata)
        if mask is None:
            return None
        if mask.storage() is not storage:  # another storage has the address by now
            del self._masks[storage._cdata]
            return None
        count = min(mask.left, mask.tokens, slice_of_mask.numel())
        mask.left -= count
        return int(count)
