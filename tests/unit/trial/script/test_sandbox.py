"""The sandbox acts on libraries when a script imports them."""

from __future__ import annotations

import importlib
import sys

import pytest

from autods.trial.script.sandbox import disable_wandb, read_lmdb_unlocked, when_imported

STAND_INS = {
    "wandb": "def init(mode=None):\n    return mode\n",
    "lmdb": "def open(path, readonly=False, lock=True):\n    return lock\n",
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Importable stand-ins for packages, not imported yet."""
    for name, text in STAND_INS.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module
    for name in STAND_INS:
        sys.modules.pop(name, None)


def test_an_action_runs_once_its_module_is_imported(stand_in):
    actions = []
    when_imported("wandb", lambda: actions.append("imported"))
    assert actions == []
    stand_in("wandb")
    assert actions == ["imported"]
    when_imported("wandb", lambda: actions.append("at once"))
    assert actions == ["imported", "at once"]


def test_wandb_stays_disabled_in_a_script_that_wants_it_online(stand_in):
    when_imported("wandb", disable_wandb)
    assert stand_in("wandb").init(mode="online") == "disabled"


def test_an_lmdb_that_is_only_read_gets_no_lock_file(stand_in):
    when_imported("lmdb", read_lmdb_unlocked)
    assert stand_in("lmdb").open("data", readonly=True) is False
    assert stand_in("lmdb").open("data") is True
