"""Processor threads of a rank: the node's processors shared by its ranks, unless OMP_NUM_THREADS says otherwise.

One thread each would make the optimizer on the CPU look slower than it is; all of them each would make ranks fight.
"""

from __future__ import annotations

import os

import psutil


def share(ranks: int) -> int:
    """Threads of each of so many ranks on this node. Processors that share a core count once, as for torch itself."""
    usable = len(os.sched_getaffinity(0))
    cores = psutil.cpu_count(logical=False) or usable
    return max(1, min(usable, cores) // ranks)


def asked() -> int | None:
    """What OMP_NUM_THREADS asks for; None where it is not set, or is no number, which OpenMP ignores as well."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(said) if said.isdigit() and int(said) > 0 else None
