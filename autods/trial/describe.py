"""An exception as plain values, since it crosses processes: what the failure rooms read of it."""

from __future__ import annotations

import traceback
from typing import Any

from ..workload import WorkloadError

_TRACEBACK_CHARS = 6000


def describe(error: BaseException, user_file: str) -> dict[str, Any]:
    """An exception as plain values: its types, message, traceback, and the last frame of the user's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if frame.filename == user_file]
    contract = _broken(error) if isinstance(error, WorkloadError) else None
    return {
        "types": [cls.__name__ for cls in type(error).__mro__ if cls not in (object, BaseException)],
        "message": str(error)[:_TRACEBACK_CHARS],
        "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:],
        "causes": [[type(cause).__name__, str(cause)[:_TRACEBACK_CHARS]] for cause in _causes(error)],
        "user_frame": f"{users[-1].filename}:{users[-1].lineno}" if users else None,
        "contract": contract,
        "mend": error.mend if isinstance(error, WorkloadError) else None,
    }


def _broken(error: WorkloadError) -> str:
    """What of the contract is broken, with its line where that is known."""
    place, _, line = (error.where or "").rpartition(":")
    return f"{place}:{line}: {error.what}" if line.isdigit() else error.what


def _causes(error: BaseException) -> list[BaseException]:
    """What it was raised from, explicitly or while that was handled; the nearest first."""
    found: list[BaseException] = []
    following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while following is not None and following not in found and len(found) < 8:
        found.append(following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return found
