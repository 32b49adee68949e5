from __future__ import annotations

import functools
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autods.rank.memory import CudaMeter, read_private_bytes
from tests.support.scripted_nvml import GIB, FakeCard, FakeNvml, NVMLError

MIB = 2**20


@dataclass
class FakeCuda:
    """A fake `torch.cuda` with one card, whose context takes `context_bytes` once it is set."""

    card: FakeCard
    context_bytes: int = 500 * MIB
    current: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("allocated", "active", "reserved"), 0))
    highest: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("allocated", "active", "reserved"), 0))
    retries: int = 0
    ooms: int = 0
    fraction: float | None = None
    chosen: int | None = None
    emptied: int = 0
    waited: list[int] = field(default_factory=list)
    pinned: dict[str, int] = field(default_factory=dict)
    Event: Any = None

    def set_device(self, index: int) -> None:
        self.chosen = index
        self.card.used_bytes += self.context_bytes

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=self.card.total_bytes)

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.fraction = fraction

    def hold(self, *, reserved: int, allocated: int, active: int | None = None) -> None:
        """Let the allocator hold so many bytes from now on."""
        self.card.used_bytes += reserved - self.current["reserved"]
        self.current = {"reserved": reserved, "allocated": allocated, "active": active or allocated}
        self.highest = {name: max(size, self.highest[name]) for name, size in self.current.items()}

    def empty_cache(self) -> None:
        self.emptied += 1
        self.hold(reserved=self.current["active"], allocated=self.current["allocated"], active=self.current["active"])

    def memory_reserved(self, index: int) -> int:
        return self.current["reserved"]

    def memory_allocated(self, index: int) -> int:
        return self.current["allocated"]

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.card.total_bytes - self.card.used_bytes, self.card.total_bytes

    def memory_stats(self, index: int) -> dict[str, int]:
        stats = {"num_alloc_retries": self.retries, "num_ooms": self.ooms}
        stats |= {f"{name}_bytes.all.current": size for name, size in self.current.items()}
        return stats | {f"{name}_bytes.all.peak": size for name, size in self.highest.items()}

    def host_memory_stats(self) -> dict[str, int]:
        return self.pinned

    def synchronize(self, index: int) -> None:
        self.waited.append(index)


