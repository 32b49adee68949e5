"""What a training run costs in step time beside the plain launcher: the same script under torchrun and as a run's rank.

`python tests/benchmarks/run_overhead.py [--rounds 6] [--steps 60] [--width 1024]`

Both train in turns. A rank of a run reports heartbeats, samples its memory, writes a line for each step and agrees with
the other rank. Printed are the ratios of the median step, in wall time and in processor time of rank 0, for each round
and their median over all rounds. Checkpoints are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from autods.config.deepspeed import compose
from autods.config.strategies import read_rungs
from autods.trial.job import Heartbeats, RankJob
from autods.trial.run.order import RunOrder
from autods.types import Knobs
from autods.workload.load import make_source
from tests.support.launchers import cpu_env

RANKS, MICRO_BATCH, ACCUMULATION = 2, 16, 2
SCRIPT = """
import json, os, sys, time
import deepspeed, torch
from torch import nn

width, steps, plain = int(os.environ["WIDTH"]), int(os.environ["STEPS"]), "PLAIN" in os.environ
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(*layers)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
data = [torch.randn(width) for _ in range(512)]
if plain:
    session = None
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True)
    size = engine.train_micro_batch_size_per_gpu()
    def repeat():
        while True:
            yield from torch.utils.data.DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)
    batches = repeat()
else:
    import autods
    session = autods.session(engine)
    batches = session.batches(data)
times, began, cpu_began = [], time.perf_counter(), time.process_time()
for batch in batches:
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    if session:
        session.step_done(loss)
    if engine.global_steps > len(times):
        now, cpu = time.perf_counter(), time.process_time()
        times.append((now - began, cpu - cpu_began))
        began, cpu_began = time.perf_counter(), time.process_time()
    if len(times) == steps:
        break
if os.environ["RANK"] == "0":
    open(os.environ["TIMES"], "w").write(json.dumps(times[5:]))
torch.distributed.barrier()
time.sleep(0.2)
"""


def main() -> None:
    """Train in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    wall, cpu, step_ms = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        os.chdir(folder)
        os.environ |= {"WIDTH": str(options.width), "STEPS": str(options.steps), "TIMES": str(folder / "times.json")}
        order = make_order(folder, options.steps)
        config = folder / "ds_config.json"
        config.write_text(json.dumps(order.ds_config))
        for number in range(options.rounds):
            turns = [lambda: train_plainly(config), lambda: train_as_run(folder, order)]
            medians = {}
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                turns[index]()
                times = json.loads((folder / "times.json").read_text())
                medians[index] = [statistics.median(column) for column in zip(*times, strict=True)]
            wall.append(medians[1][0] / medians[0][0])
            cpu.append(medians[1][1] / medians[0][1])
            step_ms.append(1000 * medians[0][0])
            print(
                f"round {number + 1}: step {step_ms[-1]:.0f} ms, wall {wall[-1]:.4f}, processor {cpu[-1]:.4f}",
                flush=True,
            )
    print(
        f"median of {options.rounds} rounds: step {statistics.median(step_ms):.0f} ms, "
        f"wall {statistics.median(wall):.4f}, processor {statistics.median(cpu):.4f}"
    )


def make_order(folder: Path, steps: int) -> RunOrder:
    """The order of the run; it saves nothing before the script ends."""
    settings = {"zero_optimization.reduce_bucket_size": 2**20, "zero_optimization.allgather_bucket_size": 2**20}
    knobs = Knobs(micro_batch=MICRO_BATCH, accumulation=ACCUMULATION, settings=settings)
    order = RunOrder(
        folder=str(folder),
        attempt=1,
        ds_config=compose(read_rungs(())["zero2"], knobs, base={}, world_size=RANKS, own_optimizer=False),
        micro_batch=MICRO_BATCH,
        accumulation=ACCUMULATION,
        global_batch=MICRO_BATCH * ACCUMULATION * RANKS,
        world_size=RANKS,
        checkpointing=False,
        steps=steps + 1,
        checkpoint_every=10**9,
    )
    order.write()
    return order


def train_plainly(config: Path) -> None:
    """Train under torchrun."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    env = {**cpu_env(), "DS_ACCELERATOR": "cpu", "PLAIN": "1"}
    subprocess.run([sys.executable, "-m", *launcher, "train.py", str(config)], env=env, check=True, capture_output=True)


def train_as_run(folder: Path, order: RunOrder) -> None:
    """Train with ranks as a zygote starts them where it must not fork."""
    source = make_source(Path("train.py"), folder=folder, argv=["{ds_config}"])
    board = Heartbeats.create(RANKS)
    os.set_inheritable(board.fd, True)
    for name in ("logs", "scratch", "private"):
        (folder / name).mkdir(exist_ok=True)
    for file in (folder / "private").iterdir():
        file.unlink()
    job = RankJob(
        job="run",
        source=source,
        device="cpu",
        folder=str(folder / "logs"),
        scratch=str(folder / "scratch"),
        private=str(folder / "private"),
        order=str(order.path),
        world_size=RANKS,
        local_ranks=tuple(range(RANKS)),
        threads=1,
        limit_bytes=2**32,
    )
    (folder / "job.json").write_text(job.to_json())
    ranks = []
    for slot in range(RANKS):
        env = {
            **cpu_env(), "DS_ACCELERATOR": "cpu", "RANK": str(slot), "LOCAL_RANK": str(slot), "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "autods.trial.worker",
            str(slot),
            str(board.fd),
            "-1",
            str(folder / "job.json"),
        ]
        ranks.append(
            subprocess.Popen(
                command, env=env, pass_fds=[board.fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )
    for rank in ranks:
        rank.wait()
    board.close()


if __name__ == "__main__":
    main()
