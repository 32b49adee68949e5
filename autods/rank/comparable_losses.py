"""Make the losses of two configs comparable: the same samples and weights, however a config cuts or shards them.

Sample i of the global batch is `build_batch(1)` under a seed for i; each rank takes its share. Dropout is off, but the
model is in training mode, because checkpointing acts in training only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..types import Phase
from ..workload.protocol import Workload, WorkloadError
from .distributed import Ranks
from .model_facts import check_batch, find_card, is_moe, seed_all

_SAMPLE_SEEDS = 2**24  # apart from each other for every seed of a trial
_SAMPLED = 2**20  # elements; their mean is that of all within some thousandths
_LARGEST_CHANGE = 1000  # times the median change of a weight; what lies above is no weight but padding
_STEADY = 1e-3  # relative: far below the effect of a mask or of noise on a loss, above that of the order of sums


class Incomparable(WorkloadError):
    """The losses of two configs of this workload cannot be compared; that is no error of the code."""


def draw_share(workload: Workload, ranks: Ranks, *, micro_batch: int, accumulation: int, seed: int) -> list[Any]:
    """Return the rank's micro batches of one optimizer step. Raises Incomparable if samples make no micro batches."""

    def draw(index: int) -> Any:
        seed_all(seed * _SAMPLE_SEEDS + index)
        batch = check_batch(workload.build_batch(1), 1)
        return dict(batch) if isinstance(batch, Mapping) else batch

    count = micro_batch * accumulation
    first = ranks.rank * count
    samples = [draw(first + i) for i in range(count)]
    if not _are_equal(samples[0], draw(first)):
        raise Incomparable(
            "build_batch makes another sample under the same seed, so two configs never train on the same data",
            hint="draw from the global generators of random, torch or numpy",
        )
    join_samples(samples)  # so that every config of the workload is refused alike
    return [join_samples(samples[i : i + micro_batch]) for i in range(0, count, micro_batch)]


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors and what dicts, tuples and lists hold by their content."""
    import torch
    from torch.utils._pytree import tree_flatten

    def is_same(value: Any, other: Any) -> bool:
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            return value.shape == other.shape and torch.equal(value.nan_to_num(), other.nan_to_num())
        return bool(value == other)

    (values, structure), (others, other_structure) = tree_flatten(a), tree_flatten(b)
    return structure == other_structure and all(map(is_same, values, others))


def join_samples(samples: Sequence[Any]) -> Any:
    """Return one batch of several with a sample each: their tensors are joined along the first dimension.

    Raises Incomparable if names or shapes differ, or values that have no dimension to join.
    """
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

    rows, structures = zip(*map(tree_flatten_with_path, samples), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise Incomparable("samples of build_batch differ in their names, so they make no micro batch")
    whole = []
    for column in zip(*rows, strict=True):
        name, values = keystr(column[0][0]), [value for _, value in column]
        shapes = list(dict.fromkeys(tuple(value.shape) for value in values if isinstance(value, torch.Tensor)))
        if len(shapes) > 1:
            raise Incomparable(
                f"samples of build_batch differ in shape (the batch{name}: {shapes[0]} and {shapes[1]}), so micro"
                " batches of different sizes cannot hold the same data",
                hint="pad every sample to one length",
            )
        if shapes and shapes[0]:
            whole.append(torch.cat(values))
        elif all(_are_equal(values[0], value) for value in values):
            whole.append(values[0])
        else:
            raise Incomparable(
                f"samples of build_batch differ in the batch{name}, which has no dimension to join them along"
            )
    return tree_unflatten(whole, structures[0])


def make_comparable(engine: Any) -> None:
    """Turn dropout off in the engine's model, and reset its optimizer's counts of steps.

    Raises Incomparable for a mixture of experts, whose loss depends on how a batch is cut.
    """
    if any(is_moe(module) for module in engine.module.modules()):
        raise Incomparable(
            "an expert drops tokens beyond its share of a micro batch, so two configs never train on the same ones",
            hint="nothing is wrong: compare the loss curves of longer runs",
        )
    turn_off_dropout(engine.module)
    reset_step_counts(getattr(engine, "basic_optimizer", None))


def turn_off_dropout(model: Any) -> None:
    """Set all dropout rates of the model's modules and of their configs to 0."""
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
    """Make the optimizer count its steps from 0, as a new one does.

    DeepSpeed's stage 0 in bf16 and fp16 creates the states by a step without gradients
    (FP16_UnfusedOptimizer.initialize_optimizer_states). Adam's bias correction counts that step: the first real update
    is then 0.74 of ZeRO's.
    """
    import torch

    for counted in (*getattr(optimizer, "state", {}).values(), *getattr(optimizer, "param_groups", ())):
        step = counted.get("step") if isinstance(counted, dict) else None
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif isinstance(step, int):
            counted["step"] = 0


