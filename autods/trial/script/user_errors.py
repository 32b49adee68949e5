"""Errors of a script in the user's terms: the line in the user's file, the problem there, and its fix."""

from __future__ import annotations

import contextlib
import importlib.metadata
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...types import Device
from ...workload.protocol import WorkloadError

_LIBRARY_FOLDERS = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_AUTODS = str(Path(__file__).parents[2])
# Messages of torch and other libraries on a machine without CUDA.
_NO_CUDA = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|_cuda_|CUDA driver initialization|invalid device ordinal"
    r"|Attempting to deserialize object on a CUDA device|torch\.cuda is not available|CUDA is not available"
    r"|requires? (?:CUDA|an? (?:NVIDIA )?GPU)|CUDA is required|CUDA_HOME|'nvcc'"
    r"|No GPUs? (?:was |were )?(?:found|available)|No supported gpu backend|accelerator device when none is available",
    re.IGNORECASE,
)
_ERROR_WORD = re.compile(r"\b(?:error|fatal|exception|unknown|invalid|missing|required)\b", re.IGNORECASE)
_LOG_BYTES, _LOG_LINES, _QUOTED_CHARS = 4096, 12, 200  # what is read and quoted of the end of a log


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, with its source text."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def find_caller() -> Place | None:
    """The innermost line of the user's files on the current stack, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file):
            return Place(file, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def find_raiser(error: BaseException) -> Place | None:
    """The innermost line of the user's files in the traceback, or None."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return None
    return Place(frames[-1].filename, frames[-1].lineno or 0, (frames[-1].line or "").strip())


def script_error(problem: str, *, hint: str, at: Place | None = None) -> WorkloadError:
    """An error at a line of the script; without `at`, at the line that this call comes from."""
    place = at or find_caller()
    return WorkloadError(problem, place=None if place is None else str(place), hint=hint)


def cause_of_exit(error: BaseException, engine_failure: BaseException | None) -> BaseException:
    """The error behind a `sys.exit`: a failed call of the engine, or the exception that the script was handling."""
    if not isinstance(error, SystemExit):
        return error
    cause = engine_failure or error.__context__
    return cause if isinstance(cause, Exception) else error


def explain(error: BaseException, device: Device) -> BaseException:
    """An error in the user's terms where the exception alone does not tell enough; else the exception itself."""
    place = find_raiser(error)
    if device == "cpu" and (explained := _explain_cuda(error, place)) is not None:
        return explained
    if _waits_for_input(error, place):
        hint = "give it the answer as an argument, or in a file"
        return script_error("it waits for input, and a trial has no terminal", hint=hint, at=place)
    if isinstance(error, ImportError) and (explained := _explain_import(error, place)) is not None:
        return explained
    if isinstance(error, ModuleNotFoundError) and error.name and place is not None:
        hint = f"install it into the Python that autods runs in, {sys.executable}"
        return script_error(f"it needs {error.name}, which is not installed here", hint=hint, at=place)
    if isinstance(error, SystemExit):
        return _explain_exit(error, place)
    return error


def last_log_line() -> str:
    """The last line of this rank's log; near the end, a line that mentions an error is preferred."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
            text = log.read(_LOG_BYTES).decode(errors="replace")
    except OSError:  # a terminal or a pipe
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    errors = [line for line in lines if _ERROR_WORD.search(line)]
    return (errors or lines or [""])[-1][:_QUOTED_CHARS]


def library_folders(search_path: Iterable[str]) -> tuple[str, ...]:
    """The folders of the search path that hold installed packages, each with a separator at its end.

    `pip install --user` and `--target` install into other folders than the interpreter's own.
    """
    others = {folder for folder in search_path if folder and next(Path(folder).glob("*.dist-info"), None) is not None}
    return tuple(os.path.join(folder, "") for folder in sorted(_LIBRARY_FOLDERS | others))


_INSTALLED = library_folders(sys.path)


def _is_users(file: str) -> bool:
    return not file.startswith((*_INSTALLED, _AUTODS, "<"))


def _explain_cuda(error: BaseException, place: Place | None) -> WorkloadError | None:
    """The error of a script that needs CUDA where CPU ranks stand in for GPUs; None for any other error."""
    divides = isinstance(error, ZeroDivisionError) and place is not None and "device_count" in place.code
    if not isinstance(error, Exception) or not (divides or _NO_CUDA.search(str(error))):
        return None
    return WorkloadError(
        f"needs CUDA, and --device cpu has none: {str(error).splitlines()[0]}",
        place=None if place is None else str(place),
        hint="use engine.device or deepspeed.get_accelerator().device_name(), or run it with --device cuda",
    )


def _waits_for_input(error: BaseException, place: Place | None) -> bool:
    """Whether the script read its empty standard input, directly or through a parser of JSON or YAML."""
    if isinstance(error, EOFError):
        return "EOF when reading a line" in str(error)
    return isinstance(error, ValueError) and place is not None and "sys.stdin" in place.code


def _explain_import(error: ImportError, place: Place | None) -> WorkloadError | None:
    """The error of an import whose package is installed; None when the package is missing or the user's own."""
    cause: Any = error.__cause__  # a library that loads its modules lazily wraps the original error
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is not None:
        reason = str(cause).strip().partition("\n")[0]
        problem = f"{str(error).partition('. ')[0].rstrip('.')}, because of {type(cause).__name__}: {reason}"
        hint = f"the packages in {sys.executable} do not fit together: reinstall that one, or take another version"
        return script_error(problem, hint=hint, at=place)
    package, _, submodule = (error.name or "").partition(".")
    if package and (submodule or "cannot import name" in str(error)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            hint = f"{package} {version} is installed here: the script was written for another version of it"
            return script_error(str(error).partition(" (")[0], hint=hint, at=place)
    return None


def _explain_exit(error: SystemExit, place: Place | None) -> WorkloadError:
    if isinstance(error.code, int):
        line = last_log_line()
        problem = f"it left with exit code {error.code}" + (f"; the last line of its log: {line}" if line else "")
    else:
        problem = f"it left with the message: {error.code}"
    return script_error(problem, hint="its log may show the reason, above the end", at=place)
