"""Stand-ins for the processes that import a workload: Python without torch, which hangs in a file of the user's."""

from __future__ import annotations

import sys
from pathlib import Path

from autods.types import WorkloadSource

_USER = """import time


def wait():
    time.sleep(1000)


wait()
"""


def hang_on_import(folder: Path) -> WorkloadSource:
    """A workload whose import never ends, at line 5 in `wait`."""
    path = folder / "forever.py"
    path.write_text(_USER)
    return WorkloadSource(kind="file", path=str(path), name="forever", digest="1")


def make_python(folder: Path, source: WorkloadSource) -> str:
    """A program in Python's place that loads the workload as a zygote or a simulator does, but no torch before it."""
    loader = folder / "loader.py"
    loader.write_text(
        f"import runpy\nfrom autods.system import stacks\nstacks.answer_requests()\nrunpy.run_path({source.path!r})\n"
    )
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{loader}"\n')
    program.chmod(0o700)
    return str(program)
