"""DeepSpeed's compiled ops: what stands in the way of building one, building it once, loading it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

from ..system.host import cache_folder

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder", "async_io": "AsyncIOBuilder"}
# Seconds on two cores with a cold cache, for the note that announces the wait.
USUAL_BUILD_S = {"cpu_adam": 45, "fused_adam": 40, "async_io": 180}


def ops_folder() -> Path:
    """Where ops are built and kept. Our own, because the lock that torch leaves when a build is killed has no owner."""
    made_with = "-".join(f"{name}{metadata.version(name)}" for name in ("torch", "deepspeed"))
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    # Ninja builds again when the sources lie elsewhere: each virtual environment keeps its own.
    place = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    return cache_folder() / "torch_extensions" / f"{python}-{made_with}-{place}"


def get_builder(op: str) -> Any:
    """DeepSpeed's builder of that op for the current accelerator."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder(BUILDERS[op])


def find_problem(op: str) -> str | None:
    """Why this op can neither be loaded nor built here, with the command that fixes it; None if it can."""
    builder = get_builder(op)
    if builder is None:
        return f"DeepSpeed has no {op} for this accelerator"
    if is_cached(op):
        return None
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"{op} cannot be built: {compiler} is not installed (apt-get install g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return f"{op} cannot be built: Python.h is missing (apt-get install python3-dev)"
    if not builder.is_compatible(verbose=False):
        hint = " (apt-get install libaio-dev)" if op == "async_io" else ""
        return f"{op} cannot be built on this machine{hint}"
    return None


def is_cached(op: str) -> bool:
    """Whether the cache holds a finished build (torch writes the library last). Loads neither torch nor DeepSpeed."""
    return any((ops_folder() / op).glob("*.so"))


def build(op: str) -> None:
    """Build if it is not cached, and load. One build at a time on this machine; a killed build's lock is cleared."""
    folder = ops_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{op}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        builder = get_builder(op)
        for stale in (folder / builder.name).glob("lock"):
            stale.unlink()  # torch would wait for it for ever; we hold the only right to build here
        builder.load(verbose=False)


def clear_killed_builds() -> None:
    """Take away the locks of builds that were killed, on which torch would wait for ever: a script may build by itself.

    Where a build of ours runs, its lock stays.
    """
    folder = ops_folder()
    for name in BUILDERS if folder.is_dir() else ():
        with open(folder / f"{name}.lock", "w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / name / "lock").unlink(missing_ok=True)
