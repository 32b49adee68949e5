"""A workload that waits inside one of its trials until a test lets it go on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.watching import wait_for

_MODEL = """
import os
import time
from pathlib import Path

from tiny import Tiny, build_batch

FOLDER = Path(__file__).parent


class Held(Tiny):
    def forward(self, x, y):
        # Of a trial's ranks alone: a forecast's simulated rank is a LOCAL_RANK too, between two trials.
        if "GROUP_RANK" in os.environ and is_to_wait():
            (FOLDER / "held").touch()
            while (FOLDER / "hold").exists():
                time.sleep(0.02)
        return super().forward(x, y)


def is_to_wait():
    if not (FOLDER / "hold").exists():
        return False
    finished = (FOLDER / "out" / "journal.jsonl").read_text().count('{"kind": "finished"')
    return finished >= int((FOLDER / "hold").read_text())


def build_model():
    return Held()
"""


class Held:
    """The workload `model`, whose results have to be in `out` beside it. env: for the command that runs it."""

    def __init__(self, folder: Path) -> None:
        workloads = Path(__file__).parents[1] / "integration" / "workloads"
        self.folder, self.model = folder, folder / "held_up.py"
        self.model.write_text(_MODEL)
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(workloads), os.environ.get("PYTHONPATH", "")])}

    def hold(self, finished: int) -> None:
        """Let the trial that begins after so many finished ones wait in its first forward."""
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "hold").write_text(str(finished))

    def wait_in(self, driver: subprocess.Popen[str]) -> None:
        """Wait until the command is in that trial."""
        wait_for(lambda: (self.folder / "held").exists() or driver.poll() is not None, 250)
        assert driver.poll() is None, driver.communicate()[1]

    def release(self) -> None:
        """Let the trial go on, and no other wait."""
        (self.folder / "hold").unlink()