class UpdateMeter:
    """Measures the mean size of a weight's change in an optimizer step, from a sample of the weights.

    With Adam it is in proportion to the learning rate, whatever rounding does to the loss. The weights are those that
    the optimizer steps, in fp32 where DeepSpeed keeps such a copy. Under ZeRO a rank steps its part only, under ZeRO-3
    one sub-group after the other.
    """

    def __init__(self) -> None:
        self._before: list[Any] = []
        self._change, self._elements = 0.0, 0

    def watch(self, optimizer: Any) -> None:
        """Measure each step of a torch optimizer from now on."""
        optimizer.register_step_pre_hook(self._begin_step)
        optimizer.register_step_post_hook(self._end_step)

    def mean(self, ranks: Ranks) -> float:
        """Return the mean over all steps, weights and ranks; 0 without a step. Every rank has to call this."""
        change, elements = ranks.mean(self._change), ranks.mean(float(self._elements))
        return change / elements if elements else 0.0

    def _begin_step(self, optimizer: Any, *_: Any) -> None:
        self._before = [sample.clone() for _, sample in _stepped_weights(optimizer)]

    def _end_step(self, optimizer: Any, *_: Any) -> None:
        for before, (elements, sample) in zip(self._before, _stepped_weights(optimizer), strict=True):
            change = (sample.double() - before.double()).abs()
            moved = change[change > 0]
            if moved.numel():  # the padding of a rank's part is memory that nobody set: its values may be anything
                change = change[change <= _LARGEST_CHANGE * moved.median()]
                self._change += elements * float(change.mean())
            self._elements += elements
        self._before = []


class GradientMeter:
    """Notes the gradient's norm of each optimizer step, before clipping: of the mean over all ranks and micro batches.

    It shows gradients that are wrong by a factor or in part, of which the first losses know nothing, and Adam's updates
    little. DeepSpeed's optimizers keep it, whatever part of the gradients a rank has. A plain torch optimizer, at stage
    0 in fp32, steps with whole gradients, which are measured.
    """

    def __init__(self) -> None:
        self._norms: dict[int, float] = {}  # by step: ZeRO-3 steps one sub-group after the other
        self._unclipped: float | None = None

    @property
    def norms(self) -> tuple[float, ...]:
        """One for each step in which the optimizer ran; none where `compute_grad_norm` is off."""
        return tuple(self._norms.values())

    def watch(self, engine: Any) -> None:
        """Note the norm of each step of the engine from now on."""
        weights = [weight for group in engine.basic_optimizer.param_groups for weight in group["params"]]
        clip = engine.clip_fp32_gradients

        def measure_and_clip() -> None:
            self._unclipped = _measure_norm(weights)
            clip()

        def note(*_: Any) -> None:
            if hasattr(engine.optimizer, "_global_grad_norm"):
                norm = engine.optimizer._global_grad_norm
            else:
                norm = _measure_norm(weights) if self._unclipped is None else self._unclipped
            if norm is not None:
                self._norms[engine.global_steps] = float(norm)

        engine.clip_fp32_gradients = measure_and_clip
        engine.basic_optimizer.register_step_pre_hook(note)


def _measure_norm(weights: Sequence[Any]) -> float:
    import torch

    return float(torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None]))


def _stepped_weights(optimizer: Any) -> list[tuple[int, Any]]:
    """The number of elements, and a view of some of them, for each tensor that the optimizer steps."""
    tensors = [weights.detach() for group in optimizer.param_groups for weights in group["params"] if weights.numel()]
    # An odd step through the elements meets all columns of a matrix, whose number is even mostly.
    stride = sum(tensor.numel() for tensor in tensors) // _SAMPLED | 1
    return [(tensor.numel(), tensor.reshape(-1)[::stride]) for tensor in tensors]


class RandomnessWatch:
    """An observer that notes in `drew` whether a forward pass drew random numbers."""

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
    """Return the state of torch's random generators on the CPU and the current card."""
    import torch

    state: bytes = torch.get_rng_state().numpy().tobytes()
    if (card := find_card()) is not None and card[1].is_initialized():
        state += card[1].get_rng_state().numpy().tobytes()
    return state


def check_deterministic(drew: bool, forward: Callable[[], float | None], ranks: Ranks) -> None:
    """Raise Incomparable if random numbers in the forward pass change the loss, such as masks or noise.

    `drew` is whether a forward pass drew any. `forward` returns the loss of one micro batch in training mode, without
    a gradient. Every rank has to call this.
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
