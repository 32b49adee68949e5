"""A file that is wrong by one change of a good one, and how that is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """`old` in `good` becomes `new`. line: of the fault, None: in the file as a whole. says: what is said of it."""

    good: str
    old: str
    new: str
    line: int | None
    says: str

    @property
    def text(self) -> str:
        assert self.old in self.good
        return self.good.replace(self.old, self.new)


def is_one_message(said: str, *, where: str, says: str) -> bool:
    """Where, then what, then how to fix it, in two lines (three where the input is quoted)."""
    assert "Traceback" not in said
    assert 1 <= len(said.splitlines()) <= 3
    assert said.startswith(f"error: {where}"), said
    assert says in said.splitlines()[0], said
    return True
