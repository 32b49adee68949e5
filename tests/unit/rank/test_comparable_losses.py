"""Two configs train on the same samples, and incomparable losses are refused with the reason."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from autods.rank.comparable_losses import (
    GradientMeter,
    Incomparable,
    RandomnessWatch,
    UpdateMeter,
    check_deterministic,
    draw_share,
    reset_step_counts,
    turn_off_dropout,
)
from autods.rank.distributed import Ranks
from autods.rank.model_facts import named_tensors
from autods.workload import Workload

ALONE = Ranks(rank=0, world_size=1)


def workload(build_batch: Callable[[int], Any]) -> Workload:
    return Workload(build_model=torch.nn.Module, build_batch=build_batch)


def drawn(n: int) -> dict[str, Any]:
    kinds = [random.random(), float(torch.rand(())), float(numpy.random.random())]
    return {"x": torch.tensor([kinds] * n), "scale": torch.tensor(2.0), "name": "text"}


def samples(*, world_size: int, micro_batch: int, accumulation: int, seed: int = 0) -> list[list[float]]:
    """The rows of the global batch, over all ranks and micro batches."""
    rows = []
    for rank in range(world_size):
        ranks = replace(ALONE, rank=rank, world_size=world_size)
        share = draw_share(workload(drawn), ranks, micro_batch=micro_batch, accumulation=accumulation, seed=seed)
        assert [len(batch["x"]) for batch in share] == [micro_batch] * accumulation
        rows += [row for batch in share for row in batch["x"].tolist()]
    return rows


def test_the_global_batch_is_the_same_however_it_is_cut() -> None:
    whole = samples(world_size=2, micro_batch=4, accumulation=1)
    assert len({tuple(row) for row in whole}) == 8
    assert samples(world_size=2, micro_batch=1, accumulation=4) == whole
    assert samples(world_size=4, micro_batch=1, accumulation=2) == whole


def test_another_seed_makes_other_samples() -> None:
    first, second = (samples(world_size=1, micro_batch=4, accumulation=1, seed=seed) for seed in (0, 1))
    assert not {tuple(row) for row in first} & {tuple(row) for row in second}


def test_what_has_no_samples_is_kept_as_it_is() -> None:
    (batch,) = draw_share(workload(drawn), ALONE, micro_batch=2, accumulation=1, seed=0)
    assert batch["scale"].shape == ()
    assert batch["name"] == "text"


def test_nested_batches_are_joined_at_every_depth() -> None:
    def nested(n: int) -> dict[str, Any]:
        return {"inputs": {"image": torch.rand(n, 3), "sizes": (torch.ones(n), [1, 2])}, "mode": "train"}

    (batch,) = draw_share(workload(nested), ALONE, micro_batch=4, accumulation=1, seed=0)
    assert set(named_tensors(batch)) == {"inputs.image", "inputs.sizes.0"}
    assert batch["inputs"]["image"].shape == (4, 3)
    assert batch["inputs"]["sizes"][1] == [1, 2]


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(8, 1), (1, 8)])
def test_samples_of_different_lengths_are_refused_by_all_configs(micro_batch: int, accumulation: int) -> None:
    lengths = workload(lambda n: (torch.zeros(n, random.randint(1, 100)),))
    with pytest.raises(Incomparable, match="differ in shape"):
        draw_share(lengths, ALONE, micro_batch=micro_batch, accumulation=accumulation, seed=0)


def test_samples_that_ignore_the_seed_are_refused() -> None:
    own = random.Random(0)
    with pytest.raises(Incomparable, match="another sample under the same seed"):
        draw_share(workload(lambda n: (torch.full((n,), own.random()),)), ALONE, micro_batch=1, accumulation=2, seed=0)


def test_no_dropout_is_left_in_training_mode() -> None:
    from transformers import T5Config, T5ForConditionalGeneration  # seconds for each process that collects this file

    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.5,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).train()
    turn_off_dropout(model)
    tokens = torch.arange(8).view(1, 8)
    first, second = (model(input_ids=tokens, labels=tokens).loss for _ in range(2))
    assert model.training
    assert torch.equal(first, second)


def test_dropout_rates_of_attention_layers_become_zero() -> None:
    layer = torch.nn.MultiheadAttention(8, 2, dropout=0.5).train()
    turn_off_dropout(layer)
    x = torch.ones(3, 1, 8)
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


def test_step_counts_of_an_optimizer_are_reset() -> None:
    def trained(*, dummy_step: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        if dummy_step:
            weight.grad = torch.zeros(3)
            optimizer.step()
        reset_step_counts(optimizer)
        weight.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
        return weight.detach()

    assert torch.equal(trained(dummy_step=True), trained(dummy_step=False))


def test_only_random_numbers_of_the_forward_pass_are_noticed() -> None:
    seen: list[tuple[str, int]] = []
    listening = RandomnessWatch(lambda phase, step: seen.append((phase, step)))
    torch.rand(1)
    listening("forward", 0)
    listening("backward", 0)
    torch.rand(1)
    assert not listening.drew
    listening("forward", 1)
    torch.rand(1)
    listening("backward", 1)
    assert listening.drew
    assert seen == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]


def test_only_random_numbers_that_change_the_loss_are_refused() -> None:
    check_deterministic(True, lambda: 1.0 + 0 * float(torch.rand(())), ALONE)
    with pytest.raises(Incomparable, match="draws random numbers"):
        check_deterministic(True, lambda: 1.0 + float(torch.rand(())), ALONE)


def update_size(optimizer: type[torch.optim.Optimizer], lr: float, *, parts: int = 1, steps: int = 3) -> float:
    """The mean change of 3 million weights in some steps, which lie in so many tensors of the optimizer."""
    torch.manual_seed(0)
    weights, gradients = torch.randn(3_000_000), torch.randn(steps, 3_000_000)
    tensors = [torch.nn.Parameter(part.clone()) for part in weights.chunk(parts)]
    stepped, meter = optimizer(tensors, lr=lr), UpdateMeter()  # type: ignore[call-arg]
    meter.watch(stepped)
    for gradient in gradients:
        for tensor, part in zip(tensors, gradient.chunk(parts), strict=True):
            tensor.grad = part.clone()
        stepped.step()
    return meter.mean(ALONE)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_the_size_of_updates_shows_the_learning_rate(optimizer: type[torch.optim.Optimizer]) -> None:
    size = update_size(optimizer, 1e-3)
    assert update_size(optimizer, 1.1e-3) == pytest.approx(1.1 * size, rel=0.002)
    assert update_size(optimizer, 1e-3, parts=7) == pytest.approx(size, rel=0.002)  # other weights are sampled
    assert update_size(optimizer, 0.0) == 0


def test_the_size_of_an_update_is_a_mean_over_weights() -> None:
    assert update_size(torch.optim.SGD, 1.0, steps=1) == pytest.approx(math.sqrt(2 / math.pi), rel=0.01)


class Engine:
    """What `GradientMeter` knows of DeepSpeed's engine, at stage 0 in fp32: it clips whole gradients."""

    def __init__(self, clip: float) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = self.basic_optimizer = torch.optim.SGD([self.weight])
        self.global_steps, self.clip = 0, clip

    def clip_fp32_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_([self.weight], self.clip)

    def step(self) -> None:
        self.weight.grad = torch.tensor([3.0, 4.0])
        if self.clip:
            self.clip_fp32_gradients()
        self.optimizer.step()
        self.global_steps += 1


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_norm_of_gradients_is_that_before_clipping(clip: float) -> None:
    engine, meter = Engine(clip), GradientMeter()
    meter.watch(engine)
    engine.step()
    engine.step()
    assert meter.norms == (5.0, 5.0)


