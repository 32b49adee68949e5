"""CPU ranks stand in for GPUs: calls that only select a GPU or wait for one do nothing."""

from __future__ import annotations

import pytest
import torch

from autods.rank.script.surroundings import ignore_cuda_calls, keep_cards


def no_cuda(*args, **kwargs):
    raise AssertionError("Torch not compiled with CUDA enabled")


def test_selecting_a_gpu_does_nothing_and_is_noted_once(monkeypatch):
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "ipc_collect", "current_device"):
        monkeypatch.setattr(torch.cuda, name, no_cuda)
    stand_ins: list[str] = []
    ignore_cuda_calls(stand_ins)
    for _ in range(2):
        assert torch.cuda.set_device(1) is None
    assert len(stand_ins) == 1
    assert f"({__file__}:" in stand_ins[0]
    assert stand_ins[0].startswith("torch.cuda.set_device (")
    with pytest.raises(AssertionError, match="not compiled"):
        torch.cuda.current_device()


def test_cards_stay_when_a_library_restores_the_environment():
    environment: dict[str, str] = {}  # a library has cleared it
    for value in ("0,1", "3"):
        keep_cards({"CUDA_VISIBLE_DEVICES": "0,1"}, dict.__setitem__, environment, "CUDA_VISIBLE_DEVICES", value)
        assert environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
