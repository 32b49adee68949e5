"""Keep a script's writes away from the user's files."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import inspect
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ...system.processes import temporary_folder
from .callsite import everywhere
from .data import tensors_in
from .integrations.config import when_imported
from .session import Session

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Functions of one path that change what lies there; a file that the script did not write is left as it is.
_CHANGES = ("unlink", "remove", "rmdir", "chmod", "chown", "utime", "lchown")
# Functions of one path that only look.
_LOOKS = ("stat", "lstat", "access", "readlink", "statvfs", "chdir")


class Overlay:
    """`root` takes what is written outside of the folders `free`; nothing else on the disk is changed."""

    def __init__(self, root: Path, free: tuple[str, ...]) -> None:
        self.root = str(root)
        self.free = tuple(os.path.abspath(one) for one in (self.root, *free))
        self.wrote: list[str] = []  # where this process would have written, each once
        self._used = False
        self._real = {name: getattr(os, name) for name in (*_CHANGES, *_LOOKS, "open", "mkdir", "listdir", "scandir")}
        self._moves = {name: getattr(os, name) for name in ("rename", "replace", "link", "symlink", "truncate")}
        self._open = builtins.open

    def install(self) -> None:
        """Stand before the functions of `open` and `os`, for the rest of this process."""
        builtins.open = io.open = self.open
        for name in _CHANGES:
            setattr(os, name, self._wrapped(name, self._change))
        for name in _LOOKS:
            setattr(os, name, self._wrapped(name, self._look))
        for name, ours in {
            "open": self.os_open, "mkdir": self.mkdir, "listdir": self.listdir, "scandir": self.scandir,
            "rename": self._moving("rename"), "replace": self._moving("replace"), "link": self._linking("link"),
            "symlink": self._linking("symlink"), "truncate": self.truncate,
        }.items():  # fmt: skip
            setattr(os, name, ours)

    def copy_of(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Where what is written to `path` lands; None where it may be written, or is no path."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(self._real["readlink"](f"/proc/self/fd/{dir_fd}"), text)
        full = os.path.abspath(text)
        if any(full == one or full.startswith(one + os.sep) for one in self.free):
            return None
        return self.root + full

    def has(self, copy: str | None) -> bool:
        """Whether the script has written there."""
        if copy is None or not self.is_used():
            return False
        try:
            self._real["lstat"](copy)
        except OSError:
            return False
        return True

    def is_used(self) -> bool:
        """Whether anything was written, by this rank or another: rank 0 often prepares the data of all."""
        self._used = self._used or self._is_folder(self.root)
        return self._used

    def target(self, path: Any, *, keep: bool, dir_fd: int | None = None) -> Any:
        """The path to write to in place of `path`. keep: with what stands in the file now."""
        copy = self.copy_of(path, dir_fd)
        if copy is None or self.has(copy):
            return path if copy is None else copy
        parent = os.path.dirname(copy)
        if not self.has(parent) and not self._is_folder(parent.removeprefix(self.root) or os.sep):
            return path  # the system says that there is no such folder
        self._note(path)
        self._make(parent)
        original = copy.removeprefix(self.root)
        if keep and os.path.isfile(original):
            with self._open(original, "rb") as source, self._open(copy, "wb") as target:
                shutil.copyfileobj(source, target)
        return copy

    def seen(self, path: Any, dir_fd: int | None = None) -> Any:
        """The path to read in place of `path`."""
        if not self.is_used():
            return path
        copy = self.copy_of(path, dir_fd)
        return copy if self.has(copy) else path

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """`open`."""
        writes = any(letter in mode for letter in "wax+")
        if writes and not isinstance(file, int):
            if "x" in mode and os.path.lexists(file):
                return self._open(file, mode, *args, **kwargs)
            file = self.target(file, keep="w" not in mode)
        elif not writes:
            file = self.seen(file)
        return self._open(file, mode, *args, **kwargs)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """`os.open`."""
        if flags & _WRITES:
            exclusive = flags & os.O_EXCL and os.path.lexists(path)
            chosen = path if exclusive else self.target(path, keep=not flags & os.O_TRUNC, dir_fd=dir_fd)
        else:
            chosen = self.seen(path, dir_fd)
        opened: int = self._real["open"](chosen, flags, mode, dir_fd=dir_fd)
        return opened

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """`os.mkdir`: a folder that is there already stays one."""
        copy = self.copy_of(path, dir_fd)
        if copy is not None and not self.has(copy):
            original = copy.removeprefix(self.root)
            parent = os.path.dirname(original)
            if not os.path.lexists(original) and (self.has(self.root + parent) or self._is_folder(parent)):
                self._note(path)
                self._make(copy)
                return
        self._real["mkdir"](path if copy is None or not self.has(copy) else copy, mode, dir_fd=dir_fd)

    def listdir(self, path: Any = None) -> Any:
        """`os.listdir`: of both folders."""
        copy = self.copy_of(path if path is not None else ".") if self.is_used() else None
        if not self.has(copy):
            return self._real["listdir"](path)
        assert copy is not None
        own = self._real["listdir"](copy)
        there = self._is_folder(copy.removeprefix(self.root))
        names = [
            *(self._real["listdir"](path) if there else ()),
            *(map(os.fsencode, own) if isinstance(path, bytes) else own),
        ]
        return list(dict.fromkeys(names))

    def scandir(self, path: Any = None) -> Any:
        """`os.scandir`: of both folders."""
        copy = self.copy_of(path if path is not None else ".") if self.is_used() else None
        if not self.has(copy):
            return self._real["scandir"](path)
        assert copy is not None
        there = self._is_folder(copy.removeprefix(self.root))
        return _Both([self._real["scandir"](copy), *([self._real["scandir"](path)] if there else [])])

    def truncate(self, path: Any, length: int) -> None:
        """`os.truncate`."""
        self._moves["truncate"](self.target(path, keep=True), length)

    def _wrapped(self, name: str, how: Callable[..., Any]) -> Callable[..., Any]:
        real = self._real[name]

        @functools.wraps(real)
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            return how(real, path, *args, **kwargs)

        return call

    def _change(self, real: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        copy = self.copy_of(path, kwargs.get("dir_fd"))
        if copy is None:
            return real(path, *args, **kwargs)
        if self.has(copy):
            return real(copy, *args, **{**kwargs, **({"dir_fd": None} if "dir_fd" in kwargs else {})})
        self._real["lstat"](copy.removeprefix(self.root))  # raises where there is nothing to change
        self._note(path)
        return None

    def _look(self, real: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        return real(self.seen(path, kwargs.get("dir_fd")), *args, **kwargs)

    def _moving(self, name: str) -> Callable[..., None]:
        def move(src: Any, dst: Any, **fds: Any) -> None:
            source, target = self.copy_of(src, fds.get("src_dir_fd")), self.copy_of(dst, fds.get("dst_dir_fd"))
            if source is None and target is None:
                self._moves[name](src, dst, **fds)
                return
            if source is not None and not self.has(source):  # not the script's own: it stays where it is
                shutil.copy2(src, self.target(dst, keep=False))
                return
            if target is not None and self.has(target) and os.path.isfile(target):
                self._real["unlink"](target)
            self._moves[name](source or src, self.target(dst, keep=False))

        return move

    def _linking(self, name: str) -> Callable[..., None]:
        def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            self._moves[name](self.seen(src) if name == "link" else src, self.target(dst, keep=False), *args, **kwargs)

        return link

    def _note(self, path: Any) -> None:
        text = os.fsdecode(path)
        if text not in self.wrote:
            self.wrote.append(text)

    def _is_folder(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(self._real["stat"](path).st_mode)
        except OSError:
            return False

    def _make(self, folder: str) -> None:
        if not self._is_folder(folder):
            self._make(os.path.dirname(folder))
            with contextlib.suppress(FileExistsError):  # another rank made it meanwhile
                self._real["mkdir"](folder)


class _Both:
    """The entries of two folders, each name once."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        self._entries = self._each_once()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def _each_once(self) -> Iterator[Any]:
        known: set[Any] = set()
        for part in self._parts:
            for entry in part:
                if entry.name not in known:
                    known.add(entry.name)
                    yield entry

    def __enter__(self) -> _Both:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Of both."""
        for part in self._parts:
            part.close()


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
    own = (job.scratch, job.folder, str(temporary_folder(os.getpid())))
    return (*own, *filter(None, [job.swap]), *caches, *home, "/dev", "/proc", "/sys", sys.prefix)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _short(folder: Path) -> str:
    """The folder by a short name: DataLoader workers make sockets in it, whose paths may have 107 characters."""
    link = temporary_folder(os.getpid())
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
