"""The same samples, weights and loss for two configs of one model, whatever they cut, shard or place.

Sample i of the global batch is `build_batch(1)` under a seed of its own; each rank takes its share of them. Dropout is
off, but the model trains: checkpointing acts in training only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..types import Phase
from ..workload.protocol import Workload, WorkloadError
from .batch import check_batch, named_tensors, seed_all
from .distributed import Ranks
from .model_facts import is_moe

_SAMPLE_SEEDS = 2**24  # apart from each other for every seed of a trial
_STEADY = 1e-3  # relative: far below what a mask or noise does to a loss, above what kernels do to the order of sums


class Incomparable(WorkloadError):
    """The losses of two configs of this workload say nothing of each other. No fault of the code."""


def draw_share(workload: Workload, ranks: Ranks, *, micro_batch: int, accumulation: int, seed: int) -> list[Any]:
    """The rank's micro batches of one optimizer step. Raises Incomparable where they cannot be cut from samples."""
    mine = micro_batch * accumulation
    first = ranks.rank * mine
    samples = [_sample(workload, seed, first + i) for i in range(mine)]
    if not _same(samples[0], _sample(workload, seed, first)):
        raise Incomparable(
            "build_batch makes another sample under the same seed, so two configs never train on the same data",
            hint="draw from the global generators of random, torch or numpy",
        )
    # All of them, so that every config of the workload is refused alike.
    whole = [_joined(samples[i : i + micro_batch]) for i in range(0, mine, micro_batch)]
    _joined(samples)
    return whole


def _sample(workload: Workload, seed: int, index: int) -> Any:
    seed_all(seed * _SAMPLE_SEEDS + index)
    return check_batch(workload.build_batch(1), 1)


def _items(batch: Any) -> dict[Any, Any]:
    return dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))


def _same(one: Any, other: Any) -> bool:
    mine, theirs = _items(one), _items(other)
    return mine.keys() == theirs.keys() and all(_equal(mine[key], theirs[key]) for key in mine)


def _equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, Mapping | tuple | list) and isinstance(other, Mapping | tuple | list):
        return _same(one, other)
    return bool(one == other)


def _joined(samples: Sequence[Any]) -> Any:
    first = samples[0]
    rows = [_items(sample) for sample in samples]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise Incomparable("samples of build_batch differ in their names, so they make no common micro batch")
    whole = {key: _stacked(key, [row[key] for row in rows]) for key in rows[0]}
    return whole if isinstance(first, Mapping) else tuple(whole.values())


def _stacked(name: Any, values: Sequence[Any]) -> Any:
    """Along the first dimension; what has none, or is no tensor, has to be the same in all samples."""
    import torch

    if isinstance(values[0], torch.Tensor) and values[0].dim():
        shapes = dict.fromkeys(tuple(value.shape[1:]) for value in values)
        if len(shapes) > 1:
            said = " and ".join(str(shape) for shape in list(shapes)[:2])
            raise Incomparable(
                f"samples of build_batch differ in shape ({name!r}: {said}), so micro batches of different sizes"
                " cannot hold the same data",
                hint="pad every sample to one length",
            )
        return torch.cat(list(values))
    if isinstance(values[0], Mapping | tuple | list) and named_tensors(values[0]):
        inner = [_items(value) for value in values]
        if any(one.keys() != inner[0].keys() for one in inner):
            raise Incomparable(f"samples of build_batch differ in the names in {name!r}")
        whole = {key: _stacked(f"{name}.{key}", [one[key] for one in inner]) for key in inner[0]}
        return whole if isinstance(values[0], Mapping) else tuple(whole.values())
    if not all(_equal(values[0], value) for value in values):
        raise Incomparable(f"samples of build_batch differ in {name!r}, which has no dimension to join them along")
    return values[0]


def check_comparable(model: Any) -> None:
    """Raises Incomparable where the loss depends on how the global batch is cut into micro batches."""
    if any(is_moe(module) for module in model.modules()):
        raise Incomparable(
            "an expert takes its share of each micro batch's tokens and drops the rest, so two configs that cut the"
            " batch differently train on different tokens",
            hint="nothing is wrong: compare the loss curves of longer runs",
        )


def turn_off_dropout(model: Any) -> None:
    """Every rate of a module, or of a config that it holds, whose name speaks of dropping becomes 0."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, float) and "drop" in name.lower():
                    with contextlib.suppress(AttributeError):  # a frozen config: the modules hold the rates
                        setattr(holder, name, 0.0)


def reset_step_counts(optimizer: Any) -> None:
    """Let the optimizer count its steps from 0, as after `torch.optim.AdamW(…)`.

    DeepSpeed's stage 0 in bf16 and fp16 makes the states by a step without gradients, which Adam's bias correction
    counts (FP16_UnfusedOptimizer.initialize_optimizer_states): its first real update is 0.74 of ZeRO's.
    """
    import torch

    for counted in (*getattr(optimizer, "state", {}).values(), *getattr(optimizer, "param_groups", ())):
        step = counted.get("step") if isinstance(counted, dict) else None
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif isinstance(step, int):
            counted["step"] = 0


class RandomnessWatch:
    """An observer that notes whether a forward drew random numbers."""

    def __init__(self, observe: Callable[[Phase, int], None]) -> None:
        self.drew = False
        self._observe, self._before = observe, b""

    def __call__(self, phase: Phase, step: int) -> None:
        if phase == "forward":
            self._before = generator_state()
        elif phase == "backward":
            self.drew = self.drew or self._before != generator_state()
        self._observe(phase, step)


def generator_state() -> bytes:
    """The state of torch's generators."""
    import torch

    state: bytes = torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state += torch.cuda.get_rng_state().numpy().tobytes()
    return state


def check_deterministic(drew: bool, forward: Callable[[], float | None], ranks: Ranks) -> None:
    """Raises Incomparable when random numbers that were drawn change the loss: masks, noise, samples of a latent.

    forward: the loss of one micro batch in training, without its gradient. Every rank has to call.
    """
    if not ranks.mean(float(drew)):
        return
    losses = []
    for seed in (1, 2):
        seed_all(seed)
        losses.append(forward() or 0.0)
    difference = ranks.mean(abs(losses[0] - losses[1]) / max(abs(losses[0]), 1e-12))
    if difference > _STEADY:
        raise Incomparable(
            f"the model draws random numbers in forward that change its loss (by {difference:.1%} on the same batch)",
            hint="it is not dropout, which was off",
        )


def mean_loss(losses: Sequence[float], ranks: Ranks) -> float:
    """The loss of the global batch: of all micro batches of all ranks."""
    return ranks.mean(sum(losses) / len(losses))
