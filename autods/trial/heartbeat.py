"""What each rank is doing, in memory shared with the process that watches it.

64 bytes a rank in memory without a name: it survives SIGKILL of the rank, leaves no file, and can be handed by its
descriptor to a rank that is not a fork.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass

from ..outcomes import PHASES, Phase

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
