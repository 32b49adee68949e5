"""The modules that launchers run, and their arguments, for two ranks on this machine."""

from __future__ import annotations

import base64
import json

from tests.support.fits import free_port


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
