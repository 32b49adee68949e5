"""Files and paths that a user names: checked before they are opened, and read or written whole."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .errors import InputError, make_write_error
from .units import format_bytes

LARGEST_TEXT = 16 * 2**20  # bytes of a config, or of a file that a workload imports or names
LARGEST_CONFIG = 2**20  # bytes of an accelerate config
LARGEST_CODE = 2 * 2**20  # bytes of Python that is parsed; its tree takes 600 times as many
LARGEST_RECORD = 2**30  # bytes of a file that autods wrote: a journal, a report
# Bytes of an absolute path. The kernel takes 4,095, and names of files in a folder of results need room.
_LONGEST_PATH = 3500
_LONGEST_NAME = 255  # bytes between two slashes
_ROOM_BYTES = 2**18  # that a disk must take before the work that makes a page, a table or a trace
_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})
_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


def describe_file_kind(mode: int) -> str | None:
    """Return 'folder', 'pipe', 'socket' or 'device' for the mode of a file; None for a regular file."""
    return next((word for is_kind, word in _KINDS if is_kind(mode)), None)


def read_file(path: str | os.PathLike[str], *, most: int = LARGEST_TEXT, hint: str | None = None) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises InputError with the path for a file that is missing, larger or cannot be read. A pipe or a device is refused
    and never waited for.
    """
    place = str(path)
    try:
        check_is_file(os.stat(path), place)  # before it is opened: to open a device can have effects
        with open(path, "rb", opener=open_without_waiting) as file:
            opened = os.fstat(file.fileno())
            check_is_file(opened, place)
            content = b"" if opened.st_size > most else file.read(most + 1)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", place=place, hint=hint) from None
    except ValueError as error:  # a NUL, or characters that no file name has
        raise InputError(f"is not the path of a file: {error}", place=place, hint=hint) from None
    if (size := max(opened.st_size, len(content))) > most:
        problem = f"has {format_bytes(size)}, and at most {format_bytes(most)} are read"
        raise InputError(problem, place=place, hint=hint)
    return content


def open_without_waiting(path: str, flags: int) -> int:
    """Return a file descriptor, as an `opener` of `open`: a pipe that nobody writes or reads is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)


def read_text(path: str | os.PathLike[str], *, most: int = LARGEST_TEXT, hint: str | None = None) -> str:
    """Return the text of a regular file in UTF-8, with or without its mark. Raises InputError as `read_file` does."""
    content = read_file(path, most=most, hint=hint)
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError("is not text in UTF-8 but in UTF-16", place=str(path), hint="save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError("is not text in UTF-8", place=f"{path}:{line}", hint=hint) from None


def check_is_file(state: os.stat_result, place: str) -> None:
    """Raises InputError for what is not a regular file."""
    kind = describe_file_kind(state.st_mode)
    if kind is not None:
        hint = "save its content in a file, and give that" if kind in ("pipe", "device") else None
        raise InputError(f"cannot be read: it is a {kind}, not a file", place=place, hint=hint)


def check_path(path: object, option: str) -> None:
    """Raises InputError that names the option for a path that no file can have."""
    try:
        encoded = os.fsencode(path) if isinstance(path, str | os.PathLike) else b""
    except (ValueError, TypeError) as error:
        reason = "characters that no file name has" if isinstance(error, ValueError) else "no path as text"
        raise InputError(f"{option} has {reason}") from None
    if not encoded:
        raise InputError(f"{option} is empty", hint="give a path, or . for this folder")
    if b"\0" in encoded:
        raise InputError(f"{option} has a NUL character, which no path has")
    for part in encoded.split(b"/"):
        if len(part) > _LONGEST_NAME:
            start = os.fsdecode(part)[:40]
            problem = f"{option} has a name of {len(part)} bytes, {start}…; {_LONGEST_NAME} are the most"
            raise InputError(problem, hint="give a shorter one")
    with contextlib.suppress(OSError):  # the current folder is gone
        encoded = os.path.abspath(encoded)
    if len(encoded) > _LONGEST_PATH:
        problem = f"{option} is a path of {len(encoded)} bytes; {_LONGEST_PATH} are the most"
        raise InputError(problem, hint="give a shorter one")


def as_folder_name(name: str) -> str:
    """Return a name that is one folder's: without slashes and control characters, and of at most 100 bytes."""
    plain = "".join(letter if letter.isprintable() and letter != "/" else "_" for letter in name)
    cut = plain.encode(errors="surrogateescape")[:100].decode(errors="ignore")
    return f"_{cut}" if cut.startswith(".") or not cut else cut


