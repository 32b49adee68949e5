"""Draw the random weights of a large model on all threads.

torch draws on one thread of the CPU, and transformers draws most weights twice: building a model of 0.8 billion
parameters took 9 of the 16 s of a trial on an H200.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .patching import declare

_WHY = "the weights of a Hugging Face config are drawn on all threads"
_PATCHES = (declare("torch.Tensor.normal_", _WHY), declare("torch.Tensor.uniform_", _WHY))
_LEAST = 4 << 20  # smaller tensors are not worth it
_CHUNK = 1 << 20  # values with a generator of their own, so that the number of threads does not change them


@contextlib.contextmanager
def drawing_in_parallel() -> Iterator[None]:
    """Draw large tensors of the CPU in parallel inside the block.

    torch's seed decides the values, which are others than torch would draw.
    """
    with contextlib.ExitStack() as patches:
        for patch in _PATCHES:
            patches.enter_context(patch.installed(_in_parallel(patch.original())))
        yield


def _in_parallel(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def draw(tensor: torch.Tensor, *bounds: float, generator: Any = None, **named: float) -> torch.Tensor:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype == torch.float32
        is_usual = generator is None and tensor.is_cpu and tensor.is_contiguous()
        if not is_plain or not is_usual or tensor.numel() < _LEAST:
            return original(tensor, *bounds, generator=generator, **named)
        seed = int(torch.randint(2**62, ()).item())
        values = tensor.detach().view(-1)

        def draw_chunk(start: int) -> None:
            chunk = values[start : start + _CHUNK]
            original(chunk, *bounds, generator=torch.Generator().manual_seed(seed + start), **named)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(draw_chunk, range(0, len(values), _CHUNK)))  # raises what a thread has raised
        return tensor

    return draw
