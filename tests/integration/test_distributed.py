"""Ranks of one machine meet where nobody else can."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ends import JOB

# Two ranks that join by env:// with a group of their own, leave, and join again as a script may, by tcp://.
RANKS = """
import os, sys
import torch
import torch.distributed as dist
from autods.rank.distributed import choose_store
from autods.rank.job import RankJob

choose_store(RankJob.from_json(sys.argv[1]), None)
rank = int(os.fork() == 0)
os.environ["RANK"] = str(rank)
total = torch.tensor([rank + 1.0])
dist.init_process_group("gloo")
dist.all_reduce(total, group=dist.new_group([0, 1]))
dist.monitored_barrier()
dist.destroy_process_group()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:9", rank=rank, world_size=2)
dist.all_reduce(total)
if rank == 0:
    os.wait()
    print(total.item())
"""


@pytest.mark.timeout(120)
def test_ranks_of_one_machine_meet_in_private_files(tmp_path: Path) -> None:
    job = replace(JOB, private=str(tmp_path))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", RANKS, job.to_json()]
    done = subprocess.run(command, env={**os.environ, **meeting}, capture_output=True, text=True, timeout=100)
    assert done.stdout == "6.0\n", done.stderr
    assert sorted(os.listdir(tmp_path)) == ["store-9-0", "store-9-1"]
