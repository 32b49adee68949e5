"""What a trial costs beside its own work: wall − build − steps, per rung, after the first trial.

python tests/benchmarks/trial_overhead.py [--repeats 5] [--workload model.py] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
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
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = fit_settings(
            make_source(options.workload), hardware=read_hardware(), gpus=2, device="cpu", gpu_memory="2GiB", out=folder
        )
        with RayRunner(settings, lambda event: None) as runner:
            runner.survey()
            rows = measure(runner, options.repeats)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'rung':22}{'overhead s: min':>16}{'median':>9}{'max':>7}{'bar':>6}   of which init")
    for row in rows:
        print(
            f"{row['rung']:22}{row['min_s']:16.2f}{row['median_s']:9.2f}{row['max_s']:7.2f}{row['bar_s']:6.1f}"
            f"   {row['init_s']:.2f}"
        )


def measure(runner: RayRunner, repeats: int) -> list[dict[str, float | str]]:
    """One row a rung; the very first trial of all is not counted."""
    rows: list[dict[str, float | str]] = []
    rungs = read_rungs()
    steps = Steps(warmup=1, timed=4, most_timed=4)
    assert runner.facts is not None
    for name, count in ((RUNGS[0], 1), *((name, repeats) for name in RUNGS)):
        rung = rungs[name]
        said = start_settings(
            rung, base=runner.settings.base, device_bytes=runner.settings.device_bytes, facts=runner.facts
        )
        trial = Trial(
            rung=name,
            knobs=Knobs(checkpointing=False, settings={**said, **TORCH_ADAM}),
            purpose="walk",
            steps=steps,
        )
        timings = []
        for _ in range(count):
            outcome = runner.run(trial, id=len(rows)).outcome
            assert isinstance(outcome, Fit), outcome
            timings.append(outcome.timing)
        overheads = [timing.overhead_s for timing in timings]
        rows.append(
            {
                "rung": name,
                "min_s": min(overheads),
                "median_s": statistics.median(overheads),
                "max_s": max(overheads),
                "bar_s": BAR_S[rung.stage == 3],
                "init_s": statistics.median(timing.init_s for timing in timings),
            }
        )
    return rows[1:]


if __name__ == "__main__":
    main()
