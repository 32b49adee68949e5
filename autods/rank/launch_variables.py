"""By which variables a launcher tells a process its rank: torchrun's, and in a job of Slurm also srun's."""

from __future__ import annotations

import os


def tell_rank(
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    node_rank: int,
    address: str,
    port: int,
) -> dict[str, str]:
    """Return the variables of a rank whose world meets at rank 0's `address` and `port`.

    Those of srun are for scripts that look there first, as timm's and open_clip's do. A process that srun has not
    started finds in them the one task of its node or of the job's shell.
    """
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "NODE_RANK": node_rank,
        "GROUP_RANK": node_rank,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    if "SLURM_JOB_ID" in os.environ:
        variables |= {
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": local_rank,
            "SLURM_NTASKS": world_size,
            "SLURM_NPROCS": world_size,  # its older name
            "SLURM_NODEID": node_rank,
        }
    return {name: str(value) for name, value in variables.items()}


RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NODEID",
)  # fmt: skip
