"""Nothing of the user's is written while a script is tried, and nobody's dashboard hears of it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...procs import temporary_of
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
    return overlay


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
    """A save is noted as no part of training, and does nothing."""
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
        return None

    return save


def _is_file(target: Any) -> bool:
    """A path, or a file that is open; a buffer in memory is none."""
    if isinstance(target, (str, bytes, os.PathLike)):
        return True
    try:
        return bool(target.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False
