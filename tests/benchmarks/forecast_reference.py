"""The simulated engine beside figures that are known: Llama-7B's live bytes, and the elements that Qwen2-1.5B's
optimizer updates on each rank.

python tests/benchmarks/forecast_reference.py

Llama-7B on 8 ranks: batch 1, sequence 2048, checkpointing, bf16, DeepSpeed's own buckets, zero.Init at stage 3. The
reference is an independent prototype's run of the same engine; within 2 % is right. Qwen2-1.5B on 2 ranks: its
1,543,714,304 parameters are all updated by each rank under DDP, half of them under ZeRO-1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autods.api import PLAN
from autods.forecast.simulate import ProcessSimulator
from autods.forecast.values import EngineSpec
from autods.planner.rung_forecasts import make_group_engine
from autods.requests import PlanRequest

GEOMETRIES = Path(__file__).parents[2] / "examples" / "geometries"
GIB = 2**30
BAR = 0.02

# GiB of live tensors on the device, the largest of all phases.
LLAMA_GIB = {
    "ddp": 150.6, "zero1": 36.1, "zero2": 28.3, "zero2-offload": 25.1, "zero3": 18.2, "zero3-offload-param": 16.6,
    "zero3-offload": 4.6, "zero3-nvme": 4.8,
}  # fmt: skip
BASE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}  # DeepSpeed's own op: torch's AdamW needs other bytes
QWEN_ELEMENTS = {"ddp": 1_543_714_304, "zero1": 771_857_152}


def main() -> int:
    table = Table(title="the simulated engine beside what is known")
    for name in ("model", "rung", "known", "simulated", "difference"):
        table.add_column(name, justify="left" if name in ("model", "rung") else "right")
    worst = 0.0
    for rung, (peak, _) in simulated("llama-7b", gpus=8, rungs=tuple(LLAMA_GIB)).items():
        off = peak / GIB / LLAMA_GIB[rung] - 1
        worst = max(worst, abs(off))
        table.add_row("Llama-7B", rung, f"{LLAMA_GIB[rung]} GiB", f"{peak / GIB:.2f} GiB", f"{off:+.1%}")
    wrong = 0
    for rung, (_, elements) in simulated("qwen2-1.5b", gpus=2, rungs=tuple(QWEN_ELEMENTS)).items():
        wrong += elements != QWEN_ELEMENTS[rung]
        difference = f"{elements - QWEN_ELEMENTS[rung]:+,}"
        table.add_row("Qwen2-1.5B, elements", rung, f"{QWEN_ELEMENTS[rung]:,}", f"{elements:,}", difference)
    Console().print(table)
    return 0 if worst <= BAR and not wrong else 1


def simulated(model: str, *, gpus: int, rungs: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Rung → the peak of live bytes on the device, and the elements that the rank's optimizer updates."""
    request = PlanRequest(
        GEOMETRIES / model, gpus=gpus, gpu_memory="80GiB", nvme="2TiB", seq_len=2048, ladder=rungs, checkpointing="on",
        zero_init=True, as_written=True, base_config=BASE,
    )  # fmt: skip
    question = PLAN.resolve(request)
    group = question.sites
    found = {}
    with ProcessSimulator(question.source) as simulator:
        facts = simulator.facts()
        asks = [make_group_engine(rung, question.sites[0], question, facts, group) for rung in question.ladder]
        for ask in asks:
            if isinstance(ask, EngineSpec):
                (answer,) = simulator.simulate(ask, [1])
                peak = max(tiers.get("device", 0) for tiers in answer.live_bytes.values())
                found[ask.rung] = (peak, answer.optimizer_elements)
    return {rung: found[rung] for rung in rungs}


if __name__ == "__main__":
    sys.exit(main())
