"""What watches a rank's act: the heartbeat that others see, and the meter that looks at its memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..outcomes import Phase
from .heartbeat import Heartbeats
from .meter import Meter


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
