"""A copy-on-write overlay over the user's files: a script reads its changes, and the files on disk stay the same.

It replaces `open` and the functions of `os` that take a path. Libraries in C that open files themselves bypass it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ..patching import declare, declare_all

_WHY = "a script's writes are kept out of the user's folders"
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Functions of one path that change or remove what lies there.
_CHANGES = ("unlink", "remove", "rmdir", "chmod", "chown", "utime", "lchown")
# Functions of one path that read.
_READS = ("stat", "lstat", "access", "readlink", "statvfs", "chdir")
_OTHERS = ("open", "mkdir", "listdir", "scandir", "rename", "replace", "link", "symlink", "truncate")
_OPEN, _IO_OPEN = declare("builtins.open", _WHY), declare("io.open", _WHY)
_OS = declare_all("os", (*_CHANGES, *_READS, *_OTHERS), _WHY)


class Overlay:
    """Redirects writes to `root`, except below `root` itself and the folders `free`.

    `written` lists the paths, as the script names them, that this process would have changed.
    """

    def __init__(self, root: Path, free: tuple[str, ...]) -> None:
        self.root = str(root)
        self.free = tuple(os.path.abspath(folder) for folder in (self.root, *free))
        self.written: list[str] = []
        self._used = False
        self._open = _OPEN.original()
        self._os = {name: patch.original() for name, patch in _OS.items()}

    def install(self) -> None:
        """Replace the functions for the rest of this process."""
        replacements = {
            **{name: self._wrap(name, self._change) for name in _CHANGES},
            **{name: self._wrap(name, self._read) for name in _READS},
            "open": self.os_open,
            "mkdir": self.mkdir,
            "listdir": self.listdir,
            "scandir": self.scandir,
            "rename": functools.partial(self._move, "rename"),
            "replace": functools.partial(self._move, "replace"),
            "link": functools.partial(self._link, "link"),
            "symlink": functools.partial(self._link, "symlink"),
            "truncate": self.truncate,
        }
        _OPEN.install(self.open)
        _IO_OPEN.install(self.open)
        for name, replacement in replacements.items():
            _OS[name].install(replacement)

    # Where a path leads.

    def path_to_write(self, path: Any, *, keep: bool, dir_fd: int | None = None) -> Any:
        """The path to write to in place of `path`. `keep` copies the present content of the file there first."""
        copy = self._copy_of(path, dir_fd)
        if copy is None or self._exists(copy):
            return path if copy is None else copy
        parent = os.path.dirname(copy)
        if not self._exists(parent) and not self._is_folder(parent.removeprefix(self.root) or os.sep):
            return path  # the system reports that there is no such folder
        self._note(path)
        self._make_folder(parent)
        original = copy.removeprefix(self.root)
        if keep and os.path.isfile(original):
            with self._open(original, "rb") as source, self._open(copy, "wb") as target:
                shutil.copyfileobj(source, target)
        return copy

    def path_to_read(self, path: Any, dir_fd: int | None = None) -> Any:
        """The path to read in place of `path`."""
        if not self._is_used():
            return path
        copy = self._copy_of(path, dir_fd)
        return copy if self._exists(copy) else path

    def _copy_of(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Where writes to `path` go; None where they are free, or for a file descriptor."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(self._os["readlink"](f"/proc/self/fd/{dir_fd}"), text)
        full = os.path.abspath(text)
        if any(full == folder or full.startswith(folder + os.sep) for folder in self.free):
            return None
        return self.root + full

    def _exists(self, copy: str | None) -> bool:
        if copy is None or not self._is_used():
            return False
        try:
            self._os["lstat"](copy)
        except OSError:
            return False
        return True

    def _is_used(self) -> bool:
        """Whether any rank has written something: rank 0 often prepares the data of all."""
        self._used = self._used or self._is_folder(self.root)
        return self._used

    def _is_folder(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(self._os["stat"](path).st_mode)
        except OSError:
            return False

    def _make_folder(self, folder: str) -> None:
        if not self._is_folder(folder):
            self._make_folder(os.path.dirname(folder))
            with contextlib.suppress(FileExistsError):  # another rank made it meanwhile
                self._os["mkdir"](folder)

    def _note(self, path: Any) -> None:
        text = os.fsdecode(path)
        if text not in self.written:
            self.written.append(text)

    # Replacements of `open` and the functions of `os`.

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Replaces `open`."""
        writes = any(letter in mode for letter in "wax+")
        if writes and not isinstance(file, int):
            if "x" in mode and os.path.lexists(file):
                return self._open(file, mode, *args, **kwargs)
            file = self.path_to_write(file, keep="w" not in mode)
        elif not writes:
            file = self.path_to_read(file)
        return self._open(file, mode, *args, **kwargs)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Replaces `os.open`."""
        if flags & _WRITE_FLAGS:
            fails = flags & os.O_EXCL and os.path.lexists(path)
            target = path if fails else self.path_to_write(path, keep=not flags & os.O_TRUNC, dir_fd=dir_fd)
        else:
            target = self.path_to_read(path, dir_fd)
        descriptor: int = self._os["open"](target, flags, mode, dir_fd=dir_fd)
        return descriptor

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """Replaces `os.mkdir`. A folder that exists on disk exists for the script too."""
        copy = self._copy_of(path, dir_fd)
        if copy is not None and not self._exists(copy):
            original = copy.removeprefix(self.root)
            parent = os.path.dirname(original)
            if not os.path.lexists(original) and (self._exists(self.root + parent) or self._is_folder(parent)):
                self._note(path)
                self._make_folder(copy)
                return
        self._os["mkdir"](path if copy is None or not self._exists(copy) else copy, mode, dir_fd=dir_fd)

    def listdir(self, path: Any = None) -> Any:
        """Replaces `os.listdir`: the names in the folder and in its copy."""
        copy = self._copy_of_folder(path)
        if copy is None:
            return self._os["listdir"](path)
        copied = self._os["listdir"](copy)
        names = self._os["listdir"](path) if self._is_folder(copy.removeprefix(self.root)) else []
        return list(dict.fromkeys([*names, *(map(os.fsencode, copied) if isinstance(path, bytes) else copied)]))

    def scandir(self, path: Any = None) -> Any:
        """Replaces `os.scandir`: the entries of the folder and of its copy."""
        copy = self._copy_of_folder(path)
        if copy is None:
            return self._os["scandir"](path)
        scans = [self._os["scandir"](copy)]
        if self._is_folder(copy.removeprefix(self.root)):
            scans.append(self._os["scandir"](path))
        return _MergedScan(scans)

    def truncate(self, path: Any, length: int) -> None:
        """Replaces `os.truncate`."""
        self._os["truncate"](self.path_to_write(path, keep=True), length)

    def _copy_of_folder(self, path: Any) -> str | None:
        """The copy of a folder that the script has written to, else None."""
        copy = self._copy_of(path if path is not None else ".") if self._is_used() else None
        return copy if self._exists(copy) else None

    def _wrap(self, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        original = self._os[name]
        return functools.wraps(original)(functools.partial(replacement, original))

    def _change(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Change the script's copy; a file that it did not write stays as it is."""
        copy = self._copy_of(path, kwargs.get("dir_fd"))
        if copy is None:
            return original(path, *args, **kwargs)
        if self._exists(copy):
            return original(copy, *args, **{**kwargs, **({"dir_fd": None} if "dir_fd" in kwargs else {})})
        self._os["lstat"](copy.removeprefix(self.root))  # raises where there is nothing to change
        self._note(path)
        return None

    def _read(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self.path_to_read(path, kwargs.get("dir_fd")), *args, **kwargs)

    def _move(self, name: str, src: Any, dst: Any, **fds: Any) -> None:
        source, target = self._copy_of(src, fds.get("src_dir_fd")), self._copy_of(dst, fds.get("dst_dir_fd"))
        if source is None and target is None:
            self._os[name](src, dst, **fds)
            return
        if source is not None and not self._exists(source):  # the user's own file is copied and stays
            shutil.copy2(src, self.path_to_write(dst, keep=False))
            return
        if target is not None and self._exists(target) and os.path.isfile(target):
            self._os["unlink"](target)
        self._os[name](source or src, self.path_to_write(dst, keep=False))

    def _link(self, name: str, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        source = self.path_to_read(src) if name == "link" else src
        self._os[name](source, self.path_to_write(dst, keep=False), *args, **kwargs)


class _MergedScan:
    """The entries of several `os.scandir`, each name once."""

    def __init__(self, scans: list[Any]) -> None:
        self._scans = scans
        self._entries = self._merge()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def _merge(self) -> Iterator[Any]:
        names: set[Any] = set()
        for scan in self._scans:
            for entry in scan:
                if entry.name not in names:
                    names.add(entry.name)
                    yield entry

    def __enter__(self) -> _MergedScan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all of them."""
        for scan in self._scans:
            scan.close()
