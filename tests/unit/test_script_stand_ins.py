"""CPU ranks stand in for GPUs: what a script says of a GPU is taken for them, as long as it places nothing there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autods.trial.script.huggingface import _way_out
from autods.trial.script.lightning import _on_cpu_ranks
from autods.trial.script.machine import _SAYS_WHICH, _choose_no_card


def no_cuda(*args, **kwargs):
    raise AssertionError("Torch not compiled with CUDA enabled")


def test_to_choose_a_card_and_to_wait_for_it_does_nothing_and_to_use_it_is_refused():
    cuda = SimpleNamespace(**dict.fromkeys((*_SAYS_WHICH, "current_device"), no_cuda))
    _choose_no_card(cuda)
    assert cuda.set_device(1) is None
    assert cuda.synchronize() is None
    with pytest.raises(AssertionError, match="not compiled"):
        cuda.current_device()


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"accelerator": "gpu", "devices": 2}, {"accelerator": "cpu", "devices": 2}),
        ({"accelerator": "cuda", "devices": -1}, {"accelerator": "cpu", "devices": 4}),
        ({"accelerator": "auto", "devices": [0, 1]}, {"accelerator": "auto", "devices": 2}),
        ({"max_epochs": 3}, {"max_epochs": 3}),
    ],
)
def test_lightning_counts_ranks_where_a_script_counts_gpus(monkeypatch, said, meant):
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = {}
    _on_cpu_ranks(lambda self, **kwargs: found.update(kwargs))(None, **said)
    assert found == meant


def test_arguments_that_are_parsed_are_mended_after_the_dashes():
    said = [_way_out("deepspeed", "ds_config") for parsed in (True,)]
    assert said == ["add --deepspeed {ds_config} after --"]


def test_arguments_that_are_written_down_are_mended_where_they_stand():
    said = _way_out("deepspeed", "ds_config")
    assert said == "let `deepspeed=` there take its value from the command line, given as {ds_config} after --"
