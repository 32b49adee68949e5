import fcntl
from pathlib import Path

import pytest

from autods.trial import ops


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
