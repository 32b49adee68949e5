"""The zygote's parent: adopts what hides from it, ends what it leaves behind, and says how it ended.

`python -m autods.cluster.keeper STATUS_FD CONNECTION_FD DRIVER_PID SOURCE`. The zygote may be started by the driver
while Ray still starts, and served by the actor later: whoever has the two sockets rules it, and this process is its
parent all the time. It imports nothing heavy. It ends with the zygote, and the zygote with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from ..system import processes


def main(argv: list[str]) -> None:
    """Start the zygote, wait for its end, write its exit code on the status socket."""
    status, connection = socket.socket(fileno=int(argv[0])), int(argv[1])
    processes.adopt_orphans()
    own = os.getpid()
    zygote = subprocess.Popen(
        [sys.executable, "-m", "autods.runner.zygote", *argv[1:]],
        pass_fds=[connection],
        preexec_fn=lambda: processes.die_with_parent(own),
    )
    os.close(connection)  # else the zygote's hang-up would not be seen
    code = zygote.wait()
    processes.kill_children(2.0)
    with contextlib.suppress(OSError):  # nobody may be left to be told
        status.sendall(str(code).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
