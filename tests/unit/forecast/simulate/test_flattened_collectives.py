"""Collectives of lists, which NCCL gets as one tensor: it takes memory until it is awaited, and copies take time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from autods.forecast.simulate.dispatch import Recorder
from autods.forecast.simulate.ledger import DEVICE, Ledger

_RANKS = 4


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    distributed.init_process_group("fake", rank=0, world_size=_RANKS, store=FakeStore())  # type: ignore[no-untyped-call]
    ledger, mode = Ledger(one_memory=False), FakeTensorMode(allow_non_fake_inputs=True)
    ledger.begin("step")
    ledger.work.begin("step", 0)
    try:
        with mode, Recorder(ledger, mode):
            yield ledger
    finally:
        distributed.destroy_process_group()


def _make_parts(length: int = 100) -> list[torch.Tensor]:
    return [torch.empty(length, device="cuda") for _ in range(_RANKS)]


def test_a_gather_of_a_list_holds_a_copy_until_it_is_awaited(ledger: Ledger) -> None:
    part, parts = torch.empty(100, device="cuda"), _make_parts()
    before = ledger.current[DEVICE]
    handle = distributed.all_gather(parts, part, async_op=True)
    assert ledger.current[DEVICE] - before == _RANKS * 400
    for _ in range(2):
        handle.wait()
        assert ledger.current[DEVICE] == before
    assert ledger.summed_peaks()["step"] == before


@pytest.mark.parametrize("scatters", [False, True])
def test_a_list_is_copied_to_or_from_one_tensor(ledger: Ledger, scatters: bool) -> None:
    part, parts = torch.empty(100, device="cuda"), _make_parts()
    if scatters:
        distributed.reduce_scatter(part, parts)
    else:
        distributed.all_gather(parts, part)
    assert ledger.highest[DEVICE] - ledger.current[DEVICE] == _RANKS * 400
    copies = [work for work in ledger.work.schedule().works if work.name == "flatten"]
    assert [(work.kind, work.bytes) for work in copies] == [("kernel", 800)]


def test_lists_of_several_sizes_are_not_flattened(ledger: Ledger) -> None:
    part, parts = torch.empty(100, device="cuda"), [torch.empty(size, device="cuda") for size in (100, 100, 100, 50)]
    distributed.all_gather(parts, part)
    assert ledger.highest[DEVICE] == ledger.current[DEVICE]
