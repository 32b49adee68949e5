"""What one rung's failure says of the rungs after it: no rung is tried that must fail in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..ladder import Rung
from ..outcomes import Failed, Outcome, OutOfMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What the walk has learned so far.

    host_full: rungs under which the host ran out of memory. broken_ops: DeepSpeed op → why it cannot be had.
    """

    host_full: tuple[Rung, ...] = ()
    broken_ops: Mapping[str, str] = field(default_factory=dict)

    def after(self, rung: Rung, outcome: Outcome) -> Lessons:
        """With what this rung's outcome adds. A full device adds nothing: a lower rung can need more of it, or less."""
        match outcome:
            case OutOfMemory(tier="host" | "pinned"):
                return replace(self, host_full=(*self.host_full, rung))
            case Failed(op=str(op), evidence=evidence):
                return replace(self, broken_ops={**self.broken_ops, op: evidence})
            case _:
                return self

    def against(self, rung: Rung, ops: tuple[str, ...]) -> str | None:
        """Why this rung, which needs these ops, is not tried; None when nothing speaks against it."""
        for full in self.host_full:
            if (held := _on_host(full)) and held <= _on_host(rung):
                return f"it needs as much host memory as {full.name}, which ran out of it"
        return next((f"it needs {op}: {why}" for op, why in self.broken_ops.items() if op in ops), None)


def _on_host(rung: Rung) -> set[str]:
    return {state for state, tier in rung.places.items() if tier == "host"}
