"""A copy-on-write overlay over the user's files: a script reads its changes, and the files on disk stay the same.

It replaces `open`, `io.FileIO`, the functions of `os` that take a path, and the same of some libraries in C. Others
that open files themselves bypass it; the kernel refuses what they write where it can, see `sandbox`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..patching import declare, declare_all, when_imported

_WHY = "a script's writes are kept out of the user's folders"
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_OPENS = (
    declare("builtins.open", _WHY),
    declare("io.open", _WHY),
    declare("tarfile.bltn_open", _WHY, optional=True),  # names that the standard library gives to `open`
    declare("bz2._builtin_open", _WHY, optional=True),
)
_FILE_IO = declare("io.FileIO", _WHY)
_TOKENIZER_SAVE = declare("tokenizers.Tokenizer.save", "its Rust code writes the file itself")
_SQLITE = declare("sqlite3.connect", "a database of the script is a copy of its own")
_ARROW = declare("pyarrow.memory_map", "a file that the script wrote is read where it was redirected")
LARGEST_COPIED = 2**26  # bytes
# What a new Python runs first: the overlay, then the module of this name that it would have run.
_SITE = """
import sys
sys.path.remove({folder!r})
own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = own
try:
    from pathlib import Path
    from autods.rank.script.overlay import Overlay
except ImportError:  # a Python of another environment
    pass
else:
    Overlay(Path({root!r}), {free!r}).install()
