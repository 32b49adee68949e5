from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autods.config.catalogue import (
    Measured,
    describe_this_machine,
    find_by_driver_name,
    find_machines,
    format_machine,
    measured_path,
    read_catalogue,
)
from autods.devices import Card
from autods.errors import InputError
from autods.system.host import Hardware, data_folder

GIB = 2**30


def test_every_machine_has_its_files_name_and_a_source() -> None:
    files = {path.stem for path in (data_folder("configs") / "hardware").glob("*.toml")}
    machines = read_catalogue()
    assert set(machines) == files
    for machine in machines.values():
        assert "memory:" in machine.source
        assert "node:" in machine.source
        assert machine.links is not None
        assert machine.host_bytes is not None
        assert machine.host_bytes > machine.device_bytes


def test_the_usable_memory_is_below_the_nominal_one() -> None:
    for name, machine in read_catalogue().items():
        nominal = int(name.rpartition("-")[2].removesuffix("gb"))
        assert 0.88 * nominal * GIB < machine.device_bytes < nominal * GIB, name


def test_cards_before_ampere_have_no_bf16() -> None:
    without = {name for name, machine in read_catalogue().items() if not machine.bf16}
    assert without == {"t4-16gb", "v100-16gb", "v100-32gb", "v100-pcie-16gb", "v100-pcie-32gb"}


def test_machines_come_smallest_first() -> None:
    assert [machine.name for machine in find_machines("h100-80gb, t4-16gb,t4-16gb")] == ["t4-16gb", "h100-80gb"]
    sizes = [machine.device_bytes for machine in find_machines("all")]
    assert sizes == sorted(sizes)
    assert len(sizes) >= 15


def test_every_machine_has_the_peaks_of_its_device() -> None:
    for machine in read_catalogue().values():
        rates = machine.rates
        assert rates is not None
        assert rates.source
        assert rates.tflops.fp16 is not None
        assert rates.tflops.fp16 > rates.tflops.fp32
        assert (rates.capability is None) == machine.title.startswith("AMD")


def test_peaks_are_those_of_the_data_sheets() -> None:
    h100, t4 = find_machines("t4-16gb,h100-80gb")[::-1]
    assert h100.rates is not None
    assert h100.rates.capability == (9, 0)
    assert (h100.rates.tflops.bf16, h100.rates.tflops.tf32, h100.rates.memory_gb_per_s) == (989, 495, 3350)
    assert t4.rates is not None
    assert t4.rates.capability == (7, 5)
    assert (t4.rates.tflops.bf16, t4.rates.tflops.fp16) == (None, 65)


def test_a_b200_has_the_bandwidth_that_its_driver_says() -> None:
    (b200,) = find_machines("b200-192gb")
    assert b200.rates is not None
    assert b200.rates.memory_gb_per_s == round(7680 / 8 * 2 * 3.996)


def test_a_card_without_a_link_of_its_own_has_no_nvlink() -> None:
    catalogue = read_catalogue()
    links = {name: machine.links.nvlink_gb_per_s for name, machine in catalogue.items() if machine.links}
    assert links["a100-80gb"] == 600
    assert links["rtx4090-24gb"] is None


def test_a_card_is_found_by_its_name_in_the_driver() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": "a100-80gb", "A100-SXM4-80GB": "a100-80gb", "A100-PCIE-40GB": "a100-pcie-40gb",
        "NVIDIA A100 80GB PCIe": "a100-pcie-80gb", "NVIDIA H100 PCIe": "h100-pcie-80gb", "NVIDIA A10": "a10-24gb",
        "NVIDIA A10G": "a10g-24gb", "Tesla T4": "t4-16gb", "NVIDIA L40": "l40-48gb", "NVIDIA L40S": "l40s-48gb",
        "NVIDIA H100 NVL": "h100-nvl-94gb", "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
        "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada-48gb", "NVIDIA A100 80GB PCIe x": None,
    }  # fmt: skip
    found = {name: find_by_driver_name(name) for name in names}
    assert {name: known and known.name for name, known in found.items()} == names


def test_workstations_say_that_their_network_is_assumed() -> None:
    for name in ("rtx3090-24gb", "rtx4090-24gb", "rtx5090-32gb", "a6000-48gb", "rtx6000-ada-48gb"):
        links = read_catalogue()[name].links
        assert links is not None
        assert (links.network, links.network_gb_per_s) == ("10 Gbit/s Ethernet, assumed", 1.25)


def test_no_two_cards_share_a_name_in_the_driver() -> None:
    names = [name for machine in read_catalogue().values() for name in machine.driver_names]
    assert len(names) == len(set(names)) >= 18


