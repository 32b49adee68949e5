"""A folder over the file system: what a script writes anywhere else lands there, and is read from there.

Of Python's own functions; what a C library or another program writes by itself is not seen. The script keeps its
working directory, so that all it reads is found where it is.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

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
