"""Find out whether DeepSpeed's compiled ops can be built here, build them once, and load them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from ..devices.cpu import read_processor_field
from ..errors import EnvironmentBroken
from ..system import private, processes
from ..system.host import cache_folder

BUILDERS = {
    "cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder", "async_io": "AsyncIOBuilder",
    "quantizer": "QuantizerBuilder", "fused_lion": "FusedLionBuilder", "cpu_lion": "CPULionBuilder",
    "cpu_adagrad": "CPUAdagradBuilder", "fused_lamb": "FusedLambBuilder",
}  # fmt: skip
# Seconds on two cores with a cold cache, for the note that announces the wait. Ops that only rungs by name or a user's
# optimizer load have none: no card has built them here.
USUAL_BUILD_S = {"cpu_adam": 45, "fused_adam": 40, "async_io": 180}

_BUILT_S = 600.0  # within which a build ends; where files have no locks, another machine may be at one that is younger


def ops_folder() -> Path:
    """Return the folder in which ops are built and kept.

    It is not torch's own: torch's lock of a killed build has no owner, so nobody may remove it there.
    """
    made_with = "-".join(f"{name}{metadata.version(name)}" for name in ("torch", "deepspeed"))
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    # Ninja builds again if the sources lie elsewhere, so each virtual environment has a folder. So has each processor:
    # DeepSpeed compiles for the one that it finds (-march=native), and the nodes of a cluster share a home.
    processor = read_processor_field("model name") or platform.machine()
    place = hashlib.sha256(f"{sys.prefix} {processor}".encode()).hexdigest()[:8]
    return cache_folder() / "torch_extensions" / f"{python}-{made_with}-{place}"


def get_builder(op: str) -> Any:
    """Return DeepSpeed's builder of the op for the current accelerator; None if it has none."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder(BUILDERS[op])


def find_problem(op: str) -> str | None:
    """Return why the op can neither be loaded nor built here, with a command that helps; None if it can."""
    builder = get_builder(op)
    if builder is None or type(builder).__name__ == "NotImplementedBuilder":
        return f"DeepSpeed has no {op} for this accelerator"
    if (danger := find_danger(op)) is not None:
        return f"{op} is not loaded: {danger} (chmod -R go-w {ops_folder()}, or remove it)"
    if is_installed(builder):
        return None
    if lacks_nvcc(builder):
        import torch

        toolkit = f"install the CUDA toolkit {torch.version.cuda}, or set CUDA_HOME to it"
        return f"{op} can be neither built nor loaded: nvcc is not installed ({toolkit})"
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


def is_installed(builder: Any) -> bool:
    """Whether DeepSpeed was installed with this op built (DS_BUILD_OPS=1), as in NVIDIA's containers."""
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(builder.name, False))


def lacks_nvcc(builder: Any) -> bool:
    """Whether the op is compiled by CUDA's compiler, and that is not there: torch's wheels bring none.

    DeepSpeed asks it for its version when it builds or loads an op for cards, also one without kernels (async_io).
    """
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder
    from torch.utils import cpp_extension

    if not isinstance(builder, CUDAOpBuilder) or builder.is_rocm_pytorch():
        return False
    return cpp_extension.CUDA_HOME is None or not Path(cpp_extension.CUDA_HOME, "bin", "nvcc").exists()


def is_built(op: str) -> bool:
    """Whether the op needs no build: it is cached, or was installed with DeepSpeed."""
    builder = get_builder(op)
    return is_cached(op) or (builder is not None and is_installed(builder))


def is_cached(op: str) -> bool:
    """Whether the op is built: torch writes the library last. Imports neither torch nor DeepSpeed."""
    return any((ops_folder() / op).glob("*.so"))


def check_caches() -> None:
    """Make the folder of caches, for this user alone, where it is missing.

    Raises EnvironmentBroken where another user can have written into a cache of code that ranks execute.
    """
    root = cache_folder()
    with contextlib.suppress(OSError):  # who uses a cache reports that it cannot be made
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (root, ops_folder(), root / "torchinductor"):
        if folder.exists() and (danger := private.find_danger(folder)) is not None:
            raise EnvironmentBroken(
                f"{danger}, and code that is cached in {folder} would be executed\n"
                "  chmod go-w what is yours, or set AUTODS_CACHE to a folder to which nobody else may write"
            )


def find_danger(op: str) -> str | None:
    """Return how another user can have written the op that is cached here; None where nobody could."""
    folder = ops_folder() / op
    paths = (path for path in (folder.parent, folder, *folder.glob("*")) if path.exists())
    return next(filter(None, map(private.find_danger, paths)), None)


def build(op: str) -> None:
    """Build the op if it is not cached, and load it. Raises InputError where another user can have written it.

    One build runs at a time on this machine. The lock of a killed build is removed.
    """
    folder = ops_folder()
    if (danger := find_danger(op)) is not None:
        raise private.make_error(danger)
    with private.writing_for_us_alone():
        folder.mkdir(parents=True, exist_ok=True)
        _build(op, folder)


def _build(op: str, folder: Path) -> None:
    with open(folder / f"{op}.lock", "w") as lock:
        is_alone = _take(lock, fcntl.LOCK_EX)
        builder = get_builder(op)
        for stale in (folder / builder.name).glob("lock"):
            if is_alone and not processes.is_open(stale):  # else a script builds it, and torch waits for that
                stale.unlink()  # torch would wait for it for ever; our own lock excludes another build of ours
        builder.load(verbose=False)


def _take(lock: IO[str], how: int) -> bool:
    """Lock a file; False on a file system without locks, such as Lustre in its older default. Then torch's must do.

    Raises BlockingIOError where `how` is not to wait, and another process has the lock.
    """
    try:
        fcntl.flock(lock, how)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def clear_killed_builds(*, older_than_s: float = 0.0) -> None:
    """Remove the locks of killed builds, for which torch would wait for ever where user code builds an op itself.

    Call it before user code runs. The lock of a running build stays: one of ours, or one whose lock file a process of
    this machine has open, as torch has it while it builds. Another machine's shows by its age alone.
    """
    for stale in ops_folder().glob("*/lock"):
        with contextlib.suppress(OSError), open(ops_folder() / f"{stale.parent.name}.lock", "w") as lock:
            least_s = older_than_s if _take(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) else max(older_than_s, _BUILT_S)
            if time.time() - stale.stat().st_mtime >= least_s and not processes.is_open(stale):
                stale.unlink()


def main(words: list[str]) -> None:
    """`state OP...` prints whether ops are built, and why they cannot be; `build OP` builds one. One line of JSON."""
    command, *names = words
    answer: dict[str, dict[str, Any]] = {}
    for name in names:
        if command == "build":
            began = time.monotonic()
            build(name)
            answer[name] = {"seconds": time.monotonic() - began}
        else:
            answer[name] = {"built": is_built(name), "problem": find_problem(name)}
    print(json.dumps(answer))


if __name__ == "__main__":
    os.environ["TORCH_EXTENSIONS_DIR"] = str(ops_folder())  # read when torch is imported
    main(sys.argv[1:])
