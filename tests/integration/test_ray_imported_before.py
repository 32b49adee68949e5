"""A program that uses Ray for something else calls autods."""

from __future__ import annotations

import subprocess
import sys


def test_a_program_that_imported_ray_before_can_start_it():
    code = (
        "import ray\n"
        "from autods.runner.ray_connect import session\n"
        "with session(cpus=1) as started:\n"
        "    print(started is ray, ray.is_initialized())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1:] == ["True True"], ran.stderr
