"""The C++ half of the simulated GPU: built once for each torch, cached, and loaded before torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from ...errors import EnvironmentBroken
from ...system import private
from ...system.host import cache_folder
from ...system.limits import check_space
from .protocol import SimulationFailed

_SOURCE = Path(__file__).with_name("simcuda.cpp")
_BUILD_BYTES = 2**20  # the library has a tenth of it


def load() -> ctypes.CDLL:
    """The library, built if it is not cached. Call it before torch is imported. Raises SimulationFailed."""
    if "torch" in sys.modules:
        raise RuntimeError("the simulated device must be loaded before torch")
    path = library_path()
    _check_is_ours(path.parent)
    if not path.exists():
        with private.writing_for_us_alone():
            build(path)
    _check_is_ours(path)
    return ctypes.CDLL(str(path))


def _check_is_ours(path: Path) -> None:
    """Raises SimulationFailed where another user can have written there."""
    if path.exists() and (danger := private.find_danger(path)) is not None:
        error = private.make_error(danger)
        raise SimulationFailed("build_failed", error.problem, error.hint)


def library_path() -> Path:
    """The cached file; its name depends on torch's version and folder and on our source, so none is ever stale."""
    digest = hashlib.sha256(_SOURCE.read_bytes() + str(_torch_folder()).encode()).hexdigest()[:12]
    name = f"torch{metadata.version('torch')}-{digest}.so"
    return cache_folder() / "simulated_device" / name


def compiler() -> str | None:
    """The path of the C++ compiler, or None if there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is not None and not spec.submodule_search_locations:
        raise SimulationFailed("environment", f"{spec.origin}: it hides the module torch", "rename it")
    if spec is None or not spec.submodule_search_locations:
        raise SimulationFailed("build_failed", "torch is not installed", "pip install torch")
    return Path(spec.submodule_search_locations[0])


def build(path: Path) -> None:
    """Compile the library to this path. Several processes may: each puts a whole file there.

    Raises SimulationFailed, whose kind is no_compiler or build_failed.
    """
    cxx = compiler()
    if cxx is None:
        name = os.environ.get("CXX") or "g++"
        problem = f"the simulated GPU needs a C++ compiler, and {name} is not installed"
        raise SimulationFailed("no_compiler", problem, "apt-get install g++")
    torch, temporary = _torch_folder(), path.with_suffix(f".{os.getpid()}.tmp")
    command = [
        cxx, "-O1", "-std=c++20", "-fPIC", "-shared", str(_SOURCE), "-o", str(temporary),
        f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include",
        f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib",
    ]  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_space(path.parent, _BUILD_BYTES, "the build of the simulated GPU")
    except OSError as error:
        problem = f"{path.parent}: cannot be written: {error.strerror}"
        raise SimulationFailed("build_failed", problem, "set AUTODS_CACHE to a folder that can") from None
    except EnvironmentBroken as error:
        problem, _, hint = str(error).partition("\n  ")
        raise SimulationFailed("build_failed", problem, f"{hint}, also with AUTODS_CACHE in another folder") from None
    try:
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode == 0:
            os.replace(temporary, path)
            return
    except OSError as error:
        problem = f"{cxx} cannot be run: {error.strerror}"
        raise SimulationFailed("no_compiler", problem, "apt-get install g++") from None
    finally:
        temporary.unlink(missing_ok=True)
    lines = [line for line in built.stderr.splitlines() if "error" in line] or built.stderr.splitlines() or [""]
    raise SimulationFailed(
        "build_failed",
        f"the simulated GPU could not be built for torch {metadata.version('torch')}: {lines[0][:300]}",
        "update the compiler (g++ 11 or later), or set CXX to another one",
    )
