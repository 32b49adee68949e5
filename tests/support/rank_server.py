"""A process that has torch and DeepSpeed imported, and forks the ranks of plain training scripts.

A launcher and two ranks import them three times, which costs more than the training of a test.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autods.rank.launch_variables import tell_rank
from autods.rank.preload import preload
from tests.support.fits import free_port
from tests.support.launchers import cpu_env


class RankServer:
    """Starts scripts on forked ranks, one script after the other."""

    def __init__(self) -> None:
        env = {**cpu_env(), "DS_ACCELERATOR": "cpu"}
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), env["PYTHONPATH"]])
        command = [sys.executable, "-m", "tests.support.rank_server"]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self, script: Path, *args: object, folder: Path, ranks: int = 2, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the script in that folder as torchrun would, and return how it ended."""
        request = {"script": str(script), "args": [str(arg) for arg in args], "folder": str(folder), "ranks": ranks}
        request |= {"environment": dict(environment or {})}
        for name in ("stdout.txt", "stderr.txt"):
            (folder / name).unlink(missing_ok=True)
        request |= {"port": free_port(), "out": str(folder / "stdout.txt"), "err": str(folder / "stderr.txt")}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        out, err = ((folder / name).read_text(errors="replace") for name in ("stdout.txt", "stderr.txt"))
        return subprocess.CompletedProcess([str(script)], code, out, err)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run_as_rank(rank: int, request: dict[str, Any]) -> None:
    """Become one rank: run the script as the main module, and leave."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    ranks = request["ranks"]
    os.environ |= tell_rank(
        rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks,
        node_rank=0, address="127.0.0.1", port=request["port"],
    )  # fmt: skip
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["args"]]
    sys.path[0] = str(Path(request["script"]).parent)
    code = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def serve() -> None:
    """Answer each line with the first exit code of a rank that is not 0. A rank that fails ends the others."""
    preload()  # what each rank would import in its first step
    from transformers import Seq2SeqTrainer  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        ranks = set()
        for rank in range(request["ranks"]):
            if not (pid := os.fork()):
                run_as_rank(rank, request)
            ranks.add(pid)
        failed = 0
        while ranks:
            pid, status = os.wait()
            ranks.discard(pid)
            failed = failed or os.waitstatus_to_exitcode(status)
            if failed:
                time.sleep(1)  # the others may say why
                for pid in ranks:
                    os.kill(pid, 9)
        print(failed, flush=True)


if __name__ == "__main__":
    serve()
