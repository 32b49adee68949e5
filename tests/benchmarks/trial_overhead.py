"""What a trial costs beside its own work: wall − build − steps, per rung, after the first trial.

python tests/benchmarks/trial_overhead.py [--repeats 5] [--workload model.py] [--gpu-memory 2GiB] [--rungs A,B]
    [--precision fp32] [--apart] [--json]

With --apart the trials of a rung run with ranks that share one built model, and again with ranks that each build it.
Shown is all that is beside the steps, wall − steps, and the peak of the host. That counts shared pages for each rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autods.config.deepspeed import start_settings
from autods.config.rungs import read_rungs
from autods.runner.runner import RayRunner
from autods.system.host import read_hardware
from autods.types import Fit, Knobs, Steps, Trial
from autods.workload import make_source
from tests.support.settings import fit_settings

TORCH_ADAM = {"optimizer.params.torch_adam": True}  # so that no op has to be built
RUNGS = ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload-param")
BAR_S = {True: 0.8, False: 0.5}  # stage 3, other stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workload", type=Path, default=Path(__file__).parent / "workloads" / "gpt_small.py")
    parser.add_argument("--gpu-memory", default="2GiB", help="the budget of a rank")
    parser.add_argument("--rungs", type=lambda text: tuple(text.split(",")), default=RUNGS)
    parser.add_argument("--precision", default="auto", help="fp32 where the processor has no AVX-512")
    parser.add_argument("--apart", action="store_true", help="beside trials whose ranks build the model by themselves")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = fit_settings(
            make_source(options.workload), hardware=read_hardware(), gpus=2, device="cpu",
            gpu_memory=options.gpu_memory, precision=options.precision, out=folder,
        )  # fmt: skip
        with RayRunner(settings, lambda event: None) as runner:
            runner.survey()
            rows = (compare_builds if options.apart else measure)(runner, options.rungs, options.repeats)
    if options.json:
        print(json.dumps(rows))
        return
    if options.apart:
        print(f"{'rung':22}{'beside the steps s: shared':>28}{'apart':>8}   host peak GiB: shared, apart")
        for row in rows:
            print(
                f"{row['rung']:22}{row['shared_s']:28.2f}{row['apart_s']:8.2f}"
                f"   {row['shared_gib']:.2f}, {row['apart_gib']:.2f}"
            )
        return
    print(f"{'rung':22}{'overhead s: min':>16}{'median':>9}{'max':>7}{'bar':>6}   of which init")
    for row in rows:
        print(
            f"{row['rung']:22}{row['min_s']:16.2f}{row['median_s']:9.2f}{row['max_s']:7.2f}{row['bar_s']:6.1f}"
            f"   {row['init_s']:.2f}"
        )


def measure(runner: RayRunner, names: Sequence[str], repeats: int) -> list[dict[str, float | str]]:
    """One row a rung; the very first trial of all is not counted."""
    rows: list[dict[str, float | str]] = []
    for name, count in ((names[0], 1), *((name, repeats) for name in names)):
        timings = [run(runner, name, id=len(rows)).timing for _ in range(count)]
        overheads = [timing.overhead_s for timing in timings]
        rows.append(
            {
                "rung": name,
                "min_s": min(overheads),
                "median_s": statistics.median(overheads),
                "max_s": max(overheads),
                "bar_s": BAR_S[read_rungs()[name].stage == 3],
                "init_s": statistics.median(timing.init_s for timing in timings),
            }
        )
    return rows[1:]


def compare_builds(runner: RayRunner, names: Sequence[str], repeats: int) -> list[dict[str, float | str]]:
    """One row a rung, with medians."""
    rows: list[dict[str, float | str]] = []
    for name in names:
        row: dict[str, float | str] = {"rung": name}
        for way in ("shared", "apart"):
            runner.shares_models = way == "shared"
            # The first of them builds the model for all that share it, and is not counted.
            found = [run(runner, name, id=len(rows), timed=1) for _ in range(1 + repeats)][1:]
            row[f"{way}_s"] = statistics.median(fit.timing.wall_s - fit.timing.steps_s for fit in found)
            row[f"{way}_gib"] = max(fit.memory["host"].peak_bytes for fit in found) / 2**30
        rows.append(row)
    return rows


def run(runner: RayRunner, name: str, *, id: int, timed: int = 4) -> Fit:
    """Run a trial of the rung; it has to fit."""
    rung = read_rungs()[name]
    assert runner.facts is not None
    said = start_settings(
        rung, base=runner.settings.base, device_bytes=runner.settings.device_bytes, facts=runner.facts
    )
    trial = Trial(
        rung=name,
        knobs=Knobs(checkpointing=False, settings={**said, **TORCH_ADAM}),
        purpose="walk",
        steps=Steps(warmup=1, timed=timed, most_timed=timed),
    )
    outcome = runner.run(trial, id=id).outcome
    assert isinstance(outcome, Fit), outcome
    return outcome


if __name__ == "__main__":
    main()
