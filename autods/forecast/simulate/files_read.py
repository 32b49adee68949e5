"""What a prepared process and its forks have read, as it was then: answers hold while it stays the same.

A file counts by its size and its times, and a folder that was listed by its names. What was looked for counts by
whether it is there; so does a module that was not found. Python's own functions for this are wrapped, and those of two
libraries in C. What is open or mapped, such as a dataset of Arrow, counts, too. A file that another library in C opens
and closes, or another program, is not seen. An audit hook would hear of each `open`, too, and of each `id()` besides:
simulations would take a third longer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...rank.patching import Patch, declare, when_imported

# Of a file: its bytes, and when its content and its place were last changed, in ns. Of a folder's names: how many, and
# their checksum. Of a folder by itself, and of a device: nothing.
Stamp = tuple[int, ...]
_WHY = "what a simulation has read decides how long it holds"
_OPENS = [declare(f"{module}.open", _WHY) for module in ("builtins", "io", "_io")]  # imports open the last
_OS_OPEN, _MKDIR = declare("os.open", _WHY), declare("os.mkdir", _WHY)
_LOOKS = declare("os.stat", _WHY), declare("os.access", _WHY)  # os.path.exists and pathlib call them
_LISTS = declare("os.listdir", _WHY), declare("os.scandir", _WHY)  # glob and os.walk call them
_READS_IN_C = {
    module: declare(f"{module}.{function}", _WHY, optional=True)
    for module, function in (("sqlite3", "connect"), ("safetensors", "safe_open"))
}
_SUPPORTED = os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_MAPS, _DESCRIPTORS, _DESCRIPTIONS = Path("/proc/self/maps"), Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_GONE = " (deleted)"
_NAMES, _INSTALLED = "/", "/*-info"  # follow the path of a folder that was listed, or searched for installed packages
_SEARCHES = ("importlib.metadata", "importlib_metadata")
_MODULES = ("", ".py", *importlib.machinery.EXTENSION_SUFFIXES)  # what follows a module's name
_stat, _listdir = os.stat, os.listdir


def read_stamp(path: str) -> Stamp | None:
    """Return the stamp of what is at the path now; None where nothing is. A path that ends with / is a folder's names.

    A module in an archive has the archive's stamp.
    """
    try:
        if path.endswith((_NAMES, _INSTALLED)):
            folder, searched, _ = path.partition(_INSTALLED)
            names = sorted(name for name in _listdir(folder) if not searched or name.endswith(("-info", ".egg")))
            return len(names), zlib.crc32("\0".join(names).encode(errors="surrogateescape"))
        state = _stat(path)
    except NotADirectoryError:
        return read_stamp(os.path.dirname(path))
    except (OSError, ValueError):
        return None
    return (state.st_size, state.st_mtime_ns, state.st_ctime_ns) if stat.S_ISREG(state.st_mode) else ()


def read_change_ns(stamp: Stamp | None) -> int:
    """Return when a file was last changed, or came to its place, by the clock of its file system; else 0."""
    return stamp[2] if stamp and len(stamp) == 3 else 0


class FilesRead:
    """Collects what this process has read, but for these files and folders. A fork goes on with it."""

    def __init__(self, *ignored: str) -> None:
        self._ignored = (*_NO_FILES, *(path.rstrip("/") + "/" for path in ignored))
        self._read: dict[str, Stamp | None] = {}  # as it was before the process read it for the first time
        self._made: set[str] = set()  # by this process: what it finds there is no input
        self._collected: set[str] = set()

    def listen(self) -> None:
        """Note what Python reads, for the rest of this process. Modules that have imported `open` get the new one."""
        self._replace(_OPENS, self._open)
        self._replace([_OS_OPEN], self._os_open)
        self._replace([_MKDIR], self._make_folder)
        for patch in _LOOKS:
            self._replace([patch], self._look)
        for patch in _LISTS:
            self._replace([patch], self._list_names)
        for module, patch in _READS_IN_C.items():
            when_imported(module, functools.partial(patch.wrap, self._look))
        sys.meta_path.append(SimpleNamespace(find_spec=self._miss_module))

    def _replace(self, patches: Sequence[Patch], wrapper: Callable[..., Any]) -> None:
        """Wrap a function once, under all of its names: it pickles as before, and `os` supports for it what it did."""
        original = patches[0].original()
        patches[0].wrap(wrapper)
        wrapped = patches[0].original()
        for patch in patches[1:]:
            patch.install(wrapped)
        for functions in _SUPPORTED:
            if original in functions:
                functions.add(wrapped)
        for module in [module for name, module in sys.modules.items() if name not in (__name__, "posix")]:
            for name, value in tuple(getattr(module, "__dict__", {}).items()):
                if value is original:
                    setattr(module, name, wrapped)

    def _open(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        file = args[0] if args else kwargs.get("file")
        mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
        writes = isinstance(mode, str) and not set(mode).isdisjoint("wax")
        if not writes:
            self._note(file)
        opened = original(*args, **kwargs)
        if writes and "a" not in mode:
            self._note_made(file)
        return opened

    def _os_open(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        path = args[0] if args else kwargs.get("path")
        flags = args[1] if len(args) > 1 else kwargs.get("flags", 0)
        reads = isinstance(flags, int) and flags & os.O_ACCMODE == os.O_RDONLY
        if reads:
            self._note(path, folder=kwargs.get("dir_fd"))
        opened = original(*args, **kwargs)
        if not reads and flags & (os.O_TRUNC | os.O_EXCL):
            self._note_made(path, folder=kwargs.get("dir_fd"))
        return opened

    def _make_folder(self, original: Any, /, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._note_made(args[0] if args else kwargs.get("path"), folder=kwargs.get("dir_fd"))

    def _look(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function whose first argument is a path."""
        self._note(args[0] if args else kwargs.get("path"), folder=kwargs.get("dir_fd"))
        return original(*args, **kwargs)

    def _list_names(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2).f_globals.get("__name__")  # behind that of the patch
        suffix = _INSTALLED if caller in _SEARCHES else _NAMES  # results may lie in the folder of a model
        self._note((args[0] if args else kwargs.get("path")) or ".", suffix=suffix)
        return original(*args, **kwargs)

    def _miss_module(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """The last finder of modules: none has found this one, in the folders of its package or of `sys.path`."""
        for folder in sys.path if path is None else path:
            for suffix in _MODULES:
                self._note(f"{folder or '.'}/{name.rpartition('.')[2]}", suffix=suffix)

    def _note(self, file: object, *, folder: int | None = None, suffix: str = "") -> None:
        path = _find_path(file, folder)
        if path is not None and (path := path + suffix) not in self._read and path not in self._made:
            self._read[path] = read_stamp(path)

    def _note_made(self, file: object, *, folder: int | None = None) -> None:
        path = _find_path(file, folder)
        if path is not None:
            self._made.add(path)

    def collect(self) -> dict[str, Stamp | None]:
        """Return the stamps of what was read since the last call, as it was then; None for what was missing."""
        read = dict(self._read)
        for path in self._list():
            if path not in read and path not in self._collected:
                read[path] = read_stamp(path)
        new = {path: stamp for path, stamp in sorted(read.items()) if path not in self._collected}
        self._collected.update(new)
        return {path: stamp for path, stamp in new.items() if not self._is_ours(path)}

    def _is_ours(self, path: str) -> bool:
        """Whether it is the simulator's own, or lies in a folder that this process has made."""
        return f"{path}/".startswith((*self._ignored, *(f"{made}/" for made in self._made)))

    def _list(self) -> Iterator[str]:
        """What is there without a call of Python: modules, and files that are mapped or open."""
        # A lazy module would be imported by getattr(module, "__file__").
        modules = [getattr(module, "__dict__", {}) for module in tuple(sys.modules.values())]
        yield from (path for module in modules if isinstance(path := module.get("__file__"), str))
        mapped = (line.split(None, 5)[5:] for line in _MAPS.read_text(errors="surrogateescape").splitlines())
        there = [path for parts in mapped for path in parts]
        for number in _listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError, StopIteration, ValueError):  # it was closed meanwhile
                lines = (_DESCRIPTIONS / number).read_text().splitlines()
                flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
                if flags & os.O_ACCMODE == os.O_RDONLY:
                    there.append(os.readlink(_DESCRIPTORS / number))
        yield from (path for path in there if path.startswith("/") and not path.endswith(_GONE))  # not [heap]


def _find_path(file: object, folder: int | None) -> str | None:
    """Return the absolute path; None for what is no path, such as a descriptor, or in a folder that is gone."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        return None
    with contextlib.suppress(OSError):
        path = os.fsdecode(file)
        if folder is not None and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"{_DESCRIPTORS}/{folder}"), path)
        if path.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # it stands for no source
                path = importlib.util.source_from_cache(path)
        # Without normpath: `link/..` is where the link leads.
        return os.path.join(os.getcwd(), path.rstrip("/") or "/")
    return None
