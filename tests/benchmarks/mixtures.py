"""Forecast rungs of four mixtures of experts on H100s: memory and time, beside published rates (mixtures.toml).

python tests/benchmarks/mixtures.py [--only qwen3] [--seq-len N] [--accumulation N] [--checkpointing off] [--ladder A,B]

One published run is a rung of DeepSpeed: ZeRO-3 of a Qwen3.6-35B-A3B that was cut to 20 layers. It does not say whether
activations were recomputed. The other runs have experts in parallel, and judge the order of magnitude. Nothing was
chosen on any of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import autods
from autods.report.answers.plan_figures import format_spent
from autods.report.serialize import plan_to_dict

GIB = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has this")
    parser.add_argument("--seq-len", type=int, help="instead of each model's")
    parser.add_argument("--accumulation", type=int, help="instead of each model's")
    parser.add_argument("--checkpointing", choices=["on", "off"], help="on, if left out")
    parser.add_argument("--ladder", default="zero1,zero2,zero3,zero3-offload")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    answers = {}
    for name, model in data["model"].items():
        if options.only not in name:
            continue
        model["seq_len"] = options.seq_len or model.get("seq_len", 4096)
        model["accumulation"] = options.accumulation or model.get("accumulation", 16)
        answers[name] = plan = forecast(model, options.ladder, options.checkpointing)
        if options.json:
            continue
        batch = f"sequence {model['seq_len']}, micro batch {model['micro_batch']}"
        print(f"\n{name} on {model['gpus']} H100 80 GB, {batch}")
        print(f"{'rung':20} {'verdict':15} {'GiB':>6} {'step, s':>8} {'tokens/s/GPU':>12}  spent on")
        for rung in plan.sites[0].rungs:
            held, speed = rung.memory.get("device"), rung.speed
            memory = "–" if held is None else f"{held.peak_bytes / GIB:.1f}"
            rate = None if speed is None else speed.tokens_per_second
            figures = f"{'–':>8} {'–':>12}"
            if speed is not None and rate is not None:
                figures = f"{speed.step.seconds:8.3g} {rate / model['gpus']:12,.0f}"
            spent = rung.reason if speed is None else format_spent(speed.step)
            print(f"{rung.rung:20} {rung.verdict:15} {memory:>6} {figures}  {spent}")
        for row in data["published"]:
            if row["model"] == name:
                print(f"published: {row['tokens_per_s_per_gpu']:,} tokens/s/GPU, {row['ran']} ({row['source']})")
    if options.json:
        print(json.dumps({name: plan_to_dict(plan) for name, plan in answers.items()}))
    return 0


def forecast(model: dict[str, Any], ladder: str, checkpointing: str | None) -> Any:
    """Return the plan of this model at its micro batch."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model["config"]))
        return autods.plan(
            folder,
            gpus=model["gpus"],
            on="h100-80gb",
            nvme="2TiB",
            seq_len=model["seq_len"],
            micro_batch=model["micro_batch"],
            global_batch=model["gpus"] * model["micro_batch"] * model["accumulation"],
            largest=False,
            zero_init=True,
            ladder=ladder,
            checkpointing=checkpointing,
        )


if __name__ == "__main__":
    sys.exit(main())
