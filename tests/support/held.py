"""A workload one of whose trials does not end before it is told to, so that a test can be sure to strike in it."""

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
    """`model` lies in the folder and expects the results in `out` beside it. env: of the command that tries it."""

    def __init__(self, folder: Path) -> None:
        workloads = Path(__file__).parents[1] / "integration" / "workloads"
        self.folder, self.model = folder, folder / "held_up.py"
        self.model.write_text(_MODEL)
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(workloads), os.environ.get("PYTHONPATH", "")])}

    def hold(self, finished: int) -> None:
        """From now on the trial that begins when so many are finished waits in its first forward."""
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "hold").write_text(str(finished))

    def wait_in(self, driver: subprocess.Popen[str]) -> None:
        """Until the command is in that trial."""
        wait_for(lambda: (self.folder / "held").exists() or driver.poll() is not None, 250)
        assert driver.poll() is None, driver.communicate()[1]

    def let_go(self) -> None:
        """No trial waits any more."""
        (self.folder / "hold").unlink()
