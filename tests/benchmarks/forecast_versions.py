"""The same forecasts by several installations of torch and DeepSpeed: every rung's bytes, and how far they differ.

python tests/benchmarks/forecast_versions.py > cpu.json
…/another/bin/python tests/benchmarks/forecast_versions.py --against cpu.json > both.json

It prints this installation's figures as JSON. With --against it prints that file's installations and this one, and a
table of the differences from the first of them; it fails when a peak differs by more than 1 %. One minute or two a run,
without the search for the largest micro batch.
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
from autods.system.host import installed_versions
from autods.types import TIERS
from autods.units import format_bytes

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS: dict[str, tuple[Path, dict[str, Any]]] = {
    "gpt, 2 × 8 GiB": (EXAMPLES / "gpt.py", {"gpus": 2, "gpu_memory": "8GiB", "nvme": "1TiB"}),
    "llama-7b, 8 × 80 GiB": (
        EXAMPLES / "geometries" / "llama-7b",
        {"gpus": 8, "gpu_memory": "80GiB", "host_memory": "1TiB", "nvme": "2TiB"},
    ),
}
BAR = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="FILE", type=Path, help="another installation's output")
    parser.add_argument("--questions", default="gpt,llama", help="those whose name begins so; default: gpt,llama")
    asked = parser.parse_args()
    others = json.loads(asked.against.read_text())["installations"] if asked.against else []
    begins = tuple(asked.questions.split(","))
    wanted = {name: question for name, question in QUESTIONS.items() if name.startswith(begins)}
    plans = {name: autods.plan(path, largest=False, **said) for name, (path, said) in wanted.items()}
    installation = {
        "versions": {**installed_versions(), "cuda": built_for()},
        "figures": {name: figures_of(plan) for name, plan in plans.items()},
    }
    installations = [*others, installation]
    rows = [row for one in installations[1:] for row in compared(installations[0], one)]
    print(json.dumps({"installations": installations, "differences": rows}, indent=2))
    if rows:
        show(rows)
    return 1 if any(abs(row["difference"]) > BAR for row in rows if row["figure"] != "problem") or problems(rows) else 0


def built_for() -> str | None:
    """The CUDA version that this torch was built for; None: a build without CUDA."""
    import torch

    return torch.version.cuda


def figures_of(plan: PlanReport) -> dict[str, dict[str, Any]]:
    """Rung → peak bytes by tier, the live tensors' peak, and the peak of each phase; or what went wrong."""
    found: dict[str, dict[str, Any]] = {}
    for rung in plan.sites[0].rungs:
        if not rung.memory:
            found[rung.rung] = {"problem": rung.reason}
            continue
        found[rung.rung] = {
            "live": rung.live_peak_bytes,
            **{tier: rung.memory[tier].peak_bytes for tier in TIERS if tier in rung.memory},
            **{f"device {phase}": size for phase, size in rung.by_phase.items()},
        }
    return found


def compared(first: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each figure that both have; difference: of `bytes` from `first_bytes`, as a share of the latter."""
    rows: list[dict[str, Any]] = []
    names = {name: other["versions"][name] for name in ("torch", "cuda", "deepspeed", "transformers")}
    for question, rungs in first["figures"].items():
        if question not in other["figures"]:
            continue  # it was not asked there
        for rung, figures in rungs.items():
            theirs = other["figures"][question].get(rung, {"problem": "no such rung"})
            where = {**names, "question": question, "rung": rung}
            if ("problem" in figures) != ("problem" in theirs):
                rows.append({**where, "figure": "problem", "said": theirs.get("problem"), "difference": 0.0})
                continue
            for figure, size in figures.items():
                if figure != "problem":
                    own = theirs.get(figure, 0)
                    difference = own / size - 1 if size else float(own != 0)
                    rows.append(
                        {**where, "figure": figure, "first_bytes": size, "bytes": own, "difference": difference}
                    )
    return rows


def problems(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rungs that only one of two installations can forecast."""
    return [row for row in rows if row["figure"] == "problem"]


def show(rows: list[dict[str, Any]]) -> None:
    """What differs, on stderr; equal figures are counted."""
    table = Table(title=f"{sum(not row['difference'] for row in rows)} of {len(rows)} figures are equal to the byte")
    for name in ("torch", "deepspeed", "question", "rung", "figure", "first", "here", "difference"):
        table.add_column(name, justify="right" if name in ("first", "here", "difference") else "left")
    for row in rows:
        told = [f"{row['torch']} (CUDA {row['cuda']})", *(row[name] for name in ("deepspeed", "question", "rung"))]
        if row["figure"] == "problem":
            table.add_row(*told, "problem", "", str(row["said"]), "")
        elif row["difference"]:
            sizes = (format_bytes(row["first_bytes"]), format_bytes(row["bytes"]))
            table.add_row(*told, row["figure"], *sizes, f"{row['difference']:+.2%}")
    Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
