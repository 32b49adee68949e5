"""CPU ranks stand in for GPUs: what a script says of a GPU is taken for them, as long as it places nothing there."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from autods.trial.script.callsite import installed_in
from autods.trial.script.cpu_ranks import _NEEDS_CUDA, _choose_no_card
from autods.trial.script.integrations.config import when_imported
from autods.trial.script.integrations.hf_trainer import _way_out
from autods.trial.script.integrations.lightning import _on_cpu_ranks
from autods.trial.script.sandbox import _disabled


def no_cuda(*args, **kwargs):
    raise AssertionError("Torch not compiled with CUDA enabled")


def test_to_choose_a_card_and_to_wait_for_it_does_nothing_and_to_use_it_is_refused():
    cuda = SimpleNamespace(**dict.fromkeys((*_NEEDS_CUDA, "current_device"), no_cuda))
    stood_in: list[str] = []
    _choose_no_card(cuda, stood_in)
    for _ in range(2):
        assert cuda.set_device(1) is None
    assert len(stood_in) == 1
    assert f"torch.cuda.set_device ({__file__}:" in stood_in[0]
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
    found, stood_in = {}, []
    _on_cpu_ranks(lambda self, **kwargs: found.update(kwargs), stood_in)(None, **said)
    assert found == meant
    assert len(stood_in) == (said.get("accelerator") in ("gpu", "cuda"))


def test_arguments_that_are_parsed_are_mended_after_the_dashes():
    said = [_way_out("deepspeed", "ds_config") for parsed in (True,)]
    assert said == ["add --deepspeed {ds_config} after --"]


def test_arguments_that_are_written_down_are_mended_where_they_stand():
    said = _way_out("deepspeed", "ds_config")
    assert said == "let `deepspeed=` there take its value from the command line, given as {ds_config} after --"


def test_what_pip_installed_elsewhere_is_not_the_users_own(tmp_path):
    (tmp_path / "site" / "peft-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    found = installed_in([str(tmp_path / "site"), str(tmp_path / "project"), "", str(tmp_path / "nowhere")])
    assert f"{tmp_path}/site/" in found
    assert not any(one.startswith(f"{tmp_path}/project") for one in found)


def test_a_module_is_told_of_as_soon_as_it_is_imported_and_only_then(tmp_path, monkeypatch):
    (tmp_path / "tracker_of_runs.py").write_text("def init(mode=None):\n    return mode\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = []
    when_imported("tracker_of_runs", lambda module: (told.append(module.__name__), _disabled(module)))
    assert told == []
    tracker = importlib.import_module("tracker_of_runs")
    assert told == ["tracker_of_runs"]
    assert tracker.init(mode="online") == "disabled"
    when_imported("tracker_of_runs", lambda module: told.append("at once"))
    assert told[-1] == "at once"