@pytest.fixture(autouse=True)
def _all_cards_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def resets(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What torch's functions that reset counters call, in their modules and in `torch.cuda`, until the test ends."""
    calls: list[Callable[[], None]] = []

    def reset() -> None:
        for call in calls:
            call()

    host = "reset_peak_host_memory_stats"
    for module, names in (("torch.cuda", (*_RESETS, host)), ("torch.accelerator", _RESETS)):
        for name in names:
            alike = functools.partial(reset)
            monkeypatch.setattr(f"{module}.memory.{name}", alike)
            monkeypatch.setattr(f"{module}.{name}", alike)
    return calls


_RESETS = ("reset_peak_memory_stats", "reset_accumulated_memory_stats")


def meter_on(card: FakeCard, limit: int | None = None, **cuda: Any) -> tuple[CudaMeter, FakeCuda, SimpleNamespace]:
    fake, accelerator = FakeCuda(card=card, **cuda), SimpleNamespace()
    nvml = FakeNvml([card])
    return CudaMeter(limit, 0, cuda=fake, nvml=nvml, accelerator=accelerator), fake, accelerator


def test_the_device_is_what_the_allocator_holds_and_what_lies_beside() -> None:
    meter, cuda, _ = meter_on(FakeCard(total_bytes=80 * GIB))
    meter.start()
    cuda.hold(reserved=10 * GIB, allocated=8 * GIB, active=9 * GIB)
    cuda.card.used_bytes += 600 * MIB  # NCCL's first collective
    cuda.hold(reserved=4 * GIB, allocated=2 * GIB)
    peaks = meter.peaks()
    assert (peaks["device_allocated"], peaks["device_beside"]) == (8 * GIB, 1100 * MIB)
    assert peaks["device"] == 10 * GIB + 1100 * MIB
    assert peaks["device_in_use"] == 9 * GIB + 1100 * MIB  # some freed blocks were still used by a stream


def test_memory_in_use_leaves_out_what_the_allocator_caches() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    cuda.hold(reserved=4 * GIB, allocated=GIB)
    assert meter.held_bytes() == GIB


def test_bytes_of_other_processes_are_not_counted() -> None:
    meter, cuda, _ = meter_on(FakeCard(used_bytes=3 * GIB))
    meter.start()
    cuda.hold(reserved=2 * GIB, allocated=GIB)
    assert meter.peaks()["device"] == 2 * GIB + 500 * MIB


def test_other_processes_that_come_and_go_are_not_counted() -> None:
    card = FakeCard(pids=(os.getpid(),), used_bytes=20 * GIB, total_bytes=80 * GIB)
    meter, cuda, _ = meter_on(card, limit=16 * GIB)
    card.held_bytes[os.getpid()] = 500 * MIB
    meter.start()
    card.used_bytes += 30 * GIB  # another process
    meter.settle()
    assert cuda.fraction == pytest.approx((16 * GIB - 500 * MIB) / (80 * GIB))
    assert meter.peaks()["device"] == 500 * MIB


def test_the_pid_of_another_namespace_is_not_this_process() -> None:
    card = FakeCard(pids=(os.getpid(),), held_bytes={os.getpid(): 100 * MIB})
    meter, cuda, _ = meter_on(card)
    meter.start()
    cuda.hold(reserved=2 * GIB, allocated=GIB)
    assert meter.peaks()["device"] == 2 * GIB + 500 * MIB


def test_without_nvml_all_that_the_card_holds_counts() -> None:
    card = FakeCard(used_bytes=GIB)
    nvml = FakeNvml(problem=NVMLError("no", 9))
    meter = CudaMeter(None, 0, cuda=FakeCuda(card=card), nvml=nvml, accelerator=SimpleNamespace())
    meter.start()
    meter.cuda.hold(reserved=GIB, allocated=GIB)
    assert meter.peaks()["device"] == 2 * GIB + 500 * MIB


def test_a_whole_process_stays_within_the_emulated_card() -> None:
    meter, cuda, _ = meter_on(FakeCard(total_bytes=80 * GIB), limit=16 * GIB)
    meter.start()
    assert cuda.fraction == pytest.approx((16 * GIB - 500 * MIB) / (80 * GIB))
    cuda.card.used_bytes += 600 * MIB
    meter.settle()
    assert cuda.fraction == pytest.approx((16 * GIB - 1100 * MIB) / (80 * GIB))


def test_cache_beyond_the_limit_is_given_back_before_the_steps() -> None:
    meter, cuda, _ = meter_on(FakeCard(total_bytes=80 * GIB), limit=16 * GIB)
    meter.start()
    cuda.hold(reserved=15 * GIB, allocated=12 * GIB)
    meter.settle()
    assert cuda.emptied == 0
    cuda.card.used_bytes += 600 * MIB
    meter.settle()
    assert cuda.emptied == 1
    assert meter.peaks()["device_in_use"] == 12 * GIB + 1100 * MIB


def test_a_card_smaller_than_its_context_leaves_nothing() -> None:
    meter, cuda, _ = meter_on(FakeCard(total_bytes=80 * GIB), limit=256 * MIB)
    meter.start()
    assert (cuda.fraction, meter.free_bytes()) == (0.0, 0)


def test_deepspeed_sees_the_emulated_card() -> None:
    meter, cuda, accelerator = meter_on(FakeCard(total_bytes=80 * GIB), limit=16 * GIB)
    meter.start()
    assert accelerator.total_memory(0) == 16 * GIB
    cuda.hold(reserved=15 * GIB, allocated=15 * GIB)
    assert meter.free_bytes() == accelerator.available_memory() == 524 * MIB


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


def test_only_retries_of_later_steps_count() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    cuda.retries = 5
    meter.settle()
    cuda.retries = 7
    assert meter.allocator() == {"idle_bytes": 0, "alloc_retries": 2}


def test_running_out_while_a_graph_is_captured_counts() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    cuda.ooms = 1
    assert meter.allocator()["alloc_retries"] == 1


@pytest.mark.parametrize("module", ["torch.cuda", "torch.accelerator"])
@pytest.mark.parametrize("name", _RESETS)
def test_peaks_and_retries_outlive_a_reset(module: str, name: str, resets: list[Callable[[], None]]) -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    cuda.hold(reserved=10 * GIB, allocated=8 * GIB)
    cuda.retries = 3

    def reset_all() -> None:
        cuda.highest, cuda.retries = dict(cuda.current), 0

    cuda.hold(reserved=2 * GIB, allocated=GIB)
    resets.append(reset_all)
    getattr(sys.modules[module], name)()
    cuda.retries = 1
    peaks = meter.peaks()
    assert (peaks["device_allocated"], peaks["device"]) == (8 * GIB, 10 * GIB + 500 * MIB)
    assert peaks["alloc_retries"] == 4


def test_the_pinned_peak_outlives_a_reset(resets: list[Callable[[], None]]) -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    cuda.pinned = {"allocated_bytes.peak": GIB}
    resets.append(lambda: cuda.pinned.update({"allocated_bytes.peak": 0}))
    sys.modules["torch.cuda"].reset_peak_host_memory_stats()
    assert meter.peaks()["pinned"] == GIB


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


def test_pinned_pages_count_as_host_memory() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    cuda.pinned = {"allocated_bytes.peak": 3 * GIB}
    assert 3 * GIB <= (meter.peaks()["host"] or 0) < 3 * GIB + 256 * MIB


def test_registered_pages_are_private_memory_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True, pinned_use_cuda_host_register:True")
    meter, cuda, _ = meter_on(FakeCard())
    meter.start()
    cuda.pinned = {"allocated_bytes.peak": 3 * GIB}
    peaks = meter.peaks()
    assert peaks["pinned"] == 3 * GIB
    assert (peaks["host"] or 0) < 256 * MIB


@pytest.mark.parametrize(
    ("settings", "applied"), [("expandable_segments:True", ["expandable_segments:True"]), ("max_split_size_mb:64", [])]
)
def test_a_forked_rank_applies_segments_that_grow(
    monkeypatch: pytest.MonkeyPatch, settings: str, applied: list[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    meter_on(FakeCard())[0].start()
    assert calls == applied


def test_locked_buffers_count_as_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, cuda, _ = meter_on(FakeCard())
    cuda.pinned = {"allocated_bytes.peak": GIB}
    monkeypatch.setattr("autods.rank.memory.status_bytes", lambda *names: {"VmLck": 64 * MIB})
    meter.start()
    monkeypatch.setattr("autods.rank.memory.status_bytes", lambda *names: {"VmLck": 0})
    assert meter.peaks()["pinned"] == GIB + 64 * MIB


def test_the_host_peak_is_that_of_private_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, _, _ = meter_on(FakeCard())
    readings = iter((2 * GIB, 2 * GIB, 5 * GIB, GIB))
    monkeypatch.setattr("autods.rank.memory.read_private_bytes", lambda: next(readings))
    meter.start()
    meter.sample()
    assert meter.peaks()["host"] == 3 * GIB


def test_pages_of_files_are_no_private_memory(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(64 * MIB))
    before = read_private_bytes()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert read_private_bytes() - before < 32 * MIB


class FakeEvent:
    """An event of a stream, which the card reaches `at_s` of its clock."""

    def __init__(self, at_s: float, now_s: list[float]) -> None:
        self.at_s, self.now_s = at_s, now_s

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.now_s[0] >= self.at_s

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()  # else torch raises
        assert end.query()
        return 1000 * (end.at_s - self.at_s)


def test_a_forward_takes_what_the_card_needs_for_it() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    now_s, reached_s = [0.0], iter((2.0, 5.0))
    cuda.Event = lambda enable_timing: FakeEvent(next(reached_s), now_s)
    begin, end = meter.mark(), meter.mark()  # the host has launched both at once
    assert meter.seconds_between(begin, end) is None
    now_s[0] = 9.0
    assert meter.seconds_between(begin, end) == pytest.approx(3.0)


def test_a_mark_of_another_stream_may_come_later_than_the_next() -> None:
    meter, cuda, _ = meter_on(FakeCard())
    now_s, reached_s = [3.0], iter((5.0, 2.0))
    cuda.Event = lambda enable_timing: FakeEvent(next(reached_s), now_s)
    begin, end = meter.mark(), meter.mark()
    assert meter.seconds_between(begin, end) is None
