"""A machine that was measured: readings become the rates and shares with which a forecast gives the same seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autods.config.catalogue import Measured, find_machines, format_machine, read_catalogue
from autods.devices import Card
from autods.forecast.predict.prices import PriceList, Work, read_constants
from autods.inspector.measurement import Readings, describe_measured, keep_earlier, list_readings
from autods.rank.record import Reading
from autods.system.host import Hardware

GIB, MIB = 2**30, 2**20
RANKS = 8
H100 = "NVIDIA H100 80GB HBM3"
WORKS = {
    ("matmul", "bf16", 8192): Work(kind="matmul", dtype="bfloat16", flops=2 * 8192.0**3, bytes=6 * 8192**2),
    ("matmul", "fp32", 4096): Work(kind="matmul", dtype="float32", flops=2 * 4096.0**3, bytes=12 * 4096**2),
    ("kernel", "add", 256 * MIB): Work(kind="kernel", bytes=3 * 256 * MIB),
    ("reduction", "norm", 32 * MIB): Work(kind="reduction", bytes=11 * 32 * MIB),
    ("attention", "bf16", 8192): Work(kind="attention", dtype="bfloat16", flops=4e12, bytes=10**9),
    ("copy", "alone", 128 * MIB): Work(kind="copy", bytes=256 * MIB),
    ("pageable_copy", "alone", 128 * MIB): Work(kind="pageable_copy", bytes=256 * MIB),
    ("collective", "all-reduce", 2**15): Work(kind="collective", bytes=2**16, ranks=RANKS),
    ("collective", "all-reduce", 128 * MIB): Work(kind="collective", bytes=256 * MIB, ranks=RANKS),
    ("host", "all threads", 64 * MIB): Work(kind="host", bytes=192 * MIB),
    ("host_optimizer", "CPU Adam", 2**24): Work(kind="host_optimizer", bytes=28 * 2**24),
}
# How this machine differs from the shipped shares.
REAL = Measured(
    fp32_matmul=0.8, memory=0.7, reduction=0.3, nvlink=0.6, pinned_copy=0.7, pageable_copy=0.12, dram=0.5,
    core_gb_per_s=50, first_touch_gb_per_s=3, host_optimizer=0.4, launch_us=15, view_us=3, first_step_us=16, step_us=3,
)  # fmt: skip


def make_hardware(card: str) -> Hardware:
    cards = tuple(
        Card(index=index, name=card, total_bytes=79 * GIB, free_bytes=79 * GIB, bf16=True, capability=(9, 0))
        for index in range(RANKS)
    )
    return Hardware(cpu="Intel Xeon", cores=192, host_bytes=2048 * GIB, host_free_bytes=2000 * GIB, cards=cards)


def read(prices: PriceList) -> Iterator[Reading]:
    """What a benchmark would measure on a machine of these prices."""
    for (kind, name, size), work in WORKS.items():
        seconds = prices.price(work).seconds
        yield Reading(kind=kind, name=name, size=size, seconds=seconds, bytes=work.bytes, flops=work.flops)  # type: ignore[arg-type]
    ours = prices.efficiency
    yield Reading(kind="launch", name="operator", size=99, seconds=ours.launch_us * 1e-6)
    yield Reading(kind="view", name="t", size=1, seconds=ours.view_us * 1e-6)
    for name, speed in (("one thread", ours.core_gb_per_s), ("first touch", ours.first_touch_gb_per_s)):
        yield Reading(kind="host", name=name, size=64 * MIB, seconds=64 * MIB / speed / 1e9, bytes=64 * MIB)


@pytest.fixture
def real() -> PriceList:
    """The prices of eight H100 that are slower than shipped."""
    known = read_catalogue()["h100-80gb"]
    assert known.rates is not None
    rates = replace(known.rates, matmul_share=0.6, attention_share=0.25)
    return PriceList.usual(replace(known, rates=rates, measured=REAL, cores=192), RANKS)


def differences(real: PriceList, measured: PriceList) -> dict[str, float]:
    """How far the measured machine's seconds are from the real one's, as shares, by kind and size of work."""
    return {
        f"{kind} {name} {size}": measured.price(work).seconds / real.price(work).seconds - 1
        for (kind, name, size), work in WORKS.items()
    }


@pytest.mark.parametrize("card", [H100, "NVIDIA H900"])
def test_a_measured_machine_has_the_seconds_of_its_readings(card: str, real: PriceList) -> None:
    """Also where the catalogue has no such card, so that every peak is measured."""
    readings = Readings(list(read(real)), RANKS)
    machine = describe_measured(readings, make_hardware(card), has_nvlink=True, software="torch 2.13")
    found = differences(real, PriceList.usual(machine, RANKS))
    assert max(map(abs, found.values())) < 0.1, found
    ours = PriceList.usual(machine, RANKS).efficiency
    assert (ours.launch_us, ours.view_us) == pytest.approx((15, 3))
    assert machine.has_nvlink


def test_shipped_prices_of_that_machine_are_far_off(real: PriceList) -> None:
    usual = PriceList.usual(read_catalogue()["h100-80gb"], RANKS)
    assert min(differences(real, usual).values()) < -0.4


def test_peaks_of_a_known_card_stay_those_of_its_data_sheet(real: PriceList) -> None:
    known = read_catalogue()["h100-80gb"]
    readings = Readings(list(read(real)), RANKS)
    machine = describe_measured(readings, make_hardware(H100), has_nvlink=True, software="torch 2.13")
    assert machine.rates is not None
    assert known.rates is not None
    assert machine.links is not None
    assert machine.rates.tflops == known.rates.tflops
    assert machine.rates.memory_gb_per_s == known.rates.memory_gb_per_s
    assert machine.links == known.links
    assert machine.driver_names == (H100,)


@pytest.mark.parametrize("lost", ["matmul", "kernel", "attention", "copy", "collective", "host", "host_optimizer"])
def test_a_part_that_failed_leaves_the_catalogues_value(lost: str, real: PriceList, tmp_path: Path) -> None:
    kept = [each for each in read(real) if each.kind != lost]
    machine = describe_measured(Readings(kept, RANKS), make_hardware(H100), has_nvlink=True, software="torch 2.13")
    path = tmp_path / "mine.toml"
    path.write_text(format_machine(machine))
    (again,) = find_machines(str(path))
    measured, shipped = PriceList.usual(again, RANKS), read_constants().efficiency
    of_part = {"kernel": "memory", "collective": "nvlink", "host": "core_gb_per_s", "copy": "pinned_copy"}
    name = of_part.get(lost, "host_optimizer")
    if lost in (*of_part, "host_optimizer"):
        assert getattr(measured.efficiency, name) == getattr(shipped, name)
    assert measured.efficiency.launch_us == pytest.approx(15)


def test_fewer_ranks_keep_the_links_of_more_and_the_disk(real: PriceList) -> None:
    hardware = make_hardware(H100)
    disk = Reading(kind="nvme", name="read", size=GIB, seconds=0.5, bytes=GIB)
    before = Readings([*read(real), disk], RANKS)
    earlier = describe_measured(before, hardware, has_nvlink=True, software="torch 2.13")
    alone = Readings([each for each in read(real) if each.kind != "collective"], 1)
    now = describe_measured(alone, replace(hardware, cards=hardware.cards[:1]), has_nvlink=False, software="torch 2.14")
    machine, rows = keep_earlier(now, earlier)
    assert (machine.gpus, machine.links, machine.nvme_gb_per_s) == (RANKS, earlier.links, earlier.nvme_gb_per_s)
    assert machine.measured == replace(
        earlier.measured, dram=now.measured.dram, host_optimizer=now.measured.host_optimizer
    )
    assert [name for name, _ in rows] == ["links", "NVMe"]
    assert keep_earlier(earlier, now) == (earlier, [])


def test_nothing_measured_on_an_unknown_card_is_no_rate(tmp_path: Path) -> None:
    machine = describe_measured(Readings([], 1), make_hardware("NVIDIA H900"), has_nvlink=False, software="torch 2.13")
    assert (machine.rates, machine.links, machine.measured) == (None, None, Measured())
    path = tmp_path / "mine.toml"
    path.write_text(format_machine(machine))
    assert find_machines(str(path))[0].rates is None


def test_readings_are_listed_by_kind_with_their_sizes() -> None:
    readings = Readings(
        [
            Reading(kind="matmul", name="bf16", size=4096, seconds=2e-3, flops=1e12),
            Reading(kind="matmul", name="bf16", size=8192, seconds=1e-3, flops=0.7e12),
            Reading(kind="collective", name="all-reduce", size=MIB, seconds=1e-3, bytes=2 * MIB),
            Reading(kind="launch", name="operator", size=99, seconds=15e-6),
        ],
        2,
    )
    assert dict(list_readings(readings)) == {
        "matmul bf16": "4096: 500 TFLOP/s, 8192: 700 TFLOP/s",
        "all-reduce": "1.0 MiB: 2.1 GB/s",
        "launch of an operator": "15 µs",
    }
