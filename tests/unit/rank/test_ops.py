import errno
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from autods.config import deepspeed
from autods.errors import EnvironmentBroken, InputError
from autods.rank import ops


@pytest.mark.parametrize("op", ["cpu_adam", "fused_lamb", "an_extension_of_the_script"])
@pytest.mark.parametrize("running", ["ours", "the script's", ""])
def test_only_the_lock_of_a_killed_build_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: str, op: str
):
    monkeypatch.setattr(ops, "ops_folder", lambda: tmp_path)
    (tmp_path / op).mkdir()
    baton = FileBaton(tmp_path / op / "lock")
    assert baton.try_acquire()
    if running != "the script's":
        os.close(baton.fd)
    with open(tmp_path / f"{op}.lock", "w") as held:
        if running == "ours":
            fcntl.flock(held, fcntl.LOCK_EX)
        ops.clear_killed_builds()
    assert (tmp_path / op / "lock").exists() is bool(running)
    if running == "the script's":
        baton.release()


def test_a_young_lock_may_be_another_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "ops_folder", lambda: tmp_path)
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    ops.clear_killed_builds(older_than_s=60.0)
    assert lock.exists()
    os.utime(lock, (0, 0))
    ops.clear_killed_builds(older_than_s=60.0)
    assert not lock.exists()


def test_a_killed_builds_lock_goes_where_no_file_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(ops, "ops_folder", lambda: tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    ops.clear_killed_builds()
    assert lock.exists()  # another machine may be at the build
    os.utime(lock, (0, 0))
    ops.clear_killed_builds()
    assert not lock.exists()


@pytest.mark.parametrize("others", [False, True])
def test_an_op_is_built_where_no_file_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: bool):
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    loaded: list[bool] = []
    builder = SimpleNamespace(name="cpu_adam", load=lambda verbose: loaded.append(lock.exists()))
    monkeypatch.setattr(ops, "ops_folder", lambda: tmp_path)
    monkeypatch.setattr(ops, "get_builder", lambda op: builder)
    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    if others:
        lock.touch()
    ops.build("cpu_adam")
    assert loaded == [others]  # the lock may be that of a build on another machine


def test_a_cache_that_cannot_be_written_ends_no_zygote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "ops_folder", lambda: tmp_path)
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    (tmp_path / "cpu_adam.lock").mkdir()  # no file that can be opened, for root either
    ops.clear_killed_builds()
    assert (tmp_path / "cpu_adam" / "lock").exists()


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


def test_each_processor_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch):
    folders = []
    for name in ("Intel(R) Xeon(R) Platinum 8480C", "AMD EPYC 7763 64-Core Processor"):
        monkeypatch.setattr(ops, "read_processor_field", lambda field, name=name: name)
        folders.append(ops.ops_folder())
    assert len(set(folders)) == 2
    assert len({folder.parent for folder in folders}) == 1


def test_an_op_that_the_accelerator_lacks_is_told_before_it_loads():
    assert ops.find_problem("fused_lamb") == "DeepSpeed has no fused_lamb for this accelerator"
    assert ops.BUILDERS.keys() >= {op for pair in deepspeed._OPTIMIZER_OPS.values() for op in pair if op is not None}


@pytest.mark.parametrize("home", [None, "a runtime alone", "a toolkit"])
def test_an_op_for_cards_is_not_loaded_without_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None):
    monkeypatch.setattr(ops, "ops_folder", lambda: tmp_path / "ops")
    monkeypatch.setattr(ops, "get_builder", lambda op: FusedAdamBuilder())
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None if home is None else str(tmp_path))
    (tmp_path / "ops" / "fused_adam").mkdir(parents=True)
    (tmp_path / "ops" / "fused_adam" / "fused_adam.so").touch()
    if home == "a toolkit":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch()
        assert ops.find_problem("fused_adam") is None
    else:
        assert "nvcc is not installed (install the CUDA toolkit" in str(ops.find_problem("fused_adam"))
        monkeypatch.setitem(installed_ops, "fused_adam", True)  # as NVIDIA's containers have it
        assert ops.find_problem("fused_adam") is None
        assert ops.is_built("fused_adam")
