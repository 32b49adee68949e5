import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autods.devices import describe_shared_cards, find_memory_nodes
from autods.devices.cuda import (
    describe_card_names,
    explain_order,
    find_loaded_library,
    find_numa_node,
    is_cuda_initialized,
    read_nvml,
    read_used_bytes,
    shut_nvml_down,
    uuids_to_indices,
)
from autods.devices.torch_build import TorchBuild
from autods.system.host import Hardware, read_hardware
from tests.support.scripted_nvml import GIB, FakeCard, FakeNvml, NVMLError, four


def slices() -> FakeNvml:
    """A card in MIG mode, whose second place is empty."""
    parts = [
        FakeCard(uuid="MIG-1", name="A100 MIG 3g.40gb", total_bytes=39 * GIB),
        None,
        FakeCard(uuid="MIG-2", name="A100 MIG 1g.10gb", total_bytes=9 * GIB),
    ]
    return FakeNvml([FakeCard(name="A100", total_bytes=79 * GIB, slices=parts)])


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1", [0, 1]),
        (" 3 , 1", [3, 1]),
        ("GPU-c,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("GPU-z", []),
        ("1,0,1", []),
        ("GPU-b,1", []),
    ],
)
def test_cuda_visible_devices_is_honoured_as_cuda_does(visible: str | None, indices: list[int]) -> None:
    nvml = four()
    assert [card.index for card in read_nvml(visible, nvml).cards] == indices
    assert not nvml.open


def test_the_beginning_of_a_uuid_names_the_card_if_it_is_unique() -> None:
    nvml = FakeNvml([FakeCard(uuid="GPU-8932f937-d72c"), FakeCard(uuid="GPU-8a11c2d0-02fb")])
    assert [card.index for card in read_nvml("GPU-8a,GPU-8932f937", nvml).cards] == [1, 0]
    assert uuids_to_indices("GPU-8a", nvml) == "1"
    assert read_nvml("GPU-8", nvml).cards == ()


def test_a_lost_card_is_a_problem_and_no_end_of_the_list() -> None:
    nvml = FakeNvml([FakeCard(uuid="GPU-a", lost=True), FakeCard(uuid="GPU-b")])
    assert (read_nvml(None, nvml).unusable or "").startswith("NVML: GPU is lost\n  see nvidia-smi, and dmesg")
    assert read_used_bytes(None, nvml) is None
    assert [card.uuid for card in read_nvml("1", nvml).cards] == ["GPU-b"]


@pytest.mark.parametrize("fault", [8, 11, 999])  # without power, without interrupts, unknown
def test_a_card_that_does_not_work_is_no_end_of_the_list(fault: int) -> None:
    nvml = FakeNvml([FakeCard(uuid="GPU-a"), FakeCard(uuid="GPU-b", fault=fault), FakeCard(uuid="GPU-c")])
    for visible in (None, "0,1,2"):
        assert (read_nvml(visible, nvml).unusable or "").startswith(f"NVML: error {fault}\n")
    assert [card.uuid for card in read_nvml("0,2", nvml).cards] == ["GPU-a", "GPU-c"]


def test_cards_that_this_user_may_not_use_are_not_shown() -> None:
    nvml = FakeNvml([FakeCard(uuid="GPU-a", fault=4), FakeCard(uuid="GPU-b")])
    assert [card.uuid for card in read_nvml(None, nvml).cards] == ["GPU-b"]
    assert read_nvml("0,1", nvml).cards == ()


def test_a_card_that_shares_host_memory_is_said() -> None:
    seen = read_nvml(None, FakeNvml([FakeCard(name="NVIDIA GB10", shares_memory=True)]))
    assert (seen.unusable or "").startswith("NVML tells no memory size: the card shares the host's memory")


