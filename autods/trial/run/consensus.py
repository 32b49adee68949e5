"""How the ranks of a run agree, each step, on when to end: beside the training, without waiting for one another.

What a rank reports of a step is summed up while the next step runs, and read after that. The collective runs on CPU
tensors in a group of gloo, so that the stream of a card never waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

_LIMIT = timedelta(days=7)  # a save may take long; the monitor notices ranks that are stuck
Line = Mapping[str, Any]


@dataclass(slots=True)
class _Report:
    """One step of this rank, and later the sums over all ranks."""

    line: Line | None
    loss: Callable[[], float | None]
    stop: bool
    sums: Any = None
    work: Any = None


@dataclass(slots=True)
class Consensus:
    """All ranks of a run.

    `deliver` gets, in order, the line of each step that all ranks have reported, and the mean of their losses.
    `stop_agreed` turns true on every rank at the same step.
    """

    deliver: Callable[[Line | None, float | None], None] = lambda line, loss: None
    rank: int = 0
    world_size: int = 1
    stop_agreed: bool = False
    _group: Any = None
    _reports: deque[_Report] = field(default_factory=deque)

    def join(self) -> None:
        """Make the group, on every rank alike."""
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
            if self.world_size > 1:
                self._group = distributed.new_group(backend="gloo", timeout=_LIMIT)

    @property
    def can_communicate(self) -> bool:
        """Whether the ranks' process group still exists."""
        from torch import distributed

        return self.world_size == 1 or distributed.is_initialized()

    def report(self, line: Line | None, loss: Callable[[], float | None], *, stop: bool) -> None:
        """Report a step. `loss` reads this rank's loss: it is called one step later, when the device has it."""
        if len(self._reports) == 2:
            self._finish()
        if self._reports:
            self._send(self._reports[-1])
        self._reports.append(_Report(line, loss, stop))

    def flush(self) -> None:
        """Wait for the reports of all steps."""
        if self._reports and self._reports[-1].sums is None:
            self._send(self._reports[-1])
        while self._reports:
            self._finish()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self._group is None:
            return value
        from torch import distributed

        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def wait(self) -> None:
        """Return when all ranks called."""
        if self._group is not None:
            from torch import distributed

            distributed.barrier(group=self._group)

    def _send(self, report: _Report) -> None:
        import torch

        loss = report.loss()
        report.sums = torch.tensor([float(report.stop), float("nan") if loss is None else loss], dtype=torch.float64)
        if self._group is not None:
            report.work = self._group.allreduce([report.sums])  # torch's function takes as long again

    def _finish(self) -> None:
        report = self._reports.popleft()
        if report.work is not None:
            report.work.wait()
        stops, loss = report.sums.tolist()
        self.stop_agreed = self.stop_agreed or stops > 0
        mean = loss / self.world_size
        self.deliver(report.line, None if mean != mean else mean)
