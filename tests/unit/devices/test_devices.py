"""The values of the two devices, and how they are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autods.devices import CPU, CUDA, DEVICES, Card, cpu, find_device
from autods.devices.cpu import multiplies_halves, read_processor_flags
from autods.errors import InputError


def test_each_device_is_found_by_its_name() -> None:
    assert [find_device(name) for name in ("cuda", "cpu")] == [CUDA, CPU]


def test_another_word_is_refused_with_the_known_names() -> None:
    with pytest.raises(InputError, match="there is no device 'tpu'\n  give --device cuda or --device cpu"):
        find_device("tpu")


def test_cuda_ranks_have_cards_and_memory_of_their_own() -> None:
    assert (CUDA.backend, CUDA.has_cards, CUDA.shares_host_memory, CUDA.stands_in) == ("nccl", True, False, False)
    assert CUDA.has_caching_allocator


def test_cpu_ranks_stand_in_for_gpus_on_host_memory() -> None:
    assert (CPU.backend, CPU.has_cards, CPU.shares_host_memory, CPU.stands_in) == ("gloo", False, True, True)
    assert not CPU.has_caching_allocator


@pytest.mark.parametrize("shared", [False, True])
def test_cuda_ranks_take_a_gpu_each_and_one_cpu(shared: bool) -> None:
    assert CUDA.list_resources(4, shared=shared) == {"CPU": 1.0, "GPU": 4.0}


def test_cpu_ranks_take_a_cpu_each_only_from_others() -> None:
    assert CPU.list_resources(4, shared=True) == {"CPU": 4.0}
    assert CPU.list_resources(4, shared=False) == {"CPU": 1.0}


def test_only_a_process_that_used_no_cuda_may_be_forked() -> None:
    assert (CUDA.survives_fork, CPU.survives_fork) == (False, True)


def test_cpu_ranks_see_no_card_and_have_none_to_read() -> None:
    environment = CPU.complete_environment({"CUDA_VISIBLE_DEVICES": "0"}, None)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["DS_ACCELERATOR"]) == ("", "cpu")
    assert CPU.read_cards().cards == CPU.describe_cards(()) == ()
    assert CPU.read_used_bytes() is None


def test_the_user_sets_what_is_only_a_default() -> None:
    environment = CUDA.complete_environment({"NCCL_DEBUG": "INFO", "DS_ACCELERATOR": "cpu"}, None)
    assert (environment["NCCL_DEBUG"], environment["DS_ACCELERATOR"]) == ("INFO", "cuda")
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_each_device_is_registered_under_its_name() -> None:
    assert {name: device.name for name, device in DEVICES.items()} == {"cuda": "cuda", "cpu": "cpu"}


AVX2 = "fpu sse2 avx avx2 fma"


@pytest.mark.parametrize(
    ("flags", "is_fast"),
    [
        (AVX2, False),
        (f"{AVX2} avx512f avx512cd", False),
        (f"{AVX2} avx512f avx512bw avx512vl avx512dq", True),
        (f"{AVX2} avx_vnni avx_ne_convert", True),
        ("fp asimd", True),
        ("", True),
    ],
)
def test_processors_without_avx_512_are_slow_in_bf16(
    flags: str, is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: sse2\n")
    found = read_processor_flags(tmp_path / "cpuinfo")
    assert multiplies_halves(found) is is_fast
    monkeypatch.setattr(cpu, "read_processor_flags", lambda: found)
    assert (CPU.judge_precision("bf16", ()) is None) is is_fast
    assert CPU.judge_precision("fp32", ()) is None


def test_flags_that_the_kernel_does_not_list_are_none(tmp_path: Path) -> None:
    assert read_processor_flags(tmp_path / "none") == frozenset()


def test_old_cards_are_slow_in_bf16_alone() -> None:
    card = Card(index=0, name="Tesla V100", total_bytes=1, free_bytes=1, bf16=False)
    slow = CUDA.judge_precision("bf16", [replace(card, bf16=True), card])
    assert slow is not None
    assert str(slow) == "Tesla V100 only emulates bf16 (--precision fp16, in which it computes by itself)"
    assert CUDA.judge_precision("bf16", [replace(card, bf16=True)]) is None
    assert CUDA.judge_precision("fp16", [card]) is None
