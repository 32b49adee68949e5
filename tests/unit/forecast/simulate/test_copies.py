"""Copies between the simulated device and the host: what torch allocates for them beside their two tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autods.forecast.simulate.dispatch import Recorder
from autods.forecast.simulate.ledger import DEVICE, HOST, PINNED, Ledger

_BF16 = torch.bfloat16
_copy = torch.ops.aten.copy_.default  # the method needs a torch with CUDA


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger, mode = Ledger(one_memory=False), FakeTensorMode(allow_non_fake_inputs=True)
    ledger.begin("step")
    with mode, Recorder(ledger, mode):
        yield ledger


def _borrowed(ledger: Ledger) -> tuple[int, int]:
    """The bytes of the device and of the host by which the peak is above what lives."""
    return ledger.highest[DEVICE] - ledger.current[DEVICE], ledger.highest[HOST] - ledger.current[HOST]


@pytest.mark.parametrize(("asynchronous", "borrowed"), [(False, (0, 200)), (True, (400, 0))])
def test_a_converting_copy_from_the_host_takes_a_tensor(
    ledger: Ledger, asynchronous: bool, borrowed: tuple[int, int]
) -> None:
    """As stage 3 updates weights on the device from states on the host."""
    weights, states = torch.empty(100, dtype=_BF16, device="cuda"), torch.empty(100)
    _copy(weights, states, asynchronous)
    assert _borrowed(ledger) == borrowed


@pytest.mark.parametrize(("asynchronous", "borrowed"), [(False, (0, 200)), (True, (400, 0))])
def test_a_converting_copy_to_the_host_takes_a_tensor(
    ledger: Ledger, asynchronous: bool, borrowed: tuple[int, int]
) -> None:
    gradients, sums = torch.empty(100, dtype=_BF16, device="cuda"), torch.empty(100)
    _copy(sums, gradients, asynchronous)
    assert _borrowed(ledger) == borrowed


def test_a_copy_of_what_is_not_contiguous_takes_a_tensor(ledger: Ledger) -> None:
    target, source = torch.empty(8, 4), torch.empty(4, 8, device="cuda")
    target.copy_(source.t())
    assert _borrowed(ledger) == (128, 0)


def test_copies_of_the_same_layout_take_nothing(ledger: Ledger) -> None:
    source = torch.empty(4, 8, device="cuda")
    moved = [source.cpu(), source.t().cpu(), source.to(_BF16)]
    moved[0].copy_(source, non_blocking=True)
    assert _borrowed(ledger) == (0, 0)


def test_what_goes_to_the_host_asynchronously_is_pinned(ledger: Ledger) -> None:
    source = torch.empty(100, device="cuda")
    there = source.to("cpu", non_blocking=True)
    assert (ledger.current[HOST], ledger.current[PINNED], ledger.is_pinned(there)) == (0, 400, True)