def test_the_norm_that_deepspeed_keeps_counts_once_a_step() -> None:
    """ZeRO-3 has called the optimizer for each sub-group; ZeRO-2 without `compute_grad_norm` knows none."""
    engine, meter = Engine(0.0), GradientMeter()
    engine.optimizer = SimpleNamespace(_global_grad_norm=torch.tensor(4.74))  # type: ignore[assignment]
    meter.watch(engine)
    engine.basic_optimizer.step()
    engine.basic_optimizer.step()
    assert meter.norms == pytest.approx((4.74,))
    engine.optimizer._global_grad_norm = None  # type: ignore[attr-defined]
    engine.global_steps = 1
    engine.basic_optimizer.step()
    assert len(meter.norms) == 1


@pytest.mark.parametrize(("before", "after"), [(0.0, 1e25), (math.nan, 0.0), (0.0, math.inf), (1e-40, -1e30)])
def test_padding_behind_the_weights_is_no_update(before: float, after: float) -> None:
    """DeepSpeed makes a rank's part by torch.empty: what lies behind the last weight may be and become anything."""
    torch.manual_seed(0)
    weights = torch.randn(10_000)
    changed = weights - 1e-3 * torch.randn(10_000)

    def size(padding: int) -> float:
        part = torch.nn.Parameter(torch.cat([weights, torch.full((padding,), before)]))
        optimizer, meter = torch.optim.SGD([part]), UpdateMeter()
        optimizer.register_step_post_hook(
            lambda *_: part.data.copy_(torch.cat([changed, torch.full((padding,), after)]))
        )
        meter.watch(optimizer)
        optimizer.step()
        return meter.mean(ALONE)

    assert size(padding=3) == pytest.approx(size(padding=0), rel=1e-3)


def test_without_a_step_there_is_no_update() -> None:
    assert UpdateMeter().mean(ALONE) == 0
