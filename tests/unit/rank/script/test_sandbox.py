"""The sandbox acts on libraries when a script imports them."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from autods.rank.patching import when_imported
from autods.rank.script.sandbox import disable_wandb, list_free_folders, read_lmdb_unlocked, skip_load
from tests.support.script_trials import script_job

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


def test_wandb_stays_disabled_in_a_script_that_wants_it_online(stand_in):
    when_imported("wandb", disable_wandb)
    assert stand_in("wandb").init(mode="online") == "disabled"


def test_an_lmdb_that_is_only_read_gets_no_lock_file(stand_in):
    when_imported("lmdb", read_lmdb_unlocked)
    assert stand_in("lmdb").open("data", readonly=True) is False
    assert stand_in("lmdb").open("data") is True


def test_caches_are_free_through_links_a_users_folder_is_not(tmp_path, monkeypatch):
    home, disk, headers = tmp_path / "home", tmp_path / "disk", tmp_path / "inductor"
    (home / ".cache").mkdir(parents=True), (disk / "hf").mkdir(parents=True)
    (home / ".cache" / "huggingface").symlink_to(disk / "hf")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("AUTODS_WRITABLE", str(tmp_path / "allowed"))
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", SimpleNamespace(_HEADER_DIR=str(headers)))
    free = set(list_free_folders(script_job()))
    assert {str(path) for path in (home / ".cache", disk / "hf", headers, tmp_path / "allowed")} <= free
    assert (tmp_path / "triton").is_dir()  # a cache that is missing could not be made later
    assert not {"", "/", str(home), str(tmp_path), "/tmp"} & free


def test_a_trial_loads_none_of_the_scripts_checkpoints():
    policy = SimpleNamespace(hooks_paused=False, begin_skipped=lambda phase: None)
    path, client_state = skip_load(policy, None, "checkpoints")
    assert (path, client_state["step"]) == (None, 0)
    policy.hooks_paused = True  # the exam loads its own
    assert skip_load(policy, lambda folder: folder, "exam") == "exam"
