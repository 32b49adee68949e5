"""What a training run costs in step time beside the plain launcher: the same script under torchrun and as a run's rank.

`python tests/benchmarks/run_overhead.py [--rounds 4] [--turns 2] [--steps 300] [--width 1024]`

A rank of a run reports heartbeats, samples its memory, writes a line for each step and agrees with the other rank. What
that costs is measured in one run: every second five steps do without. Then torchrun and runs train in turns, which also
shows what the processes differ in, where the machine is quiet enough. Printed are ratios of the median step: in wall
time, in processor time of rank 0, and in that of its main thread, which other processes disturb least. Checkpoints are
not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from autods.config.rungs import read_rungs
from autods.rank.job import Heartbeats, RankJob
from autods.types import Knobs
from autods.workload.load import make_source
from tests.support.composed import compose_config
from tests.support.launchers import cpu_env
from tests.support.run_jobs import run_job

CLOCKS = ("wall", "processor", "main thread")
RANKS, MICRO_BATCH, ACCUMULATION = 2, 16, 2
SCRIPT = """
import json, os, sys, time
import deepspeed, torch
from torch import nn

width, steps, mode = int(os.environ["WIDTH"]), int(os.environ["STEPS"]), os.environ["MODE"]
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(*layers)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
data = [torch.randn(width) for _ in range(512)]
plain = {name: getattr(engine, name) for name in ("backward", "step")}

def read_clocks():
    return time.perf_counter(), time.process_time(), time.thread_time()

def repeat():
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True)
    while True:
        yield from torch.utils.data.DataLoader(
            data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, drop_last=True
        )

sources = {"plain": repeat()}
session = None
if mode != "plain":
    import autods
    session = autods.session(engine)
    sources["run"] = session.batches(data)
watched = {name: getattr(engine, name) for name in plain}
BLOCK = 5
times = {"plain": [], "run": []}
for number in range(steps):
    # Blocks of steps: the first step_done after plain steps counts those, too.
    kind = mode if mode != "both" else "run" if number // BLOCK % 2 else "plain"
    engine.backward, engine.step = (watched if kind == "run" else plain).values()
    began = read_clocks()
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(next(sources[kind])).square().mean()
        engine.backward(loss)
        engine.step()
        if kind == "run":
            session.step_done(loss)
    if number % BLOCK:
        times[kind].append([after - before for after, before in zip(read_clocks(), began)])
if os.environ["RANK"] == "0":
    open(os.environ["TIMES"], "w").write(json.dumps({kind: rows[3:] for kind, rows in times.items()}))
torch.distributed.barrier()
time.sleep(0.2)
"""


def main() -> None:
    """Train in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="of steps with and without a session in one process")
    parser.add_argument("--turns", type=int, default=2, help="of torchrun and a run")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        os.chdir(folder)
        os.environ |= {"WIDTH": str(options.width), "STEPS": str(options.steps), "TIMES": str(folder / "times.json")}
        job = make_job(folder, options.steps)
        (folder / "ds_config.json").write_text(json.dumps(job.ds_config))
        pairs: list[tuple[list[float], list[float]]] = []
        between = []
        for number in range(options.rounds):
            times = train_as_run(folder, job, "both")
            print_ratio(f"round {number + 1}, every second block", *compare(times))
            pairs += zip(times["plain"], times["run"], strict=False)
        print_interval(pairs)
        for number in range(options.turns):
            turns = [train_plainly, lambda folder: train_as_run(folder, job, "run")]
            first, second = (turn(folder) for turn in (turns if number % 2 == 0 else reversed(turns)))
            between.append(compare({kind: first[kind] or second[kind] for kind in first}))
            print_ratio(f"round {number + 1}, torchrun and a run", *between[-1])
    if between:
        medians = (statistics.median(part) for part in zip(*between, strict=True))
        print_ratio(f"median of {options.turns}, torchrun and a run", *medians)


