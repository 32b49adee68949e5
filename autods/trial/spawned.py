"""A rank as a process of its own, for when it cannot be forked from the zygote: everything is imported anew (10 s).

`python -m autods.trial.spawned SLOT HEARTBEAT_FD STORE_FD JOB_FILE`
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from . import lean
from .job import RankJob
from .preload import preload
from .progress import Heartbeats
from .worker import run_rank


def main(argv: list[str]) -> None:
    """Live the rank's life; never returns."""
    slot, heartbeat, store = (int(word) for word in argv[:3])
    job = RankJob.from_json(Path(argv[3]).read_text())
    lean.install()
    preload()
    listening = socket.socket(fileno=store) if store >= 0 else None
    os._exit(run_rank(job, slot, Heartbeats.from_fd(heartbeat), listening, None))


if __name__ == "__main__":
    main(sys.argv[1:])
