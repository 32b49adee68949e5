"""Lightning's arguments about GPUs mean the CPU ranks that stand in for them."""

from __future__ import annotations

import pytest

from autods.rank.script.adapters.lightning import use_cpu_ranks


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({"accelerator": "gpu", "devices": 2}, {"accelerator": "cpu", "devices": 2}),
        ({"accelerator": "cuda", "devices": -1}, {"accelerator": "cpu", "devices": 4}),
        ({"accelerator": "auto", "devices": [0, 1]}, {"accelerator": "auto", "devices": 2}),
        ({"max_epochs": 3}, {"max_epochs": 3}),
    ],
)
def test_devices_count_ranks(monkeypatch, given, passed):
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments, stand_ins = {}, []
    use_cpu_ranks(stand_ins, lambda self, **kwargs: arguments.update(kwargs), None, **given)
    assert arguments == passed
    assert len(stand_ins) == (given.get("accelerator") in ("gpu", "cuda"))
