"""The job of some ranks, and their heartbeats in memory that outlives them."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..files import write_whole
from ..schema import read_as
from ..system.host import count_cores, threads_per_rank
from ..types import PHASES, Exam, Phase, Steps, WorkloadSource
from ..workload.protocol import WorkloadError

JobKind = Literal["train", "survey", "ops", "run", "preflight", "measure"]
JOB_FILE = "job.json"  # in the folder of an attempt
RUN_VARIABLE = "AUTODS_RUN"  # has the path of the file of a run's job
_RUN_HINT = "start the script with autods run, or without AUTODS_RUN in the environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """What an attempt of a run has beside the config of its job: where it saves, what it restores, when it ends.

    `folder` is the run's: it has checkpoints/ and attempts/N/. Training ends after `steps` optimizer steps; None: the
    script decides. `restore` is the folder of a checkpoint, of this layout or another.
    """

    folder: str
    attempt: int
    steps: int | None
    checkpoint_every: int  # optimizer steps
    keep: int = 2  # complete checkpoints
    loads_in_ranks: bool = False  # without workers of a data loader
    restore: str | None = None
    data: str | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return Path(self.folder) / "checkpoints"

    @property
    def attempt_folder(self) -> Path:
        """The folder of this attempt's files."""
        return Path(self.folder) / "attempts" / str(self.attempt)

    @property
    def job_file(self) -> Path:
        """The file of the attempt's job. It is in no folder of a job, which is emptied when the job begins."""
        return self.attempt_folder / JOB_FILE

    @property
    def steps_file(self) -> Path:
        """The file to which rank 0 appends a line for each optimizer step."""
        return self.attempt_folder / "steps.jsonl"

    @property
    def stop_file(self) -> Path:
        """A file that asks the ranks to save and to end."""
        return Path(self.folder) / "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """One job for all ranks of a trial, of a survey or of an attempt of a run, which alone has an `order`.

    `folder` takes logs and results, `scratch` is the ranks' working directory. `private` is a folder with a
    short path that only this user can enter, for the store and the sockets of the ranks of this node.
    """

    job: JobKind
    source: WorkloadSource
    device: str
    folder: str
    scratch: str
    private: str = ""
    swap: str | None = None  # the folder for a trial that swaps to NVMe; removed afterwards
    rebind: bool = False  # the zygote has loaded this workload with other arguments
    shares_model: bool = False  # the ranks of a node may get one built model, see `runner.rank_fork.may_share`
    world_size: int = 1
    replica_ranks: int = 1  # that count as one in the batch, see `count_replicas`
    local_ranks: tuple[int, ...] = (0,)  # global ranks that run on this node
    master_address: str = "127.0.0.1"
    master_port: int | None = None  # of another node's store; None: the first of these ranks serves it
    node_rank: int = 0
    node_address: str = "127.0.0.1"  # by which other nodes reach this one
    shared: str | None = None  # a folder that the ranks of all nodes see; None: `scratch` is one
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: bool | int = False  # as in knobs
    expandable: bool = False
    steps: Steps = field(default_factory=Steps)
    exam: Exam | None = None
    order: RunOrder | None = None
    limit_bytes: int | None = None  # of the device; None: no limit
    ops: tuple[str, ...] = ()
    threads: int | None = None  # of each rank; None: its share of the node's cores
    seed: int = 0
    silence_s: Mapping[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 120.0))  # then it is stuck
    wall_s: float = 1800.0
    end_s: float = 60.0  # killed ranks are gone by then, with their swap files

    @property
    def is_whole(self) -> bool:
        """Whether all of its ranks are on this node."""
        return len(self.local_ranks) == self.world_size

    @property
    def shared_folder(self) -> Path:
        """Where the ranks of all nodes see what another one wrote; it is removed after the job."""
        return Path(self.shared or self.scratch)

    @property
    def stops_at_engine(self) -> bool:
        """Whether a script runs up to the creation of its engine only."""
        return self.job == "survey"

    @property
    def rank_threads(self) -> int:
        """The threads of each rank on this node."""
        return self.threads or threads_per_rank(len(self.local_ranks), count_cores())

    def seed_of(self, rank: int) -> int:
        """The seed of what a rank draws: each draws other samples, but those of compared losses have seeds already."""
        return self.seed if self.exam == "parity" else self.seed + rank

    @property
    def train_batch(self) -> int:
        """Samples of an optimizer step; the ranks of one replica train on the same samples."""
        return self.micro_batch * self.accumulation * (self.world_size // self.replica_ranks)

    def write(self) -> Path:
        """Write the job of a run into its file, whole or not at all, and return the file's path.

        Raises the error of `errors.make_write_error`.
        """
        assert self.order is not None
        file = self.order.job_file
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, self.to_json())
        return file

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> RankJob:
        """The inverse of `to_json`. Raises ValueError or TypeError for what is no job."""
        data = json.loads(line)
        data["source"] = WorkloadSource(**data["source"])
        data["steps"] = Steps(**data["steps"])
        if data["order"] is not None:
            data["order"] = read_as(RunOrder, data["order"], name="order")
        for key in ("local_ranks", "ops"):
            data[key] = tuple(data[key])
        return cls(**data)


def read_job(path: str | os.PathLike[str]) -> RankJob:
    """Return the job of a run in a file. Raises WorkloadError that names the file for one that cannot be used."""
    try:
        return RankJob.from_json(Path(path).read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise WorkloadError(f"is not the job of a run: {reason}", place=str(path), hint=_RUN_HINT) from None


def find_job() -> RankJob | None:
    """Return the job of a run that the environment of this process names; None outside of a run."""
    path = os.environ.get(RUN_VARIABLE)
    return read_job(path) if path else None


_BEAT = struct.Struct("IId")  # index of the phase, step, seconds
_FORWARD = struct.Struct("d")  # behind it
_STRIDE = 64  # bytes; a cache line for each rank


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of one rank; `at_s` is on the monotonic clock.

    `forward_s` are the usual seconds of a forward so far; 0: there were too few.
    """

    phase: Phase
    step: int
    at_s: float
    forward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """The heartbeats of a node's ranks in shared memory: each rank writes its slot, the monitor reads all of them."""

    shared: mmap.mmap
    fd: int

    @classmethod
    def create(cls, slots: int) -> Heartbeats:
        """Create a board before the ranks are forked."""
        fd = os.memfd_create("autods-heartbeat")
        os.ftruncate(fd, _STRIDE * slots)
        return cls(mmap.mmap(fd, _STRIDE * slots), fd)

    @classmethod
    def from_fd(cls, fd: int) -> Heartbeats:
        """Open the board of another process by an inherited descriptor."""
        return cls(mmap.mmap(fd, os.fstat(fd).st_size), fd)

    def close(self) -> None:
        """Release the memory and its descriptor; the monitor does so at the end of the trial."""
        self.shared.close()
        os.close(self.fd)

    def beat(self, slot: int, phase: Phase, step: int) -> None:
        """Write the heartbeat of a rank."""
        _BEAT.pack_into(self.shared, _STRIDE * slot, PHASES.index(phase), step, time.monotonic())

    def note_forward(self, slot: int, seconds: float) -> None:
        """Write what a forward of a rank usually takes."""
        _FORWARD.pack_into(self.shared, _STRIDE * slot + _BEAT.size, seconds)

    def read(self, slot: int) -> Beat:
        """Read the last heartbeat of a rank."""
        phase, step, at_s = _BEAT.unpack_from(self.shared, _STRIDE * slot)
        (forward_s,) = _FORWARD.unpack_from(self.shared, _STRIDE * slot + _BEAT.size)
        return Beat(PHASES[phase], step, at_s, forward_s)
