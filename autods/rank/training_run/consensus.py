"""How the ranks of a run agree on when to end, and join their losses: about once a second, beside the training.

A collective costs each rank a millisecond of processor time, which short steps would feel. So ranks collect the reports
of some steps, and sum them up together while the next step runs. It runs on CPU tensors in a group of gloo, so that the
stream of a card never waits for it. The host waits for the card once in that time, for losses that are a step old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

_LIMIT = timedelta(days=7)  # a save may take long; the monitor notices ranks that are stuck
_EVERY_S = 1.0  # so late a request to stop is noticed, and a line is written
_MOST_STEPS = 32  # between two collectives: steps may become slow at once, and a scheduler that stops a run waits
Line = Mapping[str, Any]
Deliver = Callable[[Sequence[tuple[Line | None, float | None]]], None]
StartCopy = Callable[[Sequence[Any]], Callable[[], Sequence[float | None]]]


@dataclass(slots=True)
class _Reports:
    """Consecutive steps of this rank: their lines, how to read their losses, and later the sums over all ranks."""

    lines: Sequence[Line | None]
    read_losses: Callable[[], Sequence[float | None]]
    sums: Any = None
    work: Any = None


@dataclass(slots=True)
class Consensus:
    """All ranks of a run.

    `deliver` gets, in order, the lines of steps that all ranks have reported, each with the mean of their losses.
    `start_copy` begins to copy losses from the device. `find_stop` tells rank 0 whether the run is to end.
    `stop_agreed` turns true on every rank at the same step.
    """

    deliver: Deliver
    start_copy: StartCopy
    find_stop: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    rank: int = 0
    world_size: int = 1
    stop_agreed: bool = False
    every: int = 1  # steps from one collective to the next
    group: Any = None  # of torch, on the host
    _collected: list[tuple[Line | None, Any]] = field(default_factory=list)
    _copied: _Reports | None = None
    _sent: _Reports | None = None
    _sent_s: float | None = None
    _steps_since: int = 0

    def join(self) -> None:
        """Make the group, on every rank alike. Where the ranks train with gloo, it is theirs: no more threads."""
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
            if self.world_size > 1:
                is_gloo = distributed.get_backend() == "gloo"
                self.group = (
                    distributed.group.WORLD if is_gloo else distributed.new_group(backend="gloo", timeout=_LIMIT)
                )

    @property
    def can_communicate(self) -> bool:
        """Whether the ranks' process group still exists."""
        from torch import distributed

        return self.world_size == 1 or distributed.is_initialized()

    def report(self, line: Line | None, loss: Any) -> None:
        """Report a step, on every rank alike. `loss` is this rank's, which may lie on the device; None: unknown."""
        self._steps_since += 1
        self._finish()
        self._send()  # now the device has the losses up to the step before
        self._collected.append((line, loss))
        if len(self._collected) >= self.every:
            self._copy()

    def flush(self) -> None:
        """Wait for the reports of all steps."""
        self._finish()
        self._send()
        self._finish()
        self._copy()
        self._send()
        self._finish()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.group is None:
            return value
        from torch import distributed

        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def wait(self) -> None:
        """Return when all ranks called."""
        if self.group is not None:
            from torch import distributed

            distributed.barrier(group=self.group)

    def _copy(self) -> None:
        if self._collected:
            lines, losses = zip(*self._collected, strict=True)
            self._copied = _Reports(lines, self.start_copy(losses))
            self._collected = []

    def _send(self) -> None:
        reports, self._copied = self._copied, None
        if reports is None:
            return
        import torch

        # The sums of the first two are exact: the other ranks add nothing.
        orders = (self.find_stop(), self._choose_interval()) if self.rank == 0 else (0, 0)
        losses = (float("nan") if loss is None else loss for loss in reports.read_losses())
        # A script may have made a card the default device.
        reports.sums = torch.tensor([*orders, *losses], dtype=torch.float64, device="cpu")
        if self.group is not None:
            reports.work = self.group.allreduce([reports.sums])  # torch's function takes as long again
        self._sent = reports

    def _finish(self) -> None:
        reports, self._sent = self._sent, None
        if reports is None:
            return
        if reports.work is not None:
            reports.work.wait()
        stops, every, *losses = reports.sums.tolist()
        self.stop_agreed = self.stop_agreed or stops > 0
        self.every = int(every)
        means = (loss / self.world_size for loss in losses)
        self.deliver([(line, None if mean != mean else mean) for line, mean in zip(reports.lines, means, strict=True)])

    def _choose_interval(self) -> int:
        """The steps until the next collective, from what the steps since the last one took."""
        now, before, steps = self.clock(), self._sent_s, self._steps_since
        self._sent_s, self._steps_since = now, 0
        if before is None:
            return 1
        fitting = int(_EVERY_S * steps / max(now - before, 1e-9))
        return max(1, min(fitting, 2 * self.every, _MOST_STEPS))
