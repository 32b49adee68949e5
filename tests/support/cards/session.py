"""Fits and faults on a machine with simulated cards, one after another in one Ray session.

`python -m tests.support.cards.session FOLDER` runs in the environment that `machine.environment` makes, and writes
`outcomes.json`. Nothing here depends on the values of tensors.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autods.api import FIT, UseCase
from autods.cli.main import main as run_command
from autods.events import Event, Note
from autods.runner.ray_connect import session
from autods.runner.runner import RayRunner
from autods.tuner.fit import fit
from autods.types import Knobs, Steps, Trial
from tests.support.cards.machine import GIB, VARIABLE, Machine
from tests.support.fits import HERE, TORCH_ADAM, question

WORKLOAD = str(HERE / "workloads" / "activations.py")
STEPS = Steps(warmup=1, timed=2, most_timed=2)


class Session:
    """A machine with two cards, a runner for both, and what happened so far."""

    def __init__(self, folder: Path, neighbour: int) -> None:
        self.folder, self.neighbour = folder, neighbour  # the pid of a process besides the ranks
        self.machine = Machine(Path(os.environ[VARIABLE]))
        self.outcomes: dict[str, Any] = {}
        self.notes: list[str] = []
        self.runner: Any = None

    def fit(self, name: str, *options: str, **fault: Any) -> None:
        """Run `autods fit`; it starts a zygote unless there is a runner."""
        command = FIT
        if self.runner is not None:
            command = UseCase(FIT.resolve, self._run_on_runner)
        words = ["fit", WORKLOAD, "--device", "cuda", "--config", "quick", "--no-forecast", *options]
        printed = io.StringIO()
        with self._fault(fault), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = run_command([*words, "--out", str(self.folder / name)], fit=command)
        report = self.folder / name / "report.json"
        holdings = (self.machine.state.holding[number] for number in range(self.machine.state.holdings))
        self.outcomes[name] = {
            "code": code,
            "printed": printed.getvalue(),
            "report": json.loads(report.read_text()) if report.exists() else None,
            "cards": sorted({holding.card for holding in holdings}),
            "used": self._used_bytes(),
        }
        print(f"$ autods {' '.join(words)}\n{printed.getvalue()}", flush=True)

    def trial(
        self,
        name: str,
        rung: str,
        *,
        micro_batch: int = 1,
        limit: int | None = None,
        expandable: bool = False,
        **fault: Any,
    ) -> None:
        """Run one trial on both cards, as a fit does."""
        self.notes.clear()
        settings = self.runner.settings
        self.runner.settings = replace(settings, device_bytes=limit or 0, device_bytes_asked=limit is not None)
        knobs = Knobs(micro_batch=micro_batch, checkpointing=False, expandable=expandable, settings=TORCH_ADAM)
        with self._fault(fault):
            record = self.runner.run(
                Trial(rung=rung, knobs=knobs, purpose="walk", steps=STEPS), id=len(self.outcomes) + 1
            )
        self.runner.settings = settings
        outcome = asdict(record.outcome)
        self.outcomes[name] = {"outcome": outcome, "notes": list(self.notes), "used": self._used_bytes()}

    @contextlib.contextmanager
    def neighbour_on(self, index: int, size: int) -> Iterator[None]:
        """Let the other process hold so much of a card, and nothing afterwards."""
        self.machine.hold(self.neighbour, index, size)
        try:
            yield
        finally:
            self.machine.hold(self.neighbour, index, 0)

    def listen(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)

    def _run_on_runner(self, settings: Any, listen: Any) -> Any:
        before = self.runner.settings, self.runner.listen
        self.runner.settings, self.runner.listen = settings, listen
        try:
            return fit(settings, listen=listen, start=lambda settings, listen: contextlib.nullcontext(self.runner))
        finally:
            self.runner.settings, self.runner.listen = before

    @contextlib.contextmanager
    def _fault(self, fault: dict[str, Any]) -> Iterator[None]:
        file = self.folder / "fault.json"
        if fault:
            file.write_text(json.dumps(fault))
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def _used_bytes(self) -> list[int]:
        return [self.machine.used_bytes(index) for index in range(self.machine.state.cards)]


def run_all(here: Session) -> None:
    """The list: `tests/integration/test_cards.py` says what each has to end as."""
    here.fit("one card", "--gpus", "1", "--gpu-memory", "2GiB")
    settings = question(WORKLOAD, here.folder / "trials", device="cuda", gpus=2, gpu_memory=None)
    with RayRunner(settings, here.listen) as runner:
        runner.survey()
        here.runner, here.outcomes["started"] = runner, list(here.notes)
        here.fit("two cards", "--gpus", "2", "--max-trials", "4")
        here.trial("emulated", "ddp", micro_batch=40, limit=2 * GIB)
        for name in ("fixed", "grown"):
            here.trial(name, "zero1", micro_batch=6, expandable=name == "grown")
        here.trial("wasted", "ddp", micro_batch=4, kind="wasted", rank=1, step=1)
        with here.neighbour_on(0, 3 * GIB):
            here.trial("beside", "ddp", micro_batch=48)
        with here.neighbour_on(0, 0):
            here.trial("shared", "ddp", micro_batch=4, kind="shared", rank=1, step=1)
        here.trial("lost", "zero1", kind="lost", rank=1, step=1)
        here.machine.state.card[0].lost = 0
        here.fit("loses a card", "--gpus", "2", kind="lost", rank=1, step=1)
        here.machine.state.card[0].lost = 0
        here.trial("repaired", "zero3")


def main(folder: Path) -> None:
    neighbour = subprocess.Popen(["sleep", "600"])
    (folder / "neighbour.pid").write_text(str(neighbour.pid))
    try:
        with session(cpus=2):
            here = Session(folder, neighbour.pid)
            run_all(here)
    finally:
        neighbour.kill()
        neighbour.wait()
    (folder / "outcomes.json").write_text(json.dumps(here.outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