def compare(times: dict[str, list[list[float]]]) -> list[float]:
    """The median step of plain training in seconds, and the ratios of a run's to it by clock."""
    plain, run = ([statistics.median(column) for column in zip(*times[kind], strict=True)] for kind in ("plain", "run"))
    return [plain[0], *(of_run / of_plain for of_run, of_plain in zip(run, plain, strict=True))]


def print_interval(pairs: list[tuple[list[float], list[float]]]) -> None:
    """Print the median ratio of neighbouring steps, a run's to a plain one's, with the 95 % interval of a bootstrap."""
    generator = random.Random(0)
    for column, clock in enumerate(CLOCKS):
        ratios, milliseconds = zip(
            *((run[column] / plain[column], 1000 * (run[column] - plain[column])) for plain, run in pairs), strict=True
        )
        medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(1000))
        print(
            f"  {len(ratios)} pairs, {clock} {statistics.median(ratios):.4f}, 95 % interval {medians[25]:.4f} to "
            f"{medians[974]:.4f}, {statistics.median(milliseconds):+.2f} ms",
            flush=True,
        )


def print_ratio(title: str, step_s: float, *ratios: float) -> None:
    words = (f"{clock} {ratio:.4f}" for clock, ratio in zip(CLOCKS, ratios, strict=True))
    print(f"{title}: step {1000 * step_s:.0f} ms, {', '.join(words)}", flush=True)


def make_job(folder: Path, steps: int) -> RankJob:
    """The job of the run; it saves nothing before the script ends."""
    settings = {"zero_optimization.reduce_bucket_size": 2**20, "zero_optimization.allgather_bucket_size": 2**20}
    knobs = Knobs(micro_batch=MICRO_BATCH, accumulation=ACCUMULATION, settings=settings)
    job = run_job(
        folder,
        ds_config=compose_config(read_rungs(())["zero2"], knobs, world_size=RANKS),
        micro_batch=MICRO_BATCH,
        accumulation=ACCUMULATION,
        ranks=RANKS,
        source=make_source(Path("train.py"), folder=folder, argv=["{ds_config}"]),
        steps=steps + 1,
        checkpoint_every=10**9,
    )
    job = replace(job, threads=1, limit_bytes=2**32)
    job.write()
    return job


def train_plainly(folder: Path) -> dict[str, list[list[float]]]:
    """Train under torchrun, and return the times of its steps."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    env = {**cpu_env(), "DS_ACCELERATOR": "cpu", "MODE": "plain"}
    command = [sys.executable, "-m", *launcher, "train.py", str(folder / "ds_config.json")]
    subprocess.run(command, env=env, check=True, capture_output=True)
    return read_times()


def read_times() -> dict[str, list[list[float]]]:
    """Seconds of each step by `CLOCKS`, by kind."""
    times: dict[str, list[list[float]]] = json.loads(Path(os.environ["TIMES"]).read_text())
    return times


def train_as_run(folder: Path, job: RankJob, mode: str) -> dict[str, list[list[float]]]:
    """Train with ranks as a zygote starts them where it must not fork; return the times of their steps."""
    board = Heartbeats.create(RANKS)
    os.set_inheritable(board.fd, True)
    for name in ("logs", "scratch", "private"):
        (folder / name).mkdir(exist_ok=True)
    for file in (folder / "private").iterdir():
        file.unlink()
    assert job.order is not None
    ranks = []
    for slot in range(RANKS):
        env = {
            **cpu_env(), "DS_ACCELERATOR": "cpu", "MODE": mode,
            "RANK": str(slot), "LOCAL_RANK": str(slot), "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "autods.rank.worker",
            str(slot),
            str(board.fd),
            "-1",
            str(job.order.job_file),
        ]
        ranks.append(
            subprocess.Popen(
                command, env=env, pass_fds=[board.fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )
    for rank in ranks:
        rank.wait()
    board.close()
    return read_times()


if __name__ == "__main__":
    main()
