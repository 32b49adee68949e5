"""Text of code that is not ours: read from any object without harm, and safe to print on a terminal."""

from __future__ import annotations

import re
import traceback
from typing import Any

from .units import escape_controls

_MOST_CHARS = 6000
# What a terminal obeys in place of showing: colours and moves of the cursor, titles and links, character sets.
TERMINAL_CODES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[()][AB0-2])"
_CODES = re.compile(TERMINAL_CODES)


def drop_terminal_codes(text: str) -> str:
    """'red' of '\x1b[31mred\x1b[0m'."""
    return _CODES.sub("", text)


def clean(text: str) -> str:
    """The text without a terminal's codes. Other controls but line ends and tabs stand as Python writes them."""
    return escape_controls(drop_terminal_codes(text).replace("\r\n", "\n"))


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
