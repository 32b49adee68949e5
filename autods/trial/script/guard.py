"""Nothing of the user's is written while a script is tried, and nobody's dashboard hears of it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...procs import temporary_of
from .batches import tensors_in
from .imported import when_imported
from .overlay import Overlay
from .session import Session
from .users import everywhere

# Experiment trackers, by their own switches.
_SILENT = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "debug",
    "TRACKIO_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}

# What is kept there makes the next trial faster, and is nobody's work.
_CACHES = (
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "NLTK_DATA",
)  # fmt: skip

_LARGEST_COPIED = 2**26  # bytes

# Of the engine: all that writes a checkpoint.
_SAVES = ("save_checkpoint", "save_16bit_model", "save_fp16_model")
# Of other libraries: a file, given as the second argument.
_WRITERS = (
    ("torch", "save", 1),
    ("safetensors.torch", "save_file", 1),
    ("safetensors.torch", "save_model", 1),
    ("safetensors.numpy", "save_file", 1),
)


def install(session: Session) -> Overlay:
    """For the rest of this process."""
    os.environ.update(_SILENT)
    scratch = Path(session.job.scratch)
    os.environ["TMPDIR"] = tempfile.tempdir = _short(_made(scratch / "tmp"))
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{scratch / 'mlruns'}"
    _save_nothing(session)
    overlay = Overlay(scratch / "written", _free(session))
    overlay.install()
    when_imported("sqlite3", functools.partial(_opening, "connect", functools.partial(_database, overlay)))
    when_imported("pyarrow", functools.partial(_opening, "memory_map", overlay.seen))
    when_imported("wandb", _disabled)
    return overlay


def _opening(name: str, chosen: Callable[[Any], Any], module: Any) -> None:
    """A function of a library in C that opens a file by its path. chosen: the path to open in its place."""
    real = getattr(module, name)

    @functools.wraps(real)
    def opened(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (str, os.PathLike)):
            args = (chosen(args[0]), *args[1:])
        return real(*args, **kwargs)

    everywhere(real, name, opened)


def _database(overlay: Overlay, path: Any) -> Any:
    """The script's own copy of a database; one in memory, at a URI, or so large that it is data stays where it is."""
    name = os.fspath(path)
    if not name or name.startswith((":", "file:")):
        return path
    large = os.path.isfile(name) and os.path.getsize(name) > _LARGEST_COPIED
    return overlay.seen(path) if large else overlay.target(path, keep=True)


def _disabled(wandb: Any) -> None:
    """A script that says `mode="online"` itself is heard before the environment."""
    real = wandb.init

    @functools.wraps(real)
    def init(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "mode": "disabled"})

    wandb.init = init


def _free(session: Session) -> tuple[str, ...]:
    """Folders that may be written."""
    job = session.job
    caches = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    home = [str(Path.home() / name) for name in (".cache", ".triton", ".nv")]
    own = (job.scratch, job.folder, str(temporary_of(os.getpid())))
    return (*own, *filter(None, [job.swap]), *caches, *home, "/dev", "/proc", "/sys", sys.prefix)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _short(folder: Path) -> str:
    """The folder by a short name: DataLoader workers make sockets in it, whose paths may have 107 characters."""
    link = temporary_of(os.getpid())
    with contextlib.suppress(OSError):
        link.unlink()
    link.symlink_to(folder)
    return str(link)


def _save_nothing(session: Session) -> None:
    """A save is noted as no part of training. What is small is written, where the script finds it again; of the rest
    there is the folder and an empty file, which a script may go on with: to copy the best one, say."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    for name in _SAVES:
        if (real := getattr(DeepSpeedEngine, name, None)) is not None:
            setattr(DeepSpeedEngine, name, _of_engine(session, real))
    for module, name, place in _WRITERS:
        with contextlib.suppress(ImportError):
            real = getattr(importlib.import_module(module), name)
            everywhere(real, name, _to_a_file(session, real, place))


def _of_engine(session: Session, real: Any) -> Any:
    @functools.wraps(real)
    def save(*args: Any, **kwargs: Any) -> Any:
        if session.busy:
            return real(*args, **kwargs)
        session.insist(trains=False)
        session.other("save")
        given = inspect.signature(real).bind(*args, **kwargs).arguments
        with contextlib.suppress(OSError):
            os.makedirs(os.path.join(given["save_dir"], str(given.get("tag") or "")), exist_ok=True)
        return True

    return save


def _to_a_file(session: Session, real: Any, place: int) -> Any:
    @functools.wraps(real)
    def save(*args: Any, **kwargs: Any) -> Any:
        target = args[place] if len(args) > place else kwargs.get("f", kwargs.get("filename"))
        if session.busy or not _is_file(target):
            return real(*args, **kwargs)
        session.insist(trains=False)
        session.other("save")
        if isinstance(target, (str, bytes, os.PathLike)):
            _leave(target, args[0] if real.__module__.startswith("torch.") and args else None, real)
        return None

    return save


def _leave(target: Any, given: Any, save: Callable[[Any, Any], Any]) -> None:
    """A file there, at once and whole: all ranks may save, and one read. given: what is in it where that is small."""
    made, part = tempfile.mkstemp()
    with os.fdopen(made, "wb") as file:
        if given is not None and _bytes_in(given) <= _LARGEST_COPIED:
            with contextlib.suppress(Exception):  # what cannot be pickled, as on the simulated device
                save(given, file)
    with contextlib.suppress(OSError):
        shutil.move(part, os.fsdecode(target))


def _bytes_in(given: Any) -> int:
    """Of all tensors in it, as far as they are seen."""
    from torch.nn import Module

    tensors = given.parameters() if isinstance(given, Module) else tensors_in(given)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_file(target: Any) -> bool:
    """A path, or a file that is open; a buffer in memory is none."""
    if isinstance(target, (str, bytes, os.PathLike)):
        return True
    try:
        return bool(target.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False
