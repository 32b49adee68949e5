"""What a search comes to: a config that fits, or the news that nothing does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..search.certify import Certified
from ..search.race import Raced
from ..search.shortfall import Closest
from ..search.tune import Tuned
from ..search.walk import Walked
from ..values import ModelFacts, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A config that fits, and how each step came to it. ds_config: as the user gets it."""

    facts: ModelFacts
    walked: Walked
    raced: Raced
    tuned: Tuned
    certified: Certified | None
    ds_config: Mapping[str, Any]

    @property
    def best(self) -> Record:
        """The trial whose config is taken."""
        return self.tuned.best if self.certified is None else self.certified.best


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Nothing fits, or what stopped the walk says that nothing can be tried; the rung that came closest."""

    facts: ModelFacts
    walked: Walked
    closest: Closest | None
