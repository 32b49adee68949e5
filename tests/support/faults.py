"""Faulty files: a good file with one change, and the message that it must give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The text `old` in `good` becomes `new`.

    `message` is a part of the expected message; `line` is the line that it names, or None for the file as a whole.
    """

    good: str
    old: str
    new: str
    line: int | None
    message: str

    @property
    def text(self) -> str:
        assert self.old in self.good
        return self.good.replace(self.old, self.new)


def is_one_message(stderr: str, *, where: str, message: str) -> bool:
    """The place, the problem and a fix, in two lines (three where the input is quoted)."""
    assert "Traceback" not in stderr
    assert 1 <= len(stderr.splitlines()) <= 3
    assert stderr.startswith(f"error: {where}"), stderr
    assert message in stderr.splitlines()[0], stderr
    return True
