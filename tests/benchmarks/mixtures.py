"""Forecast rungs of Mixtral 8x7B, Qwen3-30B-A3B and DeepSeek-V3 on H100s: memory and time, beside published rates.

python tests/benchmarks/mixtures.py [--only qwen3] [--seq-len 4096] [--accumulation 16] [--ladder A,B]

No published run of these models is a rung of DeepSpeed on H100s: those of mixtures.toml have experts in parallel.
They judge the order of magnitude, and nothing was chosen on them.
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
from autods.report.answers.plan import format_spent
from autods.report.serialize import plan_to_dict

GIB = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has this")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--accumulation", type=int, default=16)
    parser.add_argument("--ladder", default="zero1,zero2,zero3,zero3-offload")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    answers = {}
    for name, model in data["model"].items():
        if options.only not in name:
            continue
        answers[name] = plan = forecast(model, options)
        if options.json:
            continue
        print(f"\n{name} on {model['gpus']} H100 80 GB, sequence {options.seq_len}, micro batch {model['micro_batch']}")
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


def forecast(model: dict[str, Any], options: argparse.Namespace) -> Any:
    """Return the plan of this model at its micro batch."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model["config"]))
        return autods.plan(
            folder,
            gpus=model["gpus"],
            on="h100-80gb",
            nvme="2TiB",
            seq_len=options.seq_len,
            micro_batch=model["micro_batch"],
            global_batch=model["gpus"] * model["micro_batch"] * options.accumulation,
            largest=False,
            zero_init=True,
            ladder=options.ladder,
        )


if __name__ == "__main__":
    sys.exit(main())
