"""The sandbox acts on libraries when a script imports them."""

from __future__ import annotations

import importlib
import sys

import pytest

from autods.trial.script.sandbox import disable_wandb, when_imported


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """An importable stand-in for wandb, not imported yet."""
    (tmp_path / "wandb.py").write_text("def init(mode=None):\n    return mode\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield lambda: importlib.import_module("wandb")
    sys.modules.pop("wandb", None)


def test_an_action_runs_once_its_module_is_imported(wandb):
    actions = []
    when_imported("wandb", lambda: actions.append("imported"))
    assert actions == []
    wandb()
    assert actions == ["imported"]
    when_imported("wandb", lambda: actions.append("at once"))
    assert actions == ["imported", "at once"]


def test_wandb_stays_disabled_in_a_script_that_wants_it_online(wandb):
    when_imported("wandb", disable_wandb)
    assert wandb().init(mode="online") == "disabled"
