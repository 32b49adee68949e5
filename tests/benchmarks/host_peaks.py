"""The host memory of real CPU ranks by /proc beside the forecast: models built whole, and in parts with --zero-init.

python tests/benchmarks/host_peaks.py [--workloads config,model] [--out FOLDER]

For each workload, once without and once with --zero-init: `autods fit` on two CPU ranks with zero3 alone, then
`autods run` of the same. Every 10 ms the ranks are looked at from outside. A row has the largest size of each rank in a
phase, summed over the ranks, of what they took since they were forked. `VmData` is what a CPU rank's budget and the
forecast count: memory that was asked for. `RssAnon` was touched, too. `Pss` is whole: it has the rank's share of the
zygote's pages and of libraries. Beside them stands the forecast for that phase, and its error against VmData.

config is a GPT-2 of 303 million parameters, all of which train. model is a model.py of 302 million, of which only the
last layer trains: there the build decides.

The bar: the forecast of the largest phase is within 10 % of VmData. With --zero-init no rank builds the whole model.
Of a fit the first trial is counted, which is the one that is forecast; nothing is tuned or certified after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from autods.rank.job import Heartbeats
from tests.support.frozen_model import frozen_model
from tests.support.launchers import cpu_env

RANKS, EVERY_S, GIB = 2, 0.01, 2**30
PHASES = ("build", "init", "forward", "backward", "step")
MEASURES = ("VmData", "RssAnon", "Pss")
CONFIG = {
    "model_type": "gpt2", "n_layer": 20, "n_embd": 1024, "n_head": 16, "n_positions": 16, "vocab_size": 50257,
}  # fmt: skip
MODEL = frozen_model(width=4096, layers=18)


@dataclass(slots=True)
class RankSampler:
    """Looks at the ranks of a command's first job that trains, from outside, in a thread.

    `peaks` has the largest sizes of each rank by phase and measure. Once the ranks are known nothing else is looked
    for, so that a look takes about a millisecond. Pss takes far longer, and every tenth look has it.
    """

    command: psutil.Process
    ranks: tuple[int, ...] = ()
    peaks: dict[tuple[int, str, str], int] = field(default_factory=dict)
    samples: int = 0
    _first: dict[tuple[int, str], int] = field(default_factory=dict)  # of a rank when it was seen first
    _ended: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            with contextlib.suppress(psutil.Error, OSError):
                ranks = self.ranks or tuple(sorted(find_ranks(self.command)))  # as they were forked: the board's order
                for slot, rank in enumerate(ranks):
                    self.look(rank, slot)
                if len(ranks) == RANKS and (ranks[0], "forward", "VmData") in self.peaks:  # no survey or preflight
                    self.ranks = ranks

    def stop(self) -> None:
        self._ended.set()

    def look(self, rank: int, slot: int) -> None:
        sizes = read_bytes(f"/proc/{rank}/status", "VmData", "RssAnon")
        for measure, size in sizes.items():
            sizes[measure] -= self._first.setdefault((rank, measure), size)
        self.samples += 1
        if self.samples % 10 < RANKS:
            sizes |= read_bytes(f"/proc/{rank}/smaps_rollup", "Pss")
        if (phase := read_phase(rank, slot)) in PHASES:
            for measure, size in sizes.items():
                self.peaks[rank, phase, measure] = max(self.peaks.get((rank, phase, measure), 0), size)

    def sum_peaks(self, phase: str, measure: str) -> int:
        """Return the sum over the ranks of the largest size in a phase."""
        return sum(self.peaks.get((rank, phase, measure), 0) for rank in self.ranks)


def find_ranks(command: psutil.Process) -> Iterator[int]:
    """Yield the ranks below a command: processes that a zygote has forked, and that have its board."""
    for process in command.children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            parent = process.parent()
            if parent is not None and "autods.runner.zygote" in " ".join(parent.cmdline()) and find_board(process.pid):
                yield process.pid


def find_board(pid: int) -> str | None:
    """Return the descriptor of the heartbeats that a rank writes, as a path."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith("/memfd:autods-heartbeat"):
                return entry.path
    return None


