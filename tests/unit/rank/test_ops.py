import fcntl
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.rank import ops


@pytest.mark.parametrize("running", [True, False])
def test_only_the_lock_of_a_killed_build_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: bool):
    monkeypatch.setattr(ops, "ops_folder", lambda: tmp_path)
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    with open(tmp_path / "cpu_adam.lock", "w") as held:
        if running:
            fcntl.flock(held, fcntl.LOCK_EX)
        ops.clear_killed_builds()
    assert (tmp_path / "cpu_adam" / "lock").exists() is running


@pytest.mark.parametrize("place", ["torch_extensions", "cpu_adam", "cpu_adam/cpu_adam.so"])
def test_an_op_that_others_may_have_written_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    monkeypatch.setattr(ops, "ops_folder", lambda: tmp_path / "torch_extensions")
    library = tmp_path / "torch_extensions" / "cpu_adam" / "cpu_adam.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(ops, "_build", lambda op, folder: None)
    ops.build("cpu_adam")
    (tmp_path / "torch_extensions" / place if place != "torch_extensions" else tmp_path / place).chmod(0o777)
    with pytest.raises(InputError, match=r"every user may write to .*executed"):
        ops.build("cpu_adam")


@pytest.mark.parametrize("place", ["", "torchinductor"])
def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    cache = tmp_path / "cache"
    monkeypatch.setattr(ops, "cache_folder", lambda: cache)
    ops.check_caches()
    assert cache.stat().st_mode & 0o777 == 0o700
    (cache / "torchinductor").mkdir()
    (cache / place).chmod(0o777)
    with pytest.raises(EnvironmentBroken, match=r"every user may write to .*\n.*AUTODS_CACHE"):
        ops.check_caches()
