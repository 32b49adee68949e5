"""The DeepSpeed config of a rung on so many ranks, without a fit around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autods.config.catalogue import Machine, Site
from autods.config.deepspeed import compose
from autods.config.rungs import Rung
from autods.types import Knobs, ModelFacts

FACTS = ModelFacts(
    parameters=32_638_976, largest_parameter=1_048_576, checkpointing=True, tokens_per_sample=64, has_optimizer=False
)


def make_site(world_size: int, **fields: Any) -> Site:
    """So many ranks of one node with cards of 80 GiB."""
    machine = Machine(name="made-up", title="a card", device_bytes=80 * 2**30)
    return Site(**{"machine": machine, "world_size": world_size, "ranks_per_node": world_size, **fields})


def compose_config(
    rung: Rung,
    knobs: Knobs,
    *,
    world_size: int,
    base: Mapping[str, Any] | None = None,
    own_optimizer: bool = False,
    nvme_path: Path | None = None,
) -> dict[str, Any]:
    """The whole config, as a trial of that rung has it."""
    site = make_site(world_size, base=base or {}, nvme_path=nvme_path)
    return compose(rung, knobs, site, replace(FACTS, has_optimizer=own_optimizer))
