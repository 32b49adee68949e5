"""Forecast eight rungs of Llama-7B on 8 A100 with NVLink, the same without it, and 8 RTX 4090; which rung, and why.

python tests/benchmarks/step_time_machines.py [--seq-len 4096] [--micro-batch N] [--global-batch N] [--only X] [--json]

Without --micro-batch each rung has its largest. The machines are those of the catalogue, with what `MACHINES` changes.
No published table has these rungs on these machines: the command shows forecasts, and judges none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import autods
from autods.report.answers.plan_advice import compare_speeds, describe_site_answer
from autods.report.answers.plan_figures import format_spent
from autods.report.results.plan import PlanReport
from autods.report.serialize import plan_to_dict
from autods.system.host import data_folder

ROOT = Path(__file__).resolve().parents[2]
# By machine: the one of the catalogue, and the lines of its file that change.
MACHINES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "8 A100 80 GB, NVLink": ("a100-80gb", {}),
    "8 A100 80 GB, PCIe 4.0": (
        "a100-80gb",
        {
            'name = "a100-80gb"': 'name = "a100-80gb-no-nvlink"',
            "over_pcie = false": "over_pcie = true",
            'between_gpus = "NVLink 3"': 'between_gpus = "PCIe 4.0 x16"',
            "between_gpus_gb_per_s = 600": "between_gpus_gb_per_s = 32",
        },
    ),
    "8 RTX 4090 in one node, the host of the A100s": (
        "rtx4090-24gb",
        {
            'name = "rtx4090-24gb"': 'name = "8-rtx4090"',
            "gpus = 2": "gpus = 8",
            "host_bytes = 137_438_953_472": "host_bytes = 1_236_950_581_248",
            "dram_gb_per_s = 204.8": "nvme_gb_per_s = 16\ndram_gb_per_s = 281.6",
        },
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--global-batch", type=int)
    parser.add_argument("--only", default="", help="machines whose name has this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    forecasts = {name: forecast(name, options) for name in MACHINES if options.only in name}
    if options.json:
        print(json.dumps({name: plan_to_dict(each) for name, each in forecasts.items()}))
        return 0
    for name, each in forecasts.items():
        show(name, each)
    return 0


def forecast(name: str, options: argparse.Namespace) -> PlanReport:
    base, changes = MACHINES[name]
    text = (data_folder("configs") / "hardware" / f"{base}.toml").read_text()
    for old, new in changes.items():
        assert old in text, (base, old)
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.toml"
        path.write_text(text)
        return autods.plan(
            ROOT / "examples" / "geometries" / "llama-7b",
            gpus=8,
            on=str(path),
            nvme="2TiB",
            seq_len=options.seq_len,
            micro_batch=options.micro_batch,
            global_batch=options.global_batch,
            largest=options.micro_batch is None,
        )


def show(name: str, plan: PlanReport) -> None:
    (site,) = plan.sites
    print(f"\n{name}, sequence {plan.facts.seq_len}")
    print(f"{'rung':20} {'verdict':10} {'micro batch':>11} {'step, s':>8} {'tokens/s':>9}  spent on")
    for rung in site.rungs:
        speed = rung.speed
        figures = f"{'–':>11} {'–':>8} {'–':>9}"
        if speed is not None and speed.tokens_per_second is not None:
            figures = f"{speed.micro_batch:11} {speed.step.seconds:8.3g} {speed.tokens_per_second:9,.0f}"
        print(f"{rung.rung:20} {rung.verdict:10} {figures}  {format_spent(speed.step) if speed else rung.reason}")
    print(describe_site_answer(plan, site))
    for sentence in compare_speeds(site):
        print(f"- {sentence}")


if __name__ == "__main__":
    sys.exit(main())
