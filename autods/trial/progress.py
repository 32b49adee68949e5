"""What a rank tells while it runs: heartbeats with phase and step."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass, field

from ..types import PHASES, Phase
from .memory_cpu import Meter

_BEAT = struct.Struct("IId")
_STRIDE = 64  # a cache line each


@dataclass(frozen=True, slots=True)
class Beat:
    """The last sign of life of one rank; `at_s` on the monotonic clock."""

    phase: Phase
    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """The board of one trial: ranks write their own slot, the watcher reads all."""

    shared: mmap.mmap
    fd: int

    @classmethod
    def of(cls, slots: int) -> Heartbeats:
        """A board for `slots` ranks; make it before the fork."""
        fd = os.memfd_create("autods-heartbeat")
        os.ftruncate(fd, _STRIDE * slots)
        return cls(mmap.mmap(fd, _STRIDE * slots), fd)

    @classmethod
    def from_fd(cls, fd: int) -> Heartbeats:
        """The board of another process, by a descriptor that was inherited."""
        return cls(mmap.mmap(fd, os.fstat(fd).st_size), fd)

    def close(self) -> None:
        """By the watcher, at the end of the trial."""
        self.shared.close()
        os.close(self.fd)

    def beat(self, slot: int, phase: Phase, step: int) -> None:
        """Written by the rank at every change of phase."""
        _BEAT.pack_into(self.shared, _STRIDE * slot, PHASES.index(phase), step, time.monotonic())

    def read(self, slot: int) -> Beat:
        """Read by the watcher."""
        phase, step, at_s = _BEAT.unpack_from(self.shared, _STRIDE * slot)
        return Beat(PHASES[phase], step, at_s)


@dataclass(slots=True)
class Observer:
    """Told each phase by the act: beats the heart and lets the meter look."""

    board: Heartbeats
    slot: int
    meter: Meter
    phase: Phase = "start"
    step: int = 0
    build_began_s: float = 0.0
    build_s: float = 0.0
    init_began_s: float = 0.0
    init_s: float = 0.0
    in_steps: dict[str, int] = field(default_factory=dict)  # what holds of training alone, whatever comes after

    def touch(self, phase: Phase, step: int) -> None:
        """Alive in this phase, which is none of the trial's own: a script evaluates between its steps."""
        self.phase, self.step = phase, step
        self.meter.sample()
        self.board.beat(self.slot, phase, step)

    def __call__(self, phase: Phase, step: int) -> None:
        now = time.perf_counter()
        if phase == "build":
            self.build_began_s = now
        elif phase == "init":
            self.build_s, self.init_began_s = now - self.build_began_s, now
        elif self.phase == "init":
            self.init_s = now - self.init_began_s
            self.meter.begin_steps()
        elif phase == "evaluate" and not self.in_steps:
            self.in_steps = self.meter.allocator()
        elif phase == "save":
            self.in_steps |= self.meter.leave_device()
        self.touch(phase, step)
