"""The errors that end a command. A trial that runs out of memory is a value instead (`types.OutOfMemory`)."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Container
from pathlib import Path

_MOST = 300  # characters of another library's text
_ALTERNATIVE = re.compile("(; |, or )")
_OTHERS, _OPTION = re.compile("`[^`]*`"), re.compile(r"(?<![\w-])--[a-z][a-z-]+")


class AutodsError(Exception):
    """Base of all errors that autods raises on purpose. The message is one or two lines for a person."""

    exit_code = 1
    kind = "internal"  # what the object of --json says
    hint: str | None

    def keep_options(self, options: Container[str]) -> None:
        """Drop from the hint, the second line, the alternatives that name an option which is not among these.

        What is checked below the commands is the same for each, and the command that failed may lack an option. Text
        in backticks is about another command.
        """
        problem, _, hint = str(self).partition("\n")
        kept = keep_alternatives(
            hint.strip(), lambda text: all(name in options for name in _OPTION.findall(_OTHERS.sub("", text)))
        )
        if kept != hint.strip():
            self.hint = kept or None
            self.args = (f"{problem}\n  {self.hint}" if self.hint else problem,)


def keep_alternatives(hint: str, is_kept: Callable[[str], bool]) -> str:
    """Return a hint such as "do this; that, or the other" with those of its alternatives that are kept."""
    first, *others = _ALTERNATIVE.split(hint)
    kept = [part for part in (("", first), *zip(others[::2], others[1::2], strict=True)) if is_kept(part[1])]
    return "".join(end + text for end, text in kept).removeprefix(kept[0][0]) if kept else ""


class InputError(AutodsError):
    """The user's input is wrong. `problem` is what is wrong, `place` a file and line, and `hint` the fix."""

    exit_code = 2
    kind = "input"

    def __init__(self, problem: str, *, place: str | None = None, hint: str | None = None) -> None:
        self.problem, self.place, self.hint = problem, place, hint
        line = f"{place}: {problem}" if place else problem
        super().__init__(f"{line}\n  {hint}" if hint else line)


class EnvironmentBroken(AutodsError):
    """The machine or the installation lacks something; the message names the command that fixes it."""

    exit_code = 3
    kind = "environment"


class DiskFull(EnvironmentBroken):
    """A disk is full, or a quota is used up."""


class Interrupted(AutodsError):
    """Ctrl-C or SIGTERM stopped the command. All ranks are gone and the journal is kept."""

    exit_code = 130
    kind = "interrupted"


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Errors of a file for which the machine is at fault, and what mends each.
_MACHINE_FIXES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EFBIG: "files may not become so large: raise `ulimit -f`",
    errno.EROFS: "mount it for writing, or give another place",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "the machine has too many files open: raise fs.file-max",
    errno.ENOMEM: "free some memory",
    errno.EIO: "the disk fails: see dmesg",
    errno.ESTALE: "mount it again",
    errno.ENOTCONN: "mount it again",
}

# Modules that autods requires, and the packages that bring them. An installation with --no-deps may lack some.
REQUIRED = {
    "deepspeed": "deepspeed",
    "greenlet": "greenlet",
    "optuna": "optuna",
    "pynvml": "nvidia-ml-py",
    "ray": "ray",
    "scipy": "scipy",
    "torch": "torch",
    "transformers": "transformers",
}

_NO_THREAD = re.compile("can't start new thread|Resource temporarily unavailable")


def make_write_error(path: Path, error: OSError, *, hint: str = "give another place") -> AutodsError:
    """Return the error about a path that cannot be written.

    It is DiskFull for a full disk, EnvironmentBroken for a broken one, else InputError, with `hint`.
    """
    problem = f"cannot be written: {error.strerror or error}"
    if error.errno in _MACHINE_FIXES:
        kind = DiskFull if error.errno in NO_ROOM else EnvironmentBroken
        return kind(f"{path}: {problem}\n  {_MACHINE_FIXES[error.errno]}; the same command goes on")
    return InputError(problem, place=str(path), hint=hint)


def describe_broken_machine(error: BaseException) -> str | None:
    """Return two lines for an exception of Python's that the machine or the installation causes; None for another."""
    match error:
        case ModuleNotFoundError(name=str(name)) if name in REQUIRED:
            package = REQUIRED[name]
            hint = f"pip install {package}, or install autods without `--no-deps`"
            return f"the package {package} is not installed, and this command needs it\n  {hint}"
        case ImportError():
            return describe_failed_import(error)
        case OSError(errno=number) if number in _MACHINE_FIXES:
            place = f"{error.filename}: " if error.filename else ""
            return f"{place}{error.strerror}\n  {_MACHINE_FIXES[number]}; the same command goes on"
        case FileNotFoundError() if "temporary directory" in str(error):  # of the module tempfile
            return "no folder for temporary files can be written\n  free some space in /tmp, or set TMPDIR to another"
        case MemoryError():
            return "this process has no memory left\n  free some, or raise `ulimit -v` and `ulimit -d`"
        case BlockingIOError(filename=None) | RuntimeError() if _NO_THREAD.search(str(error)):
            return "no process or thread can be started\n  raise `ulimit -u`, or the pids limit of the container"
    return None


def find_first_cause(error: BaseException) -> BaseException:
    """Return what was raised first: a library that loads its modules lazily wraps it, and so does `python -m`."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def describe_failed_import(error: BaseException) -> str:
    """Two lines about an exception that ended the imports of what autods needs."""
    problem = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST]
    hint = "install it again; where memory is limited, raise `ulimit -v`"
    return f"what autods needs cannot be imported: {problem}\n  {hint}"
