"""What ended a script, in words that say whose fault it is and how to mend it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import sys

from ..spec import RankJob
from . import machine
from .session import Session
from .users import Place, of_traceback, refusal

_TAIL, _NEAR, _LONGEST = 4096, 12, 200  # bytes, lines and characters of what a script wrote at its end
_ERROR = re.compile(r"\b(?:error|fatal|exception|unknown|invalid|missing|required)\b", re.IGNORECASE)


def before_it_left(error: BaseException, session: Session) -> BaseException:
    """What a script had met that printed it and called `sys.exit(1)`: a call of its engine, or what it caught last."""
    if not isinstance(error, SystemExit):
        return error
    met = session.failure or error.__context__
    return met if isinstance(met, Exception) else error


def in_words(error: BaseException, job: RankJob) -> BaseException:
    """What ended the script, said in its own terms where the exception alone does not."""
    place = of_traceback(error)
    if job.device == "cpu" and (said := machine.told_of_cuda(error, place)) is not None:
        return said
    if _waits_for_input(error, place):
        mend = "give it the answer as an argument, or in a file"
        return refusal("it waits for input, and a trial has no terminal", mend=mend, at=place)
    if isinstance(error, ImportError) and (of_import := _of_import(error)) is not None:
        return refusal(of_import[0], mend=of_import[1], at=place)
    if isinstance(error, ModuleNotFoundError) and error.name and place is not None:
        mend = f"install it into the Python that autods runs in, {sys.executable}"
        return refusal(f"it needs {error.name}, which is not installed here", mend=mend, at=place)
    if isinstance(error, SystemExit):
        how = f"with exit code {error.code}" if isinstance(error.code, int) else f"and said: {error.code}"
        quoted = _last_words()
        last = f"; the last that it wrote: {quoted}" if quoted and isinstance(error.code, int) else ""
        return refusal(f"it left {how}{last}", mend="why may stand in its log, above the end", at=place)
    return error


def _of_import(error: ImportError) -> tuple[str, str] | None:
    """What is wrong, and how to mend it, of an import that found its package."""
    cause = error.__cause__  # a library that loads its parts when they are asked for tells what it met in its own words
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is not None:
        words = str(cause).strip().partition("\n")[0]
        what = f"{str(error).partition('. ')[0].rstrip('.')}, because of {type(cause).__name__}: {words}"
        return what, f"the packages in {sys.executable} do not go together: reinstall that one, or take another version"
    package, _, part = (error.name or "").partition(".")
    if package and (part or "cannot import name" in str(error)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            mend = f"{package} {version} is installed here: the script was written for another version of it"
            return str(error).partition(" (")[0], mend
    return None


def _waits_for_input(error: BaseException, place: Place | None) -> bool:
    """Whether it read its standard input, which is empty: a parser of JSON or YAML says that in words of its own."""
    asked = "EOF when reading a line" in str(error) if isinstance(error, EOFError) else False
    return asked or (isinstance(error, ValueError) and place is not None and "sys.stdin" in place.code)


def _last_words() -> str:
    """The last line of this rank's log, or the last that speaks of an error where there is one near the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
            text = log.read(_TAIL).decode(errors="replace")
    except OSError:  # no file: a terminal, or a pipe
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()][-_NEAR:]
    telling = [line for line in lines if _ERROR.search(line)]
    return (telling or lines or [""])[-1][:_LONGEST]
