"""Keep the traces of a script out of the user's world: its files, its checkpoints and its experiment trackers."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...system.processes import temporary_folder
from ..patching import Patch, declare, declare_all
from .data import iter_tensors
from .overlay import Overlay
from .session import Session

# Experiment trackers, by their own switches.
_TRACKERS_OFF = {
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
# Caches may be written: they make the next trial faster.
_CACHES = (
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "NLTK_DATA",
)  # fmt: skip
_LARGEST_COPIED = 2**26  # bytes
_NOT_SAVED = "a trial does not save models"
_ENGINE_SAVES = declare_all(
    "deepspeed.runtime.engine.DeepSpeedEngine",
    ("save_checkpoint", "save_16bit_model", "save_fp16_model"),
    _NOT_SAVED,
    optional=True,
)
# Functions that write a model to the file that is their second argument.
_FILE_SAVES = (
    declare("torch.save", _NOT_SAVED),
    declare("safetensors.torch.save_file", _NOT_SAVED),
    declare("safetensors.torch.save_model", _NOT_SAVED),
    declare("safetensors.numpy.save_file", _NOT_SAVED),
)
# Libraries in C open files by path and bypass the overlay.
_SQLITE = declare("sqlite3.connect", "a database of the script is a copy of its own")
_ARROW = declare("pyarrow.memory_map", "a file that the script wrote is read where it was redirected")
_WANDB = declare("wandb.init", 'mode="online" in a script overrides the environment')


def install(session: Session) -> Overlay:
    """Set the sandbox up for the rest of this process."""
    os.environ.update(_TRACKERS_OFF)
    scratch = Path(session.job.scratch)
    temporary = scratch / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = _short_name(temporary)
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{scratch / 'mlruns'}"
    _skip_saves(session)
    overlay = Overlay(scratch / "written", _free_folders(session))
    overlay.install()
    when_imported("sqlite3", lambda: redirect_databases(overlay))
    when_imported("pyarrow", lambda: _replace_path(_ARROW, overlay.path_to_read))
    when_imported("wandb", disable_wandb)
    return overlay


def redirect_databases(overlay: Overlay) -> None:
    """Let sqlite3 open the script's own copy of a database file.

    A database in memory or at a URI stays as it is, and so does a file so large that it is data.
    """

    def choose(path: Any) -> Any:
        name = os.fspath(path)
        if not name or name.startswith((":", "file:")):
            return path
        is_large = os.path.isfile(name) and os.path.getsize(name) > _LARGEST_COPIED
        return overlay.path_to_read(path) if is_large else overlay.path_to_write(path, keep=True)

    _replace_path(_SQLITE, choose)


def disable_wandb() -> None:
    """Let `wandb.init` ignore the mode that a script asks for."""
    original = _WANDB.original()

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "mode": "disabled"})

    _WANDB.install(init)


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` once, right after the top-level module has run; at once if it is imported already."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _ImportFinder(name, action))


def _free_folders(session: Session) -> tuple[str, ...]:
    """Folders that a script may write to."""
    job = session.job
    caches = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    home = [str(Path.home() / name) for name in (".cache", ".triton", ".nv")]
    trial = [job.scratch, job.folder, str(temporary_folder(os.getpid())), *filter(None, [job.swap])]
    return (*trial, *caches, *home, "/dev", "/proc", "/sys", sys.prefix)


def _short_name(folder: Path) -> str:
    """A short link to the folder: DataLoader workers make sockets in it, whose paths have at most 107 characters."""
    link = temporary_folder(os.getpid())
    with contextlib.suppress(OSError):
        link.unlink()
    link.symlink_to(folder)
    return str(link)


def _replace_path(patch: Patch, choose: Callable[[Any], Any]) -> None:
    """Let a function that opens a file by path open the one that `choose` returns for it."""
    original = patch.original()

    @functools.wraps(original)
    def opened(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (str, os.PathLike)):
            args = (choose(args[0]), *args[1:])
        return original(*args, **kwargs)

    patch.install(opened, everywhere=True)


# Saving models.


def _skip_saves(session: Session) -> None:
    """Let saves be no part of training.

    Small files are written to the overlay, where the script finds them again. Large files are empty there, and so are
    the folders of checkpoints: a script may go on with them, for example copy the best one.
    """
    for patch in _ENGINE_SAVES.values():
        if (original := patch.original()) is not None:
            patch.install(_without_checkpoint(session, original))
    for patch in _FILE_SAVES:
        with contextlib.suppress(ImportError):  # safetensors may be missing
            patch.install(_without_large_file(session, patch.original()), everywhere=True)


def _without_checkpoint(session: Session, original: Any) -> Any:
    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        if session.hooks_paused:
            return original(*args, **kwargs)
        session.check_goes_on(trains=False)
        session.begin_other("save")
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        with contextlib.suppress(OSError):
            os.makedirs(os.path.join(arguments["save_dir"], str(arguments.get("tag") or "")), exist_ok=True)
        return True

    return save


def _without_large_file(session: Session, original: Any) -> Any:
    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        target = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        if session.hooks_paused or not _is_file(target):
            return original(*args, **kwargs)
        session.check_goes_on(trains=False)
        session.begin_other("save")
        if isinstance(target, (str, bytes, os.PathLike)):
            _write_if_small(target, args[0] if original.__module__.startswith("torch.") and args else None, original)
        return None

    return save


def _write_if_small(target: Any, value: Any, save: Callable[[Any, Any], Any]) -> None:
    """Put a file there in one move: all ranks may save, and one may read. It is empty for None and large values."""
    descriptor, temporary = tempfile.mkstemp()
    with os.fdopen(descriptor, "wb") as file:
        if value is not None and _tensor_bytes(value) <= _LARGEST_COPIED:
            with contextlib.suppress(Exception):  # values that cannot be pickled, such as simulated tensors
                save(value, file)
    with contextlib.suppress(OSError):
        shutil.move(temporary, os.fsdecode(target))


def _tensor_bytes(value: Any) -> int:
    from torch.nn import Module

    tensors = value.parameters() if isinstance(value, Module) else iter_tensors(value)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_file(target: Any) -> bool:
    """Whether the target is a path or an open file, not a buffer in memory."""
    if isinstance(target, (str, bytes, os.PathLike)):
        return True
    try:
        return bool(target.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


# Actions after an import.


class _ImportFinder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual spec of the module, with a loader that calls the action."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, self._action)
        return spec


class _ActingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, action: Callable[[], None]) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module with the loader that Python found for it."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the action."""
        self._loader.exec_module(module)
        self._action()