def test_a_cards_memory_excludes_the_drivers_reserve() -> None:
    nvml = FakeNvml([FakeCard(name="H100", total_bytes=79 * GIB, reserved_bytes=GIB // 2)])
    (card,) = read_nvml(None, nvml).cards
    assert (card.name, card.total_bytes, card.free_bytes, card.others_bytes) == ("H100", 79 * GIB, 79 * GIB, 0)


def test_older_drivers_count_their_reserve_as_used() -> None:
    nvml = FakeNvml([FakeCard(total_bytes=16 * GIB, reserved_bytes=GIB // 2)], new=False)
    (card,) = read_nvml(None, nvml).cards
    assert card.usable_bytes == 16 * GIB


def test_what_other_processes_hold_is_subtracted_and_said() -> None:
    nvml = FakeNvml([FakeCard(used_bytes=3 * GIB, pids=(4121, 7)), FakeCard(uuid="GPU-b", used_bytes=4 * 2**20)])
    cards = read_nvml(None, nvml).cards
    assert [card.usable_bytes for card in cards] == [13 * GIB, 16 * GIB]
    (said,) = describe_shared_cards(cards)
    assert said == (
        "card 0 (A Card): other processes (pid 4121, 7) hold 3.0 GiB of its 16.0 GiB, 13.0 GiB are left for a rank"
    )


def test_cards_from_compute_capability_8_on_compute_in_bf16() -> None:
    capabilities = ((7, 0), (7, 5), (8, 0), (8, 9), (12, 0), None)
    cards = read_nvml(None, FakeNvml([FakeCard(capability=each) for each in capabilities])).cards
    assert [card.bf16 for card in cards] == [False, False, True, True, True, True]


def test_a_card_in_mig_mode_is_its_first_slice_to_a_process() -> None:
    for visible in (None, "0"):
        (card,) = read_nvml(visible, slices()).cards
        assert (card.total_bytes, card.slice, card.uuid) == (39 * GIB, True, "MIG-1")


def test_a_named_slice_is_that_slice_alone() -> None:
    (card,) = read_nvml("MIG-2,MIG-1", slices()).cards
    assert (card.total_bytes, card.name, card.index) == (9 * GIB, "A100 MIG 1g.10gb", 2)


def test_beside_whole_cards_slices_are_not_shown() -> None:
    nvml = slices()
    nvml.cards = [*nvml.cards, FakeCard(uuid="GPU-b", total_bytes=24 * GIB, knows_mig=False)]
    assert [card.total_bytes for card in read_nvml(None, nvml).cards] == [24 * GIB]


def test_a_card_in_mig_mode_without_a_slice_cannot_be_used() -> None:
    assert read_nvml(None, FakeNvml([FakeCard(slices=[])])).cards == ()


def test_the_driver_says_its_version_and_the_newest_cuda_that_it_runs() -> None:
    seen = read_nvml(None, FakeNvml([FakeCard()], driver=b"535.54.03", cuda=12020))
    assert (seen.driver, seen.cuda, seen.unusable) == ("535.54.03", "12.2", None)


@pytest.mark.parametrize("value", [9, 12])
def test_a_machine_without_a_driver_shows_no_cards_and_has_no_problem(value: int) -> None:
    seen = read_nvml(None, FakeNvml(problem=NVMLError("Driver Not Loaded", value)))
    assert (seen.cards, seen.unusable) == ((), None)


def test_a_driver_that_was_updated_under_us_is_a_problem() -> None:
    seen = read_nvml(None, FakeNvml(problem=NVMLError("RM has detected an NVML/RM version mismatch.", 18)))
    assert (seen.unusable or "").startswith("NVML: RM has detected an NVML/RM version mismatch.\n")


def test_uuids_become_numbers_with_a_warning() -> None:
    assert uuids_to_indices("GPU-c,0", four()) == "2,0"
    (said,) = describe_card_names("GPU-c,0", four())
    assert "CUDA_VISIBLE_DEVICES=2,0 CUDA_DEVICE_ORDER=PCI_BUS_ID" in said
    for numbers in ("3,1", "", None):
        assert describe_card_names(numbers, four()) == ()


def test_a_slice_has_no_number() -> None:
    assert uuids_to_indices("MIG-1", slices()) == "MIG-1"
    assert "they will fail" in describe_card_names("MIG-1", slices())[0]


def test_used_bytes_are_those_of_the_cards_that_cuda_shows() -> None:
    nvml = four()
    nvml.cards[2].used_bytes = 3 * GIB
    assert read_used_bytes("2,0", nvml) == (3 * GIB, 0)
    assert read_used_bytes(None, FakeNvml(problem=NVMLError("no", 9))) is None
    assert not nvml.open


def looked(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, build: TorchBuild) -> Hardware:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("autods.devices.cuda.read_torch_build", lambda: build)
    return read_hardware()


def test_cards_with_a_driver_that_runs_torchs_cuda_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    here = looked(monkeypatch, FakeNvml([FakeCard()], cuda=13000), TorchBuild(version="2.13.0", cuda=(13, 2)))
    assert (here.unusable, here.cuda, here.driver, len(here.cards)) == (None, "13.0", "580.95.05", 1)


def test_a_driver_too_old_for_torch_is_named_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeCard()], driver="535.54.03", cuda=12020)
    here = looked(monkeypatch, nvml, TorchBuild(version="2.11.0+cu130", cuda=(13, 0)))
    assert here.unusable is not None
    assert "torch 2.11.0+cu130 needs CUDA 13.0, and the driver 535.54.03 runs 12.2 at most" in here.unusable


def test_a_container_that_may_only_look_at_its_cards_cannot_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    build = TorchBuild(version="2.13.0", cuda=(13, 2))
    here = looked(monkeypatch, FakeNvml([FakeCard()], cuda=None), build)
    assert (here.unusable or "").startswith("the driver's libcuda.so.1 is not there")
    assert looked(monkeypatch, FakeNvml([], cuda=None), build).unusable is None


@pytest.mark.parametrize(("capability", "is_too_old"), [((7, 0), True), ((7, 5), False), (None, False)])
def test_a_card_too_old_for_torchs_cuda_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, is_too_old: bool
) -> None:
    nvml = FakeNvml([FakeCard(), FakeCard(name="Tesla V100", uuid="GPU-b", capability=capability)])
    unusable = looked(monkeypatch, nvml, TorchBuild(version="2.11.0+cu130", cuda=(13, 0))).unusable or ""
    assert bool(unusable) is is_too_old
    if is_too_old:
        assert "needs compute capability 7.5 or later, and the card has 7.0" in unusable
        assert "a build of torch for CUDA 12.6" in unusable
    assert looked(monkeypatch, nvml, TorchBuild(version="2.9.1+cu126", cuda=(12, 6))).unusable is None


@pytest.mark.parametrize(
    ("order", "visible", "names", "is_refused"),
    [
        ("FASTEST_FIRST", None, ("A100", "T4"), True),
        ("FASTEST_FIRST", "GPU-b, 0", ("A100", "T4"), True),
        ("FASTEST_FIRST", "GPU-b", ("A100", "T4"), False),
        ("FASTEST_FIRST", "0", ("A100", "A100"), False),
        ("PCI_BUS_ID", "0", ("A100", "T4"), False),
        (None, "0", ("A100", "T4"), False),
    ],
)
def test_numbers_of_cards_that_differ_count_as_the_driver_does(
    order: str | None, visible: str | None, names: tuple[str, str], is_refused: bool
) -> None:
    nvml = FakeNvml([FakeCard(name=names[0]), FakeCard(name=names[1], uuid="GPU-b")])
    assert ("set CUDA_DEVICE_ORDER=PCI_BUS_ID" in (explain_order(order, visible, nvml) or "")) is is_refused


def test_a_torch_without_cuda_beside_a_card_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    build = TorchBuild(version="2.13.0+cpu", cuda=None)
    assert "built without CUDA" in str(looked(monkeypatch, FakeNvml([FakeCard()]), build).unusable)
    assert looked(monkeypatch, FakeNvml(problem=NVMLError("none", 12)), build).unusable is None


def test_the_driver_tells_which_numa_nodes_are_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the memory of the other card is no host memory, either
    cards = [FakeCard(memory_node=1), FakeCard(uuid="GPU-b", memory_node=9), FakeCard(uuid="GPU-c")]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(cards))  # type: ignore[arg-type]
    assert find_memory_nodes() == {1, 9}


@dataclass
class Nvml:
    open: int

    def nvmlShutdown(self) -> int:
        if not self.open:
            return 1
        self.open -= 1
        return 0


@dataclass
class Cuda:
    answer: int

    def cuDeviceGetCount(self, count: Any) -> int:
        return self.answer


def with_libraries(**libraries: Any) -> Callable[[str], Any]:
    return lambda name: libraries.get(name.removeprefix("lib").partition(".")[0].replace("-", "_"))


def test_nvml_is_shut_as_often_as_imports_opened_it() -> None:
    nvml = Nvml(open=3)
    shut_nvml_down(with_libraries(nvidia_ml=nvml))
    assert nvml.open == 0
    shut_nvml_down(with_libraries())  # not even loaded


@pytest.mark.parametrize(("answer", "began"), [(3, False), (0, True), (100, True)])
def test_cuda_initialized_by_another_package_is_noticed(answer: int, began: bool) -> None:
    assert is_cuda_initialized(with_libraries(cuda=Cuda(answer))) is began


def test_cuda_that_is_not_loaded_is_not_initialized() -> None:
    assert not is_cuda_initialized(with_libraries())
    assert find_loaded_library("libno-such-library.so.1") is None


@pytest.mark.parametrize(
    ("address", "text", "node"),
    [
        ("00000000:3B:00.0", "1\n", 1),
        ("00000000:3B:00.0", "-1\n", None),
        ("00000000:3B:00.0", None, None),
        (None, "1", None),
    ],
)
def test_a_cards_numa_node_is_the_kernels(
    tmp_path: Path, address: str | None, text: str | None, node: int | None
) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    if text is not None:
        (tmp_path / "0000:3b:00.0/numa_node").write_text(text)
    card = FakeCard(address=address)
    assert find_numa_node(FakeNvml(cards=[card]), card, tmp_path) == node
