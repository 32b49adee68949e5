"""T5 on one 16 GiB card with 64 GiB of host memory: which rung, which batch, how much of each tier; and the two limits.

python tests/benchmarks/t5_questions.py [--sizes small,large,3b] [--limits] [--no-largest] [--json]

The first table: T5-small, -large and -3B at 1,024 source and 128 target tokens in fp16, forecast on a simulated GPU,
some minutes each. The second (--limits): T5-3B under ZeRO-3 with both offloads, while stage3_max_live_parameters and
stage3_max_reuse_distance are raised. They decide how many gathered parameters stay on the card between forward and
backward; what is kept on the host is the partition, of the same size however long a copy of it stays on the card.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import autods
from autods.report.results.plan import PlanReport
from autods.types import TIERS
from autods.units import format_bytes

GEOMETRIES = Path(__file__).parents[2] / "examples" / "geometries"
CARD: dict[str, Any] = {
    "gpus": 1, "gpu_memory": "16GiB", "host_memory": "64GiB", "nvme": "1TiB", "seq_len": 1024, "target_len": 128,
    "precision": "fp16", "task": "seq2seq",
}  # fmt: skip
LIMITS = ((1e8, 1e8), (1e9, 1e9), (3e10, 1e10))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="small,large,3b")
    parser.add_argument("--limits", action="store_true", help="also the second table")
    parser.add_argument("--no-largest", action="store_true", help="without the search for the largest micro batch")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    said = {**CARD, "largest": not asked.no_largest}
    sizes = {size: autods.plan(GEOMETRIES / f"t5-{size}", **said) for size in asked.sizes.split(",") if size}
    limits = {pair: limited(*pair) for pair in LIMITS} if asked.limits else {}
    if asked.json:
        from autods.report.serialize import plan_to_dict as to_dict

        told = {f"max_live {live:g}, max_reuse {reuse:g}": to_dict(said) for (live, reuse), said in limits.items()}
        print(json.dumps({**{f"t5-{size}": to_dict(said) for size, said in sizes.items()}, **told}, indent=2))
        return 0
    show_sizes(sizes)
    if limits:
        show_limits(limits)
    return 0


def limited(live: float, reuse: float) -> PlanReport:
    """T5-3B with everything offloaded, the two limits as the base config has them."""
    zero = {"stage": 3, "stage3_max_live_parameters": live, "stage3_max_reuse_distance": reuse}
    base = {"fp16": {"enabled": True}, "zero_optimization": zero}
    said = {**CARD, "host_memory": "256GiB", "ladder": ("zero3-offload",), "largest": False}
    return autods.plan(GEOMETRIES / "t5-3b", base_config=base, as_written=True, **said)


def show_sizes(sizes: dict[str, PlanReport]) -> None:
    table = Table(title="T5 on one 16 GiB card, 64 GiB of host memory: peak of each tier")
    for name in ("model", "rung", "verdict", *TIERS, "largest micro batch"):
        table.add_column(name, justify="right" if name in TIERS else "left")
    for size, said in sizes.items():
        for rung in said.sites[0].rungs:
            tiers = [format_bytes(rung.memory[tier].peak_bytes) if tier in rung.memory else "" for tier in TIERS]
            best = " (best)" if rung.rung == said.sites[0].best_rung else ""
            verdict = rung.verdict.replace("_", " ")
            table.add_row(f"T5-{size}", rung.rung + best, verdict, *tiers, str(rung.largest_micro_batch or ""))
        table.add_section()
    Console().print(table)


def show_limits(limits: dict[tuple[float, float], PlanReport]) -> None:
    table = Table(title="T5-3B, zero3-offload: what the two limits cost")
    for name in ("max_live", "max_reuse", "init", "forward", "backward", "step", "host", "pinned"):
        table.add_column(name, justify="right")
    for (live, reuse), said in limits.items():
        rung = said.sites[0].rungs[0]
        phases = [format_bytes(rung.by_phase.get(phase, 0)) for phase in ("init", "forward", "backward", "step")]
        host, pinned = (format_bytes(rung.memory[tier].peak_bytes) for tier in ("host", "pinned"))
        table.add_row(f"{live:g}", f"{reuse:g}", *phases, host, pinned)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