def find_existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


class OutputFile(NamedTuple):
    """A file that a user names with an option, and how files of its kind begin."""

    option: str
    path: str | os.PathLike[str]
    begins: tuple[bytes, ...]


def exists_now(path: str | os.PathLike[str]) -> bool:
    """Whether a file is there that another machine may have made."""
    ask_anew(os.path.dirname(path))
    return os.path.exists(path)


def ask_anew(folder: str | os.PathLike[str]) -> None:
    """Have what is in a folder be as other machines have left it.

    On NFS a machine that has missed a file believes for up to a minute that it is still missing. To open its folder
    asks the server (nfs_lookup_verify_inode of the kernel's fs/nfs/dir.c).
    """
    with contextlib.suppress(OSError):
        os.close(os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def check_outputs(outputs: Iterable[OutputFile], taken: Iterable[Path] = ()) -> None:
    """Check files before the work whose results they will hold. `taken` are others that the command reads or writes.

    A link stands for the file it leads to. Raises EnvironmentBroken for a full disk. Raises InputError for a file that
    cannot be written or is printed to, and for one file given twice. So it does for one that holds something of another
    kind: a model, a config, a journal.
    """
    users = {_identify(path): "the results" for path in taken}
    for number, name in ((1, "standard output"), (2, "standard error")):
        with contextlib.suppress(OSError):  # it is closed
            users[_key(os.fstat(number))] = name
    for option, path, begins in outputs:
        check_path(path, option)
        _check_output(option, os.fspath(path), begins)
        user = users.setdefault(_identify(path), option)
        if user != option:
            raise InputError(f"{option} and {user} are one file", place=str(path), hint="give another file")


def _check_output(option: str, path: str, begins: tuple[bytes, ...]) -> None:
    if path == "-":
        raise InputError(f"{option} -: standard output shows the result", hint="give a file; ./- is one, too")
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    hint, problem = "give another file", None
    try:
        if os.path.lexists(target):
            problem = _find_obstacle(target, begins)
        elif path.endswith(os.sep):
            problem = "it is the name of a folder"
        if problem is None:
            hint = f"make its folder first: mkdir -p {shlex.quote(folder)}" if not os.path.lexists(folder) else hint
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_ROOM_BYTES))
    except OSError as error:
        raise make_write_error(Path(path), error, hint=hint) from None
    if problem is not None:
        raise InputError(f"cannot be written: {problem}", place=path, hint=hint)


def _find_obstacle(target: str, begins: tuple[bytes, ...]) -> str | None:
    """Why a file that exists is not written over."""
    if kind := describe_file_kind(os.stat(target).st_mode):
        return f"is a {kind}"
    if not os.access(target, os.W_OK):
        return "it is read-only"
    with open(target, "rb", opener=open_without_waiting) as file:
        start = file.read(max(map(len, begins))).lower()
    return None if not start or start.startswith(begins) else "it holds something else, which would be lost"


def _identify(path: str | os.PathLike[str]) -> object:
    """What two names of one file share: device and number where it exists, as hard links have them; else its path."""
    try:
        return _key(os.stat(path))
    except OSError:
        return os.path.realpath(path)


def _key(state: os.stat_result) -> object:
    return state.st_dev, state.st_ino


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file at once: a reader sees the old or the new one. Its mode stays, and a link is followed.

    Raises the error of `errors.make_write_error` for a file that cannot be written. No folder is made.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".autods-{os.getpid()}-{threading.get_ident()}")
    try:
        mode = os.stat(target).st_mode if os.path.lexists(target) else None
        if mode is not None and (kind := describe_file_kind(mode)):
            raise InputError(f"cannot be written: it is a {kind}", place=str(path), hint="give another place")
        with open(temporary, "wb") as file:
            file.write(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, target)
    except OSError as error:
        raise make_write_error(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def is_library_file(name: str) -> bool:
    """Whether a Python file is an installed package's, by its path; the user's own code lies elsewhere."""
    return not _LIBRARY_FOLDERS.isdisjoint(Path(name).parts)
