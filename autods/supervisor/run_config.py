"""What the ranks of an attempt train with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..types import Knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What the ranks of an attempt train with. `allocator` is the value of PYTORCH_CUDA_ALLOC_CONF, if it is set.

    With `loads_in_ranks` they load their data themselves: workers of a loader hand it over in shared memory.
    """

    rung: str
    knobs: Knobs
    world_size: int
    replica_ranks: int = 1  # see `types.ModelFacts`
    allocator: str | None = None
    loads_in_ranks: bool = False

    @property
    def replicas(self) -> int:
        """The ranks among which a global batch is dealt out."""
        return self.world_size // self.replica_ranks

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""
        return self.knobs.train_batch(self.replicas)

    def with_micro_batch(self, micro_batch: int) -> RunConfig:
        """The same with another micro batch, and the accumulation that keeps the global batch."""
        accumulation = self.global_batch // (micro_batch * self.replicas)
        return replace(self, knobs=replace(self.knobs, micro_batch=micro_batch, accumulation=accumulation))

    def micro_batches(self) -> list[int]:
        """The micro batches that keep the global batch, largest first."""
        share = self.global_batch // self.replicas
        return [size for size in range(share, 0, -1) if share % size == 0]
