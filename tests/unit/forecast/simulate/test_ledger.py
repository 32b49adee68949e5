"""The books of the simulated device: what lives, the peaks of each phase, the trace that the allocators replay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autods.forecast.predict.prices import Work
from autods.forecast.simulate.ledger import DEVICE, HOST, PINNED, Ledger


class Storage:
    """As torch's: an identity and a size that may change."""

    def __init__(self, key: int, size: int) -> None:
        self._cdata, self.size = key, size

    def nbytes(self) -> int:
        return self.size


class Tensor:
    def __init__(self, key: int, size: int, device: str = "cuda") -> None:
        self.storage, self.device = Storage(key, size), SimpleNamespace(type=device)
        self.is_cpu = device == "cpu"

    def untyped_storage(self) -> Storage:
        return self.storage


@pytest.fixture
def ledger() -> Ledger:
    books = Ledger(one_memory=False)
    books.begin("build")
    return books


def replayed(ledger: Ledger, tier: int) -> tuple[int, int]:
    """Peak and final bytes of the trace, by its documented meaning."""
    now = peak = 0
    blocks: list[int] = []
    for event in ledger.trace(tier).events:
        if event >= 0:
            blocks.append(event)
            now += event
        else:
            now -= blocks[-event - 1]
        peak = max(peak, now)
    return peak, now


def test_a_tensor_counts_on_its_tier_until_it_dies(ledger: Ledger) -> None:
    on_device, on_host, pinned = Tensor(1, 100), Tensor(2, 70, "cpu"), Tensor(3, 50, "cpu")
    ledger.enter(on_device)
    ledger.enter(on_host)
    ledger.enter(pinned, PINNED)
    assert [ledger.current[tier] for tier in (DEVICE, HOST, PINNED)] == [100, 70, 50]
    del on_device, pinned
    assert [ledger.current[tier] for tier in (DEVICE, HOST, PINNED)] == [0, 70, 0]
    assert ledger.peaks()["build"] == {"device": 100, "host": 70, "pinned": 50}


def test_a_view_is_not_counted_again(ledger: Ledger) -> None:
    tensor = Tensor(1, 100)
    ledger.enter(tensor)
    ledger.enter(tensor)
    assert ledger.current[DEVICE] == 100


def test_a_tensor_on_meta_holds_nothing(ledger: Ledger) -> None:
    tensor = Tensor(1, 100, "meta")
    ledger.enter(tensor)
    assert sum(ledger.current) == 0


def test_a_resized_storage_is_freed_and_allocated_again(ledger: Ledger) -> None:
    tensor = Tensor(1, 100)
    ledger.enter(tensor)
    tensor.storage.size = 30
    ledger.enter(tensor)
    assert ledger.current[DEVICE] == 30
    assert list(ledger.trace(DEVICE).events) == [100, -1, 30]


def test_a_second_step_can_raise_the_peak_of_a_phase(ledger: Ledger) -> None:
    kept = Tensor(1, 100)
    ledger.enter(kept)
    ledger.begin("forward")
    more = Tensor(2, 40)
    ledger.enter(more)
    del more
    ledger.begin("step")
    ledger.begin("forward")
    most = Tensor(3, 60)
    ledger.enter(most)
    assert {phase: tiers["device"] for phase, tiers in ledger.peaks().items()} == {
        "build": 100, "forward": 160, "step": 100,
    }  # fmt: skip
    assert [phase for _, phase in ledger.trace(DEVICE).marks] == ["build", "forward", "step", "forward"]


def test_the_trace_replays_to_the_same_peak(ledger: Ledger) -> None:
    kept = [Tensor(key, 10 * key) for key in range(1, 9)]
    for tensor in kept:
        ledger.enter(tensor)
    del kept[2:5], tensor
    assert replayed(ledger, DEVICE) == (360, ledger.current[DEVICE])
    assert ledger.peaks()["build"]["device"] == 360


def test_on_cpu_ranks_every_tier_counts_as_the_device() -> None:
    ledger = Ledger(one_memory=True)
    on_host, pinned = Tensor(2, 70, "cpu"), Tensor(3, 50, "cpu")
    ledger.enter(on_host)
    ledger.enter(pinned, PINNED)
    assert ledger.peaks()["build"] == {"device": 120, "host": 0, "pinned": 0}


def test_pages_of_a_file_count_on_cpu_ranks_alone() -> None:
    for one_memory in (False, True):
        ledger = Ledger(one_memory=one_memory)
        weight = Tensor(1, 70, "cpu")
        with ledger.map_files():
            ledger.enter(weight)
        ledger.enter(weight)  # an operator returns a view of it
        cast = Tensor(2, 140, "cpu")
        ledger.enter(cast)
        assert sum(ledger.current[:3]) == (210 if one_memory else 140)
        del weight, cast
        assert sum(ledger.current[:3]) == 0


def test_a_kernels_buffer_is_no_tensor_of_the_sum() -> None:
    ledger = Ledger(one_memory=True)
    tensor = Tensor(1, 100)
    ledger.enter(tensor)
    ledger.borrow([40])
    assert (ledger.peaks()["build"]["device"], ledger.summed_peaks()["build"]) == (140, 100)


def test_the_breakdown_is_that_of_the_peak(ledger: Ledger) -> None:
    kept, peak = Tensor(1, 100), Tensor(2, 40)
    ledger.enter(kept)
    ledger.enter(peak)
    ledger.label(kept, 3)
    del peak
    later = Tensor(3, 20)
    ledger.enter(later)
    ledger.label(later, 5)
    assert ledger.trace(DEVICE).split_peak() == {"activations": 100, "parameters": 40}


def test_a_block_has_the_stream_on_which_it_was_allocated(ledger: Ledger) -> None:
    tensors = [Tensor(1, 512)]
    ledger.enter(tensors[0])
    former = ledger.work.switch(2)
    tensors.append(Tensor(2, 512))
    ledger.enter(tensors[1])
    ledger.work.switch(former)
    assert list(ledger.trace(DEVICE).streams) == [0, 1]


def test_a_block_in_use_by_a_stream_is_held_until_the_host_waits(ledger: Ledger) -> None:
    used, others = Tensor(1, 512), [Tensor(key, 512) for key in (2, 3, 4)]
    ledger.enter(used)
    former = ledger.work.switch(1)
    ledger.enter(others[0])
    ledger.work.switch(former)
    ledger.use_on(used, SimpleNamespace(stream_id=1))
    del used.storage
    ledger.enter(others[1])
    assert ledger.trace(DEVICE).held == {0: 4}  # to the end
    ledger.work.host_waits_for_stream(1)
    ledger.enter(others[2])
    assert ledger.trace(DEVICE).held == {0: 4}  # before the fifth event
    assert ledger.current[DEVICE] == 3 * 512


def test_a_use_on_the_blocks_own_stream_holds_nothing(ledger: Ledger) -> None:
    used = Tensor(1, 512)
    ledger.enter(used)
    ledger.use_on(used, SimpleNamespace(stream_id=0))
    del used.storage
    assert not ledger.trace(DEVICE).held


def test_recording_a_stream_costs_the_host_a_call(ledger: Ledger) -> None:
    used = Tensor(1, 512)
    ledger.enter(used)
    ledger.use_on(used, SimpleNamespace(stream_id=1))
    assert Work(kind="view", launches=1) in ledger.work.schedule().works