"""


class Overlay:
    """Redirects writes to `root`, except below `root` itself and the folders `free`.

    `written` has the paths, as the script names them, that this process would have changed. The overlay itself calls
    the replaced functions too, which leave paths below `root` alone.
    """

    def __init__(self, root: Path, free: tuple[str, ...]) -> None:
        self.written: dict[str, None] = {}  # in order
        self._root = str(root)
        self._given = free
        self._free = tuple(os.path.join(os.path.abspath(folder), "") for folder in (self._root, *free))

    def install(self) -> None:
        """Replace the functions for the rest of this process."""
        for patch in _OPENS:
            patch.wrap(self._open)
        _FILE_IO.install(_make_file_io(self._choose))
        for name, replacement in _REPLACEMENTS.items():
            _OS[name].wrap(replacement, self)
            getattr(os, name).__module__ = "os"  # where pickle looks for it, not in posix
        when_imported("sqlite3", self._redirect_databases)
        when_imported("pyarrow", lambda: _ARROW.wrap(_open_chosen, self.path_to_read, everywhere=True))
        when_imported("tokenizers", lambda: _TOKENIZER_SAVE.wrap(self._save_tokenizer))

    def follow_children(self, folder: Path) -> None:
        """Let each new Python that this process starts have the overlay, by a module in this new folder.

        So a process has it that `multiprocessing` spawns, which shares no memory with this one.
        """
        folder.mkdir()
        text = _SITE.format(folder=str(folder), root=self._root, free=self._given)
        (folder / "sitecustomize.py").write_text(text)
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([path] if path else [])])

    def _redirect_databases(self) -> None:
        """Let sqlite3 open the script's own copy of a database file.

        A database in memory or at a URI stays as it is, and so does a file so large that it is data.
        """

        def choose(path: Any) -> Any:
            name = os.fspath(path)
            if not name or name.startswith((":", "file:")):
                return path
            is_large = os.path.isfile(name) and os.path.getsize(name) > LARGEST_COPIED
            return self.path_to_read(path) if is_large else self.path_to_write(path, keep=True)

        _SQLITE.wrap(_open_chosen, choose, everywhere=True)

    def _save_tokenizer(self, original: Any, tokenizer: Any, path: Any, /, *args: Any, **kwargs: Any) -> None:
        """Write a tokenizer's file where the script finds it again."""
        original(tokenizer, self.path_to_write(path, keep=False), *args, **kwargs)

    # Where a path leads.

    def path_to_write(self, path: Any, *, keep: bool, dir_fd: int | None = None) -> Any:
        """The path to write to in place of `path`. `keep` copies the present content of the file there first."""
        copy = self._copy_of(path, dir_fd)
        if copy is None or os.path.lexists(copy):
            return path if copy is None else copy
        original = copy.removeprefix(self._root)
        if not os.path.isdir(os.path.dirname(original)):
            return path  # the system reports that there is no such folder
        self.written[os.fsdecode(path)] = None
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        if keep and os.path.isfile(original):
            shutil.copyfile(original, copy)
        return copy

    def path_to_read(self, path: Any, dir_fd: int | None = None) -> Any:
        """The path to read in place of `path`."""
        copy = self._copy_of(path, dir_fd)
        return path if copy is None or not os.path.lexists(copy) else copy

    def _copy_of(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Where writes to `path` go; None where they are free, or for a file descriptor."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        full = os.path.abspath(text)
        return None if os.path.join(full, "").startswith(self._free) else self._root + full

    # Replacements of `open` and the functions of `os`.

    def _open(self, original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return original(self._choose(file, mode), mode, *args, **kwargs)

    def _choose(self, file: Any, mode: str) -> Any:
        """The file to open. An "x" for a file that is there fails on the file as the script sees it."""
        if any(letter in mode for letter in "wax+") and not ("x" in mode and os.path.lexists(file)):
            return self.path_to_write(file, keep="w" not in mode)
        return self.path_to_read(file)

    def _os_open(self, original: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        if flags & _WRITE_FLAGS and not (flags & os.O_EXCL and os.path.lexists(path)):
            path = self.path_to_write(path, keep=not flags & os.O_TRUNC, dir_fd=dir_fd)
        else:
            path = self.path_to_read(path, dir_fd)
        return original(path, flags, mode, dir_fd=dir_fd)

    def _read(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self.path_to_read(path, kwargs.get("dir_fd")), *args, **kwargs)

    def _enter(self, original: Any, path: Any) -> None:
        """Enter a folder on disk as such: its copy has only what was written, and relative paths lead there."""
        try:
            original(path)
        except FileNotFoundError:
            original(self.path_to_read(path))

    def _truncate(self, original: Any, path: Any, length: int) -> None:
        original(self.path_to_write(path, keep=True), length)

    def _change(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Change the script's copy; a file that it did not write stays as it is."""
        copy = self._copy_of(path, kwargs.get("dir_fd"))
        if copy is None or os.path.lexists(copy):
            return original(copy or path, *args, **kwargs)
        os.lstat(copy.removeprefix(self._root))  # raises where there is nothing to change
        self.written[os.fsdecode(path)] = None
        return None

    def _mkdir(self, original: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """A folder that exists on disk exists for the script too."""
        copy = self._copy_of(path, dir_fd)
        if copy is None or os.path.lexists(copy):
            original(copy or path, mode, dir_fd=dir_fd)
            return
        on_disk = copy.removeprefix(self._root)
        if os.path.lexists(on_disk) or not os.path.isdir(os.path.dirname(on_disk)):
            original(path, mode, dir_fd=dir_fd)  # raises
            return
        self.written[os.fsdecode(path)] = None
        os.makedirs(copy, exist_ok=True)

    def _list(self, original: Any, path: Any = None) -> Any:
        """The names or entries in a folder and in its copy."""
        copy = self._copy_of("." if path is None else path)
        if copy is None or not os.path.lexists(copy):
            return original(path)
        entries = [original(os.fsencode(copy) if isinstance(path, bytes) else copy)]
        with contextlib.suppress(OSError):  # only the script has this folder
            entries.append(original(path))
        return _MergedScan(entries) if original.__name__ == "scandir" else [*dict.fromkeys(itertools.chain(*entries))]

    def _move(self, original: Any, src: Any, dst: Any, **fds: Any) -> None:
        source, target = self._copy_of(src, fds.get("src_dir_fd")), self._copy_of(dst, fds.get("dst_dir_fd"))
        if source is None and target is None:
            original(src, dst, **fds)
        elif source is not None and not os.path.lexists(source):  # the user's own file is copied and stays
            shutil.copy2(src, self.path_to_write(dst, keep=False))
        else:
            original(source or src, self.path_to_write(dst, keep=False))

    def _link(self, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        source = self.path_to_read(src) if original.__name__ == "link" else src
        original(source, self.path_to_write(dst, keep=False), *args, **kwargs)


def _open_chosen(choose: Callable[[Any], Any], original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Open the file that `choose` returns for the path."""
    if args and isinstance(args[0], (str, os.PathLike)):
        args = (choose(args[0]), *args[1:])
    return original(*args, **kwargs)


def _make_file_io(choose: Callable[[Any, str], Any]) -> type[io.FileIO]:
    """A FileIO that opens the file of `choose`. A FileIO that `open` makes is an instance of it, too."""

    original = io.FileIO

    class OpenedFile(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return type.__instancecheck__(original if cls is FileIO else cls, instance)

    class FileIO(original, metaclass=OpenedFile):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            super().__init__(choose(file, mode), mode, *args, **kwargs)

    functools.update_wrapper(FileIO, original, updated=())
    return FileIO


class _MergedScan(contextlib.ExitStack):
    """The entries of several `os.scandir`, each name once."""

    def __init__(self, scans: list[Any]) -> None:
        super().__init__()
        for scan in scans:
            self.enter_context(scan)
        self._entries = iter({entry.name: entry for scan in reversed(scans) for entry in scan}.values())

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)


_REPLACEMENTS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("unlink", "remove", "rmdir", "chmod", "chown", "utime", "lchown"), Overlay._change),
    **dict.fromkeys(("stat", "lstat", "access", "readlink", "statvfs"), Overlay._read),
    **dict.fromkeys(("listdir", "scandir"), Overlay._list),
    **dict.fromkeys(("rename", "replace"), Overlay._move),
    **dict.fromkeys(("link", "symlink"), Overlay._link),
    "chdir": Overlay._enter,
    "open": Overlay._os_open,
    "mkdir": Overlay._mkdir,
    "truncate": Overlay._truncate,
}
_OS = declare_all("os", _REPLACEMENTS, _WHY)
