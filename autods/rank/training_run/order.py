"""The order of one attempt of a training run: what its ranks train, where they save, what they restore."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...schema import read_as
from ...workload.protocol import WorkloadError

VARIABLE = "AUTODS_RUN"  # has the path of the order's file
NO_SESSION = (
    "the script calls no autods.session(engine): its steps are not counted, and nothing is saved or restored; "
    "docs/run.md shows the three lines"
)
_STOP = "stop"
_HINT = "start the script with autods run, or without AUTODS_RUN in the environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """What all ranks of one attempt of a run have to do.

    `folder` is the run's: it has checkpoints/ and attempts/N/. One optimizer step trains on `global_batch` samples,
    micro batch × accumulation × data-parallel ranks. Training ends after `steps` optimizer steps; None: the script
    decides. `restore` is the folder of a checkpoint, of this layout or another. A save needs `least_free_bytes` on the
    disk of the checkpoints, besides what the checkpoint takes.
    """

    folder: str
    attempt: int
    ds_config: Mapping[str, Any]
    micro_batch: int
    accumulation: int
    global_batch: int
    world_size: int
    checkpointing: bool  # of activations
    steps: int | None
    checkpoint_every: int  # optimizer steps
    keep: int = 2  # complete checkpoints
    loads_in_ranks: bool = False  # without workers of a data loader
    restore: str | None = None
    data: str | None = None
    seed: int = 0
    least_free_bytes: int = 0

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return Path(self.folder) / "checkpoints"

    @property
    def attempt_folder(self) -> Path:
        """The folder of this attempt's files."""
        return Path(self.folder) / "attempts" / str(self.attempt)

    @property
    def path(self) -> Path:
        """The order's file. It is no folder of a job, which is emptied when the job begins."""
        return self.attempt_folder / "order.json"

    @property
    def steps_file(self) -> Path:
        """The file to which rank 0 appends a line for each optimizer step."""
        return self.attempt_folder / "steps.jsonl"

    @property
    def stop_file(self) -> Path:
        """A file that asks the ranks to save and to end."""
        return Path(self.folder) / _STOP

    @property
    def replicas(self) -> int:
        """The number of ranks among which a global batch is dealt out."""
        return self.global_batch // (self.micro_batch * self.accumulation)

    def to_json(self) -> str:
        """The text of the order's file."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunOrder:
        """The inverse of `to_json`. Raises ValueError that names what is missing, unknown, ill-typed or impossible."""
        order = read_as(cls, json.loads(text), name="order")
        order.check()
        return order

    def check(self) -> None:
        """Raises ValueError for numbers that do not go together."""
        for name in ("attempt", "micro_batch", "accumulation", "world_size", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"order.{name} is {getattr(self, name)}, and at least 1 is needed")
        product = self.micro_batch * self.accumulation
        # The ranks of one replica of a pipeline train on the same samples.
        if self.global_batch < 1 or self.global_batch % product or self.world_size % self.replicas:
            raise ValueError(
                f"order.global_batch is {self.global_batch}, not micro batch {self.micro_batch} × accumulation "
                f"{self.accumulation} × the replicas of {self.world_size} ranks"
            )

    def write(self) -> Path:
        """Write the order into its file, whole or not at all, and return the file's path."""
        self.attempt_folder.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(self.to_json())
        os.replace(temporary, self.path)
        return self.path


def read_order(path: str | os.PathLike[str]) -> RunOrder:
    """Return the order in a file. Raises WorkloadError that names the file for one that cannot be used."""
    try:
        return RunOrder.from_json(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise WorkloadError(f"is not the order of a run: {reason}", place=str(path), hint=_HINT) from None


def find_order() -> RunOrder | None:
    """Return the order of this process, which the environment names; None outside of a run."""
    path = os.environ.get(VARIABLE)
    return read_order(path) if path else None
