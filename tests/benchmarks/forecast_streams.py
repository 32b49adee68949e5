"""What a pool of free blocks for each stream costs: the same trace on one pool, on pools of streams, and with blocks
that other streams still use.

python tests/benchmarks/forecast_streams.py [--model 7b] [--rungs zero2,zero3] [--micro-batch 1] [--gpus 8]
    [--on h100-80gb] [--json]

`one pool`: every block is reusable once it is freed, by any stream. `pools`: by its own stream only. `clocks`: also
only when the streams of record_stream have passed on the clocks of --on (`autods/forecast/predict/memory_model.py`).

Each has GiB reserved without a limit, and the least limit at which the trace runs well. For `clocks` that is the limit
at which torch never waits for a stream. No GPU has confirmed any.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autods.config.catalogue import read_catalogue
from autods.forecast.predict.memory_model import find_returns
from autods.forecast.predict.prices import PriceList, read_constants
from autods.forecast.predict.replay import find_least_limit, replay
from autods.forecast.simulate import ProcessSimulator
from autods.forecast.values import EngineSpec, Simulation
from autods.workload import make_source
from tests.benchmarks.forecast_speed import MODELS

GIB = 2**30
_OFFLOADS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "overlap_comm": True},
    "zero3": {"stage": 3},
    "zero3-offload": {
        "stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
    },
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b", choices=MODELS)
    parser.add_argument("--rungs", default="zero2,zero3")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--on", default="h100-80gb", help="a machine of the catalogue")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="autods-streams-") as folder:
        path = Path(folder) / "config.json"
        sizes = MODELS[options.model][0]
        common = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
        path.write_text(json.dumps(common | sizes))
        with ProcessSimulator(make_source(path)) as simulator:
            efficiency = read_constants().efficiency
            machine = read_catalogue()[options.on]
            prices = PriceList(machine=machine, ranks_per_node=min(8, options.gpus), efficiency=efficiency)
            for rung in options.rungs.split(","):
                spec = engine(rung, options.gpus, options.micro_batch)
                (simulation,) = simulator.simulate(spec, [options.micro_batch])
                rows.append({"rung": rung, **measure(simulation, prices)})
                if not options.json:
                    show(rows[-1])
    if options.json:
        print(json.dumps(rows, indent=2))
    return 0


def engine(rung: str, ranks: int, micro_batch: int) -> EngineSpec:
    """A rung with DeepSpeed's default buckets."""
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": _OFFLOADS[rung],
    }
    return EngineSpec(rung=rung, ds_config=config, world_size=ranks, ranks_per_node=ranks, device_bytes=80 * GIB)


def measure(simulation: Simulation, prices: PriceList) -> dict[str, Any]:
    """Bytes reserved by each model of the allocator."""
    trace, schedule = simulation.traces["device"], simulation.schedule
    assert schedule is not None
    clocked = replace(trace, held=find_returns(trace, schedule, prices))
    ways = {"one pool": replace(trace, streams=()), "pools": trace, "clocks": clocked}
    row: dict[str, Any] = {"late_blocks": len(clocked.held)}
    for name, way in ways.items():
        free = replay(way)
        row[name] = {"reserved_bytes": free.peak_reserved_bytes, "least_bytes": find_least_limit(way, free)[0]}
    return row | {"allocated_bytes": free.peak_allocated_bytes}


def show(row: dict[str, Any]) -> None:
    print(f"{row['rung']}: allocated {row['allocated_bytes'] / GIB:.2f} GiB; {row['late_blocks']} blocks freed late")
    for name in ("one pool", "pools", "clocks"):
        way = row[name]
        sizes = f"reserved {way['reserved_bytes'] / GIB:6.2f}, least limit {way['least_bytes'] / GIB:6.2f}"
        print(f"  {name:9} {sizes}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
