"""The modules that launchers run, and their arguments and environment, for two ranks on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.fits import free_port


def cpu_env() -> dict[str, str]:
    """The environment of plain CPU ranks, the same on every machine; gloo's threads need no more than one core."""
    folders = [str(Path(__file__).parent / "no_build"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def torchrun() -> list[str]:
    return ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def deepspeeds_own() -> list[str]:
    """What the `deepspeed` command runs on each node."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    return [
        "deepspeed.launcher.launch",
        f"--world_info={world}",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
    ]


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A printed command line in a shell. Only the port differs: other tests may hold the usual one."""
    for usual, option in (("deepspeed --num", "--master_port"), ("accelerate launch --config", "--main_process_port")):
        start, _, rest = usual.rpartition(" ")
        line = line.replace(usual, f"{start} {option} {free_port()} {rest}")
    return subprocess.run(line, shell=True, cwd=folder, env=cpu_env(), capture_output=True, text=True, timeout=400)
