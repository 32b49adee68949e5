from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from autods.trial.memory import CudaMeter
from tests.support.scripted_nvml import GIB, FakeCard, FakeNvml, NVMLError

MIB = 2**20


@dataclass
class FakeCuda:
    """A fake `torch.cuda` with one card, whose context takes `context_bytes` once it is set."""

    card: FakeCard
    context_bytes: int = 500 * MIB
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    retries: int = 0
    fraction: float | None = None
    chosen: int | None = None
    waited: list[int] = field(default_factory=list)
    pinned: dict[str, int] = field(default_factory=dict)

    def set_device(self, index: int) -> None:
        self.chosen = index
        self.card.used_bytes += self.context_bytes

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=self.card.total_bytes)

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.fraction = fraction

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated

    def reserve(self, size: int, *, used: int) -> None:
        self.card.used_bytes += size - self.reserved
        self.reserved, self.allocated = size, used
        self.peak_reserved, self.peak_allocated = max(self.peak_reserved, size), max(self.peak_allocated, used)

    def max_memory_reserved(self, index: int) -> int:
        return self.peak_reserved

    def max_memory_allocated(self, index: int) -> int:
        return self.peak_allocated

    def memory_reserved(self, index: int) -> int:
        return self.reserved

    def memory_allocated(self, index: int) -> int:
        return self.allocated

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.card.total_bytes - self.card.used_bytes, self.card.total_bytes

    def memory_stats(self, index: int) -> dict[str, int]:
        return {
            "reserved_bytes.all.current": self.reserved,
            "allocated_bytes.all.current": self.allocated,
            "num_alloc_retries": self.retries,
        }

    def host_memory_stats(self) -> dict[str, int]:
        return self.pinned

    def synchronize(self, index: int) -> None:
        self.waited.append(index)


@pytest.fixture(autouse=True)
def _all_cards_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def meter_on(card: FakeCard, limit: int | None = None, **cuda: Any) -> tuple[CudaMeter, FakeCuda, SimpleNamespace]:
    fake, accelerator = FakeCuda(card=card, **cuda), SimpleNamespace()
    nvml = FakeNvml([card])
    return CudaMeter(limit, 0, cuda=fake, nvml=nvml, accelerator=accelerator), fake, accelerator


def test_allocated_reserved_and_nvml_bytes_are_measured() -> None:
    meter, cuda, _ = meter_on(FakeCard(total_bytes=80 * GIB))
    meter.start()
    cuda.reserve(10 * GIB, used=8 * GIB)
    cuda.card.used_bytes += 600 * MIB  # NCCL's first collective
    cuda.reserve(4 * GIB, used=2 * GIB)
    peaks = meter.peaks()
    assert (peaks["device_allocated"], peaks["device"]) == (8 * GIB, 10 * GIB)
    assert peaks["device_beside"] == 1100 * MIB
    assert peaks["device_card"] == 10 * GIB + 1100 * MIB


def test_memory_in_use_leaves_out_what_the_allocator_caches() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    cuda.reserve(4 * GIB, used=GIB)
    assert meter.held_bytes() == GIB


def test_bytes_of_other_processes_are_not_counted() -> None:
    meter, cuda, _ = meter_on(FakeCard(used_bytes=3 * GIB))
    meter.start()
    cuda.reserve(2 * GIB, used=GIB)
    assert meter.peaks()["device_card"] == 2 * GIB + 500 * MIB


def test_without_nvml_only_the_allocator_is_measured() -> None:
    card = FakeCard()
    nvml = FakeNvml(problem=NVMLError("no", 9))
    meter = CudaMeter(None, 0, cuda=FakeCuda(card=card), nvml=nvml, accelerator=SimpleNamespace())
    meter.start()
    meter.cuda.reserve(GIB, used=GIB)
    peaks = meter.peaks()
    assert (peaks["device"], peaks["device_card"], peaks["device_beside"]) == (GIB, None, None)


def test_torch_and_deepspeed_both_see_the_emulated_card() -> None:
    meter, cuda, accelerator = meter_on(FakeCard(total_bytes=80 * GIB), limit=16 * GIB)
    meter.start()
    assert cuda.fraction == pytest.approx(0.2)
    assert accelerator.total_memory(0) == 16 * GIB
    cuda.reserve(15 * GIB, used=15 * GIB)
    assert meter.free_bytes() == accelerator.available_memory() == GIB


def test_deepspeed_is_not_patched_for_a_whole_card() -> None:
    for limit in (None, 16 * GIB):
        meter, cuda, accelerator = meter_on(FakeCard(total_bytes=16 * GIB), limit=limit)
        meter.start()
        assert cuda.fraction is None
        assert not vars(accelerator)


def test_nvml_stays_open_for_deepspeed() -> None:
    meter, _, _ = meter_on(FakeCard())
    meter.start()
    meter.peaks()
    assert meter.nvml.open == 1


def test_only_retries_within_the_steps_count() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    cuda.retries = 5
    meter.begin_steps()
    cuda.retries = 7
    assert meter.allocator() == {"idle_bytes": 0, "alloc_retries": 2}


def test_pinned_memory_is_unknown_where_torch_does_not_count_it() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    assert meter.peaks()["pinned"] is None
    cuda.pinned = {"allocated_bytes.peak": GIB, "active_bytes.peak": 1}
    assert meter.peaks()["pinned"] == GIB
    cuda.pinned = {"allocated_bytes.peak": 1, "reserved_bytes.peak": GIB}  # as torch 2.8 has them
    assert meter.peaks()["pinned"] == GIB


def test_clocks_wait_for_the_card() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    meter.synchronize()
    assert (cuda.chosen, cuda.waited) == (0, [0])


def test_a_sandbox_without_private_memory_is_still_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autods.trial.memory.status_bytes", lambda *names: {"VmRSS": 300 * MIB})
    meter, _, _ = meter_on(FakeCard())
    meter.start()
    assert meter.peaks()["host"] >= 0
