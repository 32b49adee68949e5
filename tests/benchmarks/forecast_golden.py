"""The simulated engine against the real engine's allocations on CPU tensors: every rung, model, accumulation and
checkpointing.

python tests/benchmarks/forecast_golden.py [--models gpt2,llama] [--rungs zero3] [--precision bf16] [--json]

cpu: the forecast for CPU ranks, the models as they come (SDPA, dropout). cuda: the simulated GPU, the sum of its tiers,
models with eager attention and without dropout, because both are other kernels on a GPU, and nothing pinned.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
os.environ["DS_ACCELERATOR"] = "cpu"

import golden_cases as golden

from autods.forecast.simulator import SimulationFailed, Simulator
from autods.forecast.values import PHASES, Ask
from autods.ladder import all_rungs
from autods.trial.preload import preload
from autods.workload import source_of

BAR = {"init": 0.05, "forward": 0.01, "backward": 0.01, "step": 0.01}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(golden.ARCHITECTURES))
    parser.add_argument("--rungs", default=",".join(sorted(all_rungs(), key=lambda name: all_rungs()[name].order)))
    parser.add_argument("--devices", default="cpu,cuda")
    parser.add_argument("--accumulation", default="1,2")
    parser.add_argument("--checkpointing", default="off,on")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "fp16", "bf16"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    preload()
    rows: list[dict[str, Any]] = []
    for device, architecture in product(options.devices.split(","), options.models.split(",")):
        for row in compared(device, architecture, options):
            rows.append(row)
            if not options.json:
                show(row)
    if options.json:
        print(json.dumps(rows))
    wrong = [row for row in rows if not row["within"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} cases within the bar", file=sys.stderr)
    return 1 if wrong else 0


def compared(device: Any, architecture: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a case: relative error by phase."""
    plain = device == "cuda"
    cases = list(product(options.rungs.split(","), options.accumulation.split(","), options.checkpointing.split(",")))
    asks = {}
    for rung, accumulation, checkpointing in cases:
        config = golden.config_of(rung, accumulation=int(accumulation), pinned=not plain, precision=options.precision)
        asks[(rung, accumulation, checkpointing)] = Ask(
            rung=rung, ds_config=config, world_size=golden.WORLD, ranks_per_node=golden.WORLD, device_bytes=16 << 30,
            device=device, checkpointing=checkpointing == "on",
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(golden.workload_file(architecture, Path(folder), plain=plain))
        with Simulator(source) as simulator:
            found = {id(ask): said for ask, said in simulator.simulate_each([(ask, (2,)) for ask in asks.values()])}
    rows = []
    for (rung, accumulation, checkpointing), ask in asks.items():
        row: dict[str, Any] = {
            "device": device, "model": architecture, "rung": rung, "accumulation": int(accumulation),
            "checkpointing": checkpointing,
        }  # fmt: skip
        said = found[id(ask)]
        if isinstance(said, SimulationFailed):
            rows.append(row | {"within": False, "failed": str(said)})
            continue
        real = golden.really_allocated(architecture, ask.ds_config, checkpointing=ask.checkpointing, plain=plain)
        errors = {phase: said[0].summed_peak_bytes[phase] / real[phase] - 1 for phase in PHASES}
        rows.append(
            row | {"real": real, "errors": errors, "within": all(abs(errors[phase]) <= BAR[phase] for phase in PHASES)}
        )
    return rows


def show(row: dict[str, Any]) -> None:
    """One line."""
    name = f"{row['device']:5}{row['model']:7}{row['rung']:20}{row['accumulation']:3} {row['checkpointing']:4}"
    if "failed" in row:
        print(name, row["failed"].splitlines()[0], flush=True)
        return
    errors = "  ".join(f"{phase} {row['errors'][phase]:+7.2%}" for phase in PHASES)
    print(name, errors, "" if row["within"] else "  <-", flush=True)


if __name__ == "__main__":
    sys.exit(main())
