"""Text of code that is not ours: read from any object without harm, and safe to print on a terminal."""

from __future__ import annotations

import re
import traceback
from typing import Any

from .units import escape_controls

_MOST_CHARS = 6000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def clean(text: str) -> str:
    """The text without colours; what else a terminal would obey stands as Python writes it. Line ends and tabs stay."""
    return escape_controls(_COLOURS.sub("", text).replace("\r\n", "\n"))


def read_text(value: object, most: int = _MOST_CHARS) -> str:
    """What `str` says of any object, printable and at most about `most` characters long.

    Its methods may be a user's: they may raise anything, or return what is no text.
    """
    for read in (str, repr):
        try:
            return clean("".join(read(value)[:most]))
        except BaseException:  # SystemExit, too
            continue
    return "(no text: its __str__ raises an exception)"


def read_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, printable and shortened; the frames alone where the rest cannot be read."""
    try:
        lines: Any = traceback.format_exception(error)
        return clean(_shorten("".join(lines)))
    except BaseException:  # of a method of the exception, or of one that it was raised from
        frames = traceback.format_tb(error.__traceback__)
        text = "".join(["Traceback (most recent call last):\n", *frames, f"{type(error).__name__}: {read_text(error)}"])
        return clean(_shorten(text))


def _shorten(text: str) -> str:
    """The first and the last part of a long text."""
    half, left_out = _MOST_CHARS // 2, len(text) - _MOST_CHARS
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out} characters ...]\n{text[-half:]}"
