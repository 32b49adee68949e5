"""The simulated GPU's C++ library: cached for each torch, and refused where it cannot be built or trusted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autods.forecast.simulate import gpu_library
from autods.forecast.simulate.protocol import SimulationFailed


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SimulationFailed) as failed:
        gpu_library.build(tmp_path / "library.so")
    assert failed.value.kind == "no_compiler"
    assert "no-such-compiler is not installed" in failed.value.problem
    assert failed.value.hint == "apt-get install g++"


def test_a_compiler_that_fails_leaves_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(SimulationFailed) as failed:
        gpu_library.build(tmp_path / "library.so")
    assert failed.value.kind == "build_failed"
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_keyed_by_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path))
    path = gpu_library.library_path()
    monkeypatch.setattr(gpu_library.metadata, "version", lambda name: "99.0")
    assert path.parent == gpu_library.library_path().parent == tmp_path / "simulated_device"
    assert "torch99.0" in gpu_library.library_path().name != path.name


@pytest.mark.parametrize("place", ["cache", "cache/library.so"])
def test_a_library_that_others_may_have_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    library = tmp_path / "cache" / "library.so"
    library.parent.mkdir()
    library.touch()
    (tmp_path / place).chmod(0o777)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(gpu_library, "library_path", lambda: library)
    with pytest.raises(SimulationFailed) as failed:
        gpu_library.load()
    assert failed.value.problem == f"every user may write to {tmp_path / place}, and its content would be executed"
