"""Programs that use Ray for something else, or whose Ray is killed."""

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


def test_a_killed_raylet_does_not_end_an_orphaned_driver():
    """As in a container, where process 1 is the driver's parent. Ray would end it with exit code 1."""
    code = (
        "import os, psutil, time\n"
        "parent = os.getpid()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "while os.getppid() == parent:\n"
        "    time.sleep(0.01)\n"
        "from autods.runner.ray_connect import session\n"
        "with session(cpus=1):\n"
        "    (raylet,) = [child for child in psutil.Process().children() if child.name() == 'raylet']\n"
        "    raylet.kill()\n"
        "    os.waitpid(raylet.pid, 0)\n"
        "print('goes on')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1:] == ["goes on"], ran.stderr