def test_a_machine_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"--on a100.*\n.*a100-80gb"):
        find_machines("a100")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("bf16 = false", "bf16 = false\ncolour = 'green'", "unknown key 'colour'"),
        ("gpus = 4", "gpus = 'four'", "gpus is 'four', not a whole number"),
        ("gpus = 4", "gpus = 0", "node.gpus is 0; it must be above 0"),
        ("gpus = 4\n", "", "machine.node lacks 'gpus'"),
        ("bytes = 15", "size = 15", "machine.device has the unknown key 'size'; it has bytes, driver_names, bf16"),
        ("bytes = 15_633_680_957", "bytes = 1.5", "machine.device.bytes is 1.5, not a whole number"),
        ("[node]\n", "", "machine lacks 'node'"),
        ("bf16 = false", "bf16 = false\nhost_bytes = 8", "machine.device has the unknown key 'host_bytes'"),
        ('"7.5"', '"sm75"', "compute capability 'sm75'"),
        ("fp16 = 65", "fp16 = 65\nbf16 = 65", "contradict each other"),
        ("fp16 = 65", "fp4 = 65", "unknown key 'fp4'"),
        ("memory_gb_per_s = 320", "memory_gb_per_s = 0", "rates.memory_gb_per_s is 0"),
        ("matmul_share = 0.50", "matmul_share = 50", "rates.matmul_share is 50; it must be above 0 and at most 1"),
        ("to_host_gb_per_s = 16", "to_host_gb_per_s = -16", "links.to_host_gb_per_s is -16"),
    ],
)
def test_a_file_that_is_no_machine_is_refused_with_the_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = (data_folder("configs") / "hardware" / "t4-16gb.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace(old, new))
    with pytest.raises(InputError) as caught:
        find_machines(str(tmp_path / "mine.toml"))
    assert said in str(caught.value)
    assert str(tmp_path / "mine.toml") in str(caught.value)


def test_a_written_machine_is_read_as_the_same(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    for machine in read_catalogue().values():
        machine = replace(machine, measured=Measured(memory=0.91, launch_us=14.0), cores=24)
        path.write_text(format_machine(machine, notes=('matmul in bf16: "700" TFLOP/s',)))
        assert find_machines(str(path)) == (machine,)


CARD = Card(index=0, name="NVIDIA H100 80GB HBM3", total_bytes=79 * GIB, free_bytes=79 * GIB, bf16=True)
HARDWARE = Hardware(cpu="AMD EPYC", cores=24, host_bytes=99 * GIB, host_free_bytes=99 * GIB, cards=(CARD, CARD))


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a machine in the cache that was measured with two of these cards."""
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path))
    path = measured_path(CARD.name, HARDWARE)
    path.parent.mkdir()
    machine = replace(read_catalogue()["h100-80gb"], name="mine", gpus=2, measured=Measured(nvlink=0.5))
    path.write_text(format_machine(machine))
    return path


def test_what_was_measured_here_is_the_machines_own(measured: Path) -> None:
    here = describe_this_machine(HARDWARE.cards, HARDWARE)
    assert here.measured == Measured(nvlink=0.5)
    assert here.source.endswith(": mine")
    other = replace(CARD, name="NVIDIA H200")
    assert describe_this_machine([other], HARDWARE).measured == Measured()
    assert describe_this_machine([CARD], replace(HARDWARE, cpu="Intel Xeon")).measured == Measured()


def test_a_measurement_in_another_form_counts_as_none(measured: Path) -> None:
    measured.write_text(measured.read_text().replace("nvlink =", "nvlink_share ="))
    assert describe_this_machine([CARD], HARDWARE).source.endswith(": h100-80gb")


def test_no_measured_value_may_be_below_zero(measured: Path) -> None:
    measured.write_text(measured.read_text().replace("nvlink = 0.5", "nvlink = -1"))
    with pytest.raises(InputError, match=r"measured\.nvlink is -1; it must be above 0"):
        find_machines(str(measured))


def test_a_machine_of_a_file_is_asked_for_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (data_folder("configs") / "hardware" / "t4-16gb.toml").read_text()
    path.write_text(text.replace('name = "t4-16gb"', 'name = "mine"'))
    assert [machine.on for machine in find_machines(f"{path},l4-24gb")] == [str(path), "l4-24gb"]


def test_two_different_machines_of_one_name_are_refused(tmp_path: Path) -> None:
    """A copy of a file of the catalogue that kept its name would hide that of the catalogue, or be hidden."""
    path = tmp_path / "mine.toml"
    text = (data_folder("configs") / "hardware" / "t4-16gb.toml").read_text()
    path.write_text(text)
    assert len(find_machines(f"{path},t4-16gb")) == 1  # they are the same
    path.write_text(text.replace("memory_gb_per_s = ", "memory_gb_per_s = 1"))
    for names in (f"{path},t4-16gb", f"t4-16gb,{path}"):
        with pytest.raises(InputError, match="are both named 't4-16gb', and differ"):
            find_machines(names)
