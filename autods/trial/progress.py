"""What a rank shows while it runs: heartbeats with its phase and step, in memory that outlives it."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass, field

from ..types import PHASES, Phase
from .memory import Meter

_BEAT = struct.Struct("IId")  # index of the phase, step, seconds
_STRIDE = 64  # bytes; a cache line for each rank


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of one rank; `at_s` is on the monotonic clock."""

    phase: Phase
    step: int
    at_s: float


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

    def read(self, slot: int) -> Beat:
        """Read the last heartbeat of a rank."""
        phase, step, at_s = _BEAT.unpack_from(self.shared, _STRIDE * slot)
        return Beat(PHASES[phase], step, at_s)


@dataclass(slots=True)
class Observer:
    """Called at each phase of a trial: writes a heartbeat, samples the meter, and times building and initialising.

    `training_peaks` has the measurements that count for training alone, whatever an exam does after it.
    """

    board: Heartbeats
    slot: int
    meter: Meter
    phase: Phase = "start"
    step: int = 0
    build_s: float = 0.0
    init_s: float = 0.0
    training_peaks: dict[str, int] = field(default_factory=dict)
    _build_began_s: float = 0.0
    _init_began_s: float = 0.0

    def __call__(self, phase: Phase, step: int) -> None:
        now = time.perf_counter()
        if phase == "build":
            self._build_began_s = now
        elif phase == "init":
            self.build_s, self._init_began_s = now - self._build_began_s, now
        elif self.phase == "init":
            self.init_s = now - self._init_began_s
            self.meter.begin_steps()
        elif phase == "evaluate" and not self.training_peaks:
            self.training_peaks = self.meter.allocator()
        elif phase == "save":
            self.training_peaks |= self.meter.leave_device()
        self.touch(phase, step)

    def touch(self, phase: Phase, step: int) -> None:
        """Write a heartbeat for work between the trial's own phases, such as an evaluation that a script does."""
        self.phase, self.step = phase, step
        self.meter.sample()
        self.board.beat(self.slot, phase, step)
