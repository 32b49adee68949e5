"""Which modules of a model recompute their activations, and how that is switched."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autods.rank.checkpointing import list_alike_layers, list_recomputing, recomputes, set_checkpointing


class Blocks(nn.Module):
    """As transformers' models: layers with a switch, and methods of the old name."""

    supports_gradient_checkpointing = True

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(1, 1)
        self.layer.gradient_checkpointing = False
        self.inner = inner
        self.calls: list[Any] = []

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.calls.append(kwargs)
        self.layer.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.calls.append("off")
        self.layer.gradient_checkpointing = False


class Unable(Blocks):
    supports_gradient_checkpointing = False


def test_the_outermost_module_with_the_method_is_switched() -> None:
    blocks = Blocks(inner=Blocks())
    wrapped = nn.Sequential(nn.Linear(1, 1), blocks)
    assert list_recomputing(wrapped) == [blocks]
    set_checkpointing(wrapped, True)
    assert recomputes(wrapped)
    assert (blocks.calls, blocks.inner.calls) == ([{}], [])


@pytest.mark.parametrize("model", [nn.Linear(1, 1), Unable()])
def test_a_model_that_cannot_recompute_is_left_alone(model: nn.Module) -> None:
    assert list_recomputing(model) == []
    set_checkpointing(model, True)
    assert not recomputes(model)


def test_a_model_that_recomputes_goes_on_in_its_own_way() -> None:
    blocks = Blocks()
    blocks.gradient_checkpointing_enable(use_reentrant=True)
    set_checkpointing(blocks, True)
    assert blocks.calls == [{"use_reentrant": True}]


def test_a_forward_without_gradients_recomputes_nothing() -> None:
    """A generation in training mode would lose its cache."""
    blocks = Blocks()
    set_checkpointing(nn.Sequential(blocks), True)
    blocks.forward = lambda x: blocks.layer.gradient_checkpointing
    with torch.no_grad():
        assert blocks(torch.ones(1)) is False
    assert blocks(torch.ones(1)) is True


def test_a_model_that_recomputes_can_be_saved_whole() -> None:
    blocks = Blocks()
    set_checkpointing(blocks, True)
    assert recomputes(pickle.loads(pickle.dumps(blocks)))


def test_what_a_model_has_turned_on_is_turned_off() -> None:
    blocks = Blocks()
    blocks.gradient_checkpointing_enable()
    set_checkpointing(blocks, False)
    assert not recomputes(blocks)


class Layer(nn.Module):
    """A layer of transformers with checkpointing, after another that makes its input."""

    gradient_checkpointing = True

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self._gradient_checkpointing_func: Any = functools.partial(checkpoint, use_reentrant=use_reentrant)

    def gradients(self, *, wipe: bool) -> list[float]:
        """Sums of gradients; `wipe` loses the layer's input after forward, as autograd does not see."""
        self.zero_grad()
        hidden, mask = self.before(torch.ones(2, 3)), torch.tensor([[True], [False]])
        out = self._gradient_checkpointing_func(lambda hidden, mask: self.inner(hidden) * mask, hidden, mask)
        if wipe:
            hidden.data.zero_()
        out.square().sum().backward()
        return [float(parameter.grad.sum()) for parameter in self.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_recomputes_from_its_input_on_the_host(use_reentrant: bool) -> None:
    blocks = Blocks()
    blocks.layer = layer = Layer(use_reentrant=use_reentrant)
    expected = layer.gradients(wipe=False)
    assert layer.gradients(wipe=True) != pytest.approx(expected)
    set_checkpointing(blocks, True, inputs_on_host=True)
    assert layer.gradients(wipe=True) == pytest.approx(expected)
    pickle.loads(pickle.dumps(layer))


class Stack(nn.Module):
    """A stack of layers with a switch each, switched together by the model's method."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(1, 1) for _ in range(layers))
        self.gradient_checkpointing_disable()

    def gradient_checkpointing_enable(self) -> None:
        for layer in self.layers:
            layer.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        for layer in self.layers:
            layer.gradient_checkpointing = False


def test_one_in_so_many_layers_is_recomputed() -> None:
    stack = Stack(5)
    assert [len(layers) for layers in list_alike_layers(nn.Sequential(stack, nn.Linear(1, 1)))] == [5]
    set_checkpointing(stack, 2)
    assert [layer.gradient_checkpointing for layer in stack.layers] == [True, False, True, False, True]
    set_checkpointing(stack, False)
    assert not recomputes(stack)
