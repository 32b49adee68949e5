import os
import sys
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken
from autods.system.host import (
    Hardware,
    MemoryGroup,
    TorchBuild,
    cache_folder,
    installed_versions,
    read_hardware,
    read_host_memory,
    torch_build,
)
from tests.support.scripted_nvml import FakeCard, FakeNvml, NVMLError


@pytest.mark.parametrize(
    ("lines", "version", "cuda"),
    [
        ("__version__ = '2.11.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
         "2.11.0+cu130", (13, 0)),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", "2.13.0+cpu", None),
        ("__version__ = '2.9.1+cu126'\ncuda: str | None = '12.6'\n", "2.9.1+cu126", (12, 6)),
    ],
)  # fmt: skip
def test_torch_says_which_cuda_it_was_built_with(
    tmp_path: Path, lines: str, version: str, cuda: tuple[int, int] | None
) -> None:
    (tmp_path / "version.py").write_text(lines)
    build = torch_build(tmp_path)
    assert build is not None
    assert (build.version, build.cuda) == (version, cuda)


def test_an_unreadable_or_rocm_torch_is_no_problem(tmp_path: Path) -> None:
    assert torch_build(tmp_path) is None
    (tmp_path / "version.py").write_text(
        "__version__ = '2.11.0+rocm7'\ncuda: str | None = None\nhip: str | None = '7'\n"
    )
    assert torch_build(tmp_path) is None


def looked(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, build: TorchBuild) -> Hardware:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("autods.system.host.torch_build", lambda: build)
    return read_hardware()


def test_cards_with_a_driver_that_runs_torchs_cuda_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    here = looked(monkeypatch, FakeNvml([FakeCard()], cuda=13000), TorchBuild(version="2.13.0", cuda=(13, 2)))
    assert (here.unusable, here.cuda, here.driver, len(here.cards)) == (None, "13.0", "580.95.05", 1)


def test_a_driver_too_old_for_torch_is_named_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeCard()], driver="535.54.03", cuda=12020)
    here = looked(monkeypatch, nvml, TorchBuild(version="2.11.0+cu130", cuda=(13, 0)))
    assert here.unusable is not None
    assert "torch 2.11.0+cu130 needs CUDA 13.0, and the driver 535.54.03 runs 12.2 at most" in here.unusable


def test_a_torch_without_cuda_beside_a_card_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    build = TorchBuild(version="2.13.0+cpu", cuda=None)
    assert "built without CUDA" in str(looked(monkeypatch, FakeNvml([FakeCard()]), build).unusable)
    assert looked(monkeypatch, FakeNvml(problem=NVMLError("none", 12)), build).unusable is None


def test_this_machine_has_cores_and_memory() -> None:
    here = read_hardware()
    assert here.cores >= 1
    assert here.host_bytes >= here.host_free_bytes > 0
    assert here.cpu


def test_versions_name_what_decides_a_result() -> None:
    found = installed_versions()
    assert {"python", "autods", "torch", "deepspeed", "ray", "optuna", "transformers"} == set(found)
    assert "not installed" not in found.values()


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    for name, said in {"memory.max": 2**20, "memory.current": 2**18}.items():
        (tmp_path / name).write_text(str(said))
    memory = read_host_memory((MemoryGroup(folder=tmp_path, version=2),))
    assert (memory.total_bytes, memory.free_bytes) == (2**20, 2**20 - 2**18)


@pytest.mark.parametrize("home", ["/etc/passwd", "/proc/1", "/proc/no/such"])
def test_the_cache_lies_in_tmp_where_home_cannot_be_used(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    for name in ("AUTODS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    folder = cache_folder()
    assert folder == Path(f"/tmp/autods-cache-{os.getuid()}")
    assert folder.stat().st_mode & 0o077 == 0


def test_a_cache_that_another_user_may_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTODS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/etc/passwd")
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)  # of nobody: what lies there is not theirs
    planted = Path("/tmp/autods-cache-4000000000")
    planted.mkdir(exist_ok=True)
    try:
        with pytest.raises(EnvironmentBroken, match="others may write it\n  set AUTODS_CACHE to a folder of your own"):
            cache_folder()
    finally:
        planted.rmdir()


def test_a_given_cache_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    assert not cache_folder().exists()
