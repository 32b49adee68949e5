"""The result of `autods explain`: each key of a DeepSpeed config, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config.problems import Problem
from ...types import Tier
from .shown import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCost:
    """What a value costs: the bytes by which each tier grows beside `instead`, another value of the key.

    `host` and `nvme` are a node's, the others a rank's.
    """

    instead: Any
    tiers: Mapping[Tier, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedKey:
    """A key of the config. `default` is DeepSpeed's, if it names one. `measured` comes from the simulated engine."""

    key: str
    value: Any
    default: Any = None
    has_default: bool = False
    meaning: str = ""
    cost: str = ""
    measured: KeyCost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededMemory:
    """The memory with this config: bytes by tier, `limits` where they are known, and the verdict.

    `host` and `nvme` are a node's, the others a rank's.

    It is that of a step of `accumulation` micro batches. `assumed` holds sentences about what the user left open, and
    about what is left out of the model.
    """

    workload: str
    ranks: int
    micro_batch: int
    accumulation: int
    verdict: str
    reason: str
    tiers: Mapping[Tier, int]
    limits: Mapping[Tier, int]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """The keys in the order of the config, and the findings, errors first."""

    config: str
    deepspeed: str
    keys: tuple[ExplainedKey, ...]
    findings: tuple[Problem, ...]
    memory: NeededMemory | None = None

    @property
    def has_errors(self) -> bool:
        """Whether DeepSpeed refuses the config, or trains something else than it says."""
        return any(finding.severity == "error" for finding in self.findings)
