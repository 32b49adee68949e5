"""The client needs no torch, and its failures say where, what and how to fix it."""

from __future__ import annotations

import subprocess
import sys

from autods.forecast.simulator import SimulationFailed


def test_the_client_imports_no_torch() -> None:
    code = "import sys, autods.forecast.simulator; sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_failure_says_where_what_and_how_to_fix_it() -> None:
    failed = SimulationFailed(kind="user_code", problem="ValueError: no", place="model.py:3", hint="give it a yes")
    assert str(failed) == "model.py:3: ValueError: no\n  give it a yes"