def read_phase(pid: int, slot: int) -> str | None:
    """Return the phase of a rank."""
    board = find_board(pid)
    if board is None:
        return None
    heartbeats = Heartbeats.from_fd(os.open(board, os.O_RDWR))
    try:
        return heartbeats.read(slot).phase
    finally:
        heartbeats.close()


def read_bytes(path: str, *names: str) -> dict[str, int]:
    """Return the bytes of some lines of a file of /proc. Raises OSError where the process has ended."""
    lines = (text.partition(":") for text in Path(path).read_text().splitlines())
    found = {name: int(value.split()[0]) * 1024 for name, _, value in lines if name in names}
    if len(found) < len(names):
        raise ProcessLookupError(f"{path} lacks {' and '.join(names)}: the process has ended")
    return found


def watch_command(words: list[str]) -> RankSampler:
    """Run a command to its end and look at its ranks meanwhile. Raises SystemExit where it fails."""
    program = [sys.executable, "-m", "autods", *words]
    started = subprocess.Popen(program, env=cpu_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sampler = RankSampler(psutil.Process(started.pid))
    thread = threading.Thread(target=sampler.watch)
    thread.start()
    output, _ = started.communicate()
    sampler.stop()
    thread.join()
    if started.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {started.returncode}\n{output}")
    return sampler


def read_forecast(folder: Path) -> dict[str, int]:
    """Return the bytes of a node that the finished fit in this folder forecast, by phase."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    (rung,) = (row for row in report["forecast"] if row["rung"] == "zero3")
    return {phase: RANKS * size for phase, size in rung["device"]["by_phase"].items()}


def measure(name: str, workload: str, options: list[str], folder: Path) -> None:
    """Print the rows of one workload."""
    for built, flag in (("whole", []), ("in parts", ["--zero-init"])):
        fit, run = folder / f"{name}-fit-{built.split()[-1]}", folder / f"{name}-run-{built.split()[-1]}"
        shared = [
            workload, "--gpus", str(RANKS), "--device", "cpu", "--gpu-memory", "9GiB", "--ladder", "zero3",
            "--precision", "fp32", "--global-batch", str(RANKS), "--config", str(folder / "profile.toml"),
            "--stall-limit", "15m", *flag,
        ]  # fmt: skip
        watched = {"fit": watch_command(["fit", *shared, "--out", str(fit)])}
        watched["run"] = watch_command(["run", *shared, *options, "--fit", str(fit), "--out", str(run)])
        forecast = read_forecast(fit)
        for command, sampler in watched.items():
            for phase in PHASES:
                sizes = [sampler.sum_peaks(phase, each) for each in MEASURES]
                columns = "".join(f"{size / GIB:>9.2f}" for size in (*sizes, forecast[phase]))
                error = forecast[phase] / sizes[0] - 1 if sizes[0] else float("nan")
                mark = " largest" if forecast[phase] == max(forecast.values()) else ""
                print(f"{name:<8}{built:<10}{command:<5}{phase:<9}{columns}{error:>+8.1%}{mark}", flush=True)


def shorten_profile() -> str:
    """Return the quick profile without trials that tune and certify."""
    text = (Path(__file__).resolve().parents[2] / "configs" / "quick.toml").read_text()
    for header, count in (("[tune]", "trials"), ("[certify]", "most_trials")):
        before, _, section = text.partition(header)
        text = before + header + re.sub(rf"(?m)^{count} = \d+", f"{count} = 0", section, count=1)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="config,model")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.out or Path(temporary)
        (folder / "gpt").mkdir(parents=True, exist_ok=True)
        (folder / "gpt" / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model.py").write_text(MODEL)
        (folder / "profile.toml").write_text(shorten_profile())
        tokens = folder / "tokens.txt"
        tokens.write_text("no word is said twice, or is it? " * 2000)
        workloads = {
            "config": (f"hf:{folder / 'gpt'}", ["--data", str(tokens), "--steps", "3"]),
            "model": (str(folder / "model.py"), ["--steps", "3"]),
        }
        print(f"{f'{RANKS} ranks, GiB a node':<32}{''.join(f'{each:>9}' for each in (*MEASURES, 'forecast'))}   error")
        for name in asked.workloads.split(","):
            workload, options = workloads[name]
            measure(name, workload, options, folder)


if __name__ == "__main__":
    main()
