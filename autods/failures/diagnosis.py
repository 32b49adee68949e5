"""The answer of the failure oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..outcomes import Action, FailureKind, Tier

Kind = Literal["out_of_memory", "none"] | FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a run died, or that it did not.

    kind: `none` when nothing failed, `unknown` when something did and the evidence does not say why.
    tier: where memory ran out or was short. rank: the global rank that failed first by itself, if that can be known.
    phase: what it was doing: load, init, data, forward, backward, step, checkpoint, evaluation.
    confidence: 0 to 1. evidence: the lines that prove it, the most telling first; `places` has file:line of each.
    signature: the row of `signatures/` that decided. notes: what else is worth knowing (fragmentation, a co-tenant).
    """

    kind: Kind
    tier: Tier | None = None
    rank: int | None = None
    phase: str | None = None
    confidence: float
    evidence: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    action: Action
    advice: str
    notes: tuple[str, ...] = ()
    signature: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `autods diagnose --json` prints it."""
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
