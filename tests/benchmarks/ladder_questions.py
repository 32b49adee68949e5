"""Sixteen questions to the ladder: what the rungs and knobs since the first eight rungs are worth.

python tests/benchmarks/ladder_questions.py [--models t5-3b,llama-7b] [--gpus 1,8] [--json]

T5-3B (1,024 source and 128 target tokens) and Llama-7B (2,048 tokens) in fp16 on cards of 16, 24, 40 and 80 GiB, with
one rank and with eight: the fastest rung that fits by its forecast, each at its largest micro batch. "Before" is the
ladder of eight rungs, its allocator without expandable segments and its layers' inputs on the device; "after" is
today's. Some minutes a model. Exit code 1 where an answer of today's ladder is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import autods

GEOMETRIES = Path(__file__).parents[2] / "examples" / "geometries"
MODELS: dict[str, dict[str, Any]] = {
    "t5-3b": {"seq_len": 1024, "target_len": 128, "task": "seq2seq"},
    "llama-7b": {"seq_len": 2048},
}
MACHINES = "v100-16gb,rtx4090-24gb,a100-40gb,a100-80gb"
BEFORE = ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload-param", "zero3-offload", "zero3-nvme")
_SAME = 0.999  # a smaller ratio is slower


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The fastest rung that fits on a machine; "" and 0 where none does."""

    rung: str = ""
    micro_batch: int = 0
    tokens_per_second: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--gpus", default="1,8")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        for gpus in map(int, options.gpus.split(",")):
            with patch.dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"):
                before = ask(model, gpus, ladder=BEFORE, checkpointing="on")
            after = ask(model, gpus)
            for machine in before:
                row = {"model": model, "gpus": gpus, "machine": machine}
                rows.append({**row, "before": asdict(before[machine]), "after": asdict(after[machine])})
                if not options.json:
                    print(f"{model:9} {gpus} × {machine:13} {describe(before[machine], after[machine])}", flush=True)
    rates = [(row["before"]["tokens_per_second"], row["after"]["tokens_per_second"]) for row in rows]
    slower = sum(after < _SAME * before for before, after in rates)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        faster = sum(after * _SAME > before for before, after in rates)
        print(f"{faster} of {len(rows)} answers are faster, {slower} slower")
    return 1 if slower else 0


def ask(model: str, gpus: int, **options: Any) -> dict[str, Answer]:
    """The answer of each machine by a plan."""
    plan = autods.plan(
        GEOMETRIES / model, gpus=gpus, on=MACHINES, precision="fp16", nvme="1TiB", **MODELS[model], **options
    )
    answers = {}
    for site in plan.sites:
        best, answer = site.best, Answer()
        if best is not None and best.speed is not None:
            rate, size = best.speed.tokens_per_second, best.speed.micro_batch
            answer = Answer(rung=best.rung, micro_batch=size, tokens_per_second=rate or 0.0)
        answers[site.site.machine.name] = answer
    return answers


def describe(before: Answer, after: Answer) -> str:
    answers = (before, after)
    rates = [f"{one.rung or 'nothing fits'} ({one.micro_batch}) {one.tokens_per_second:,.0f}" for one in answers]
    times = after.tokens_per_second / before.tokens_per_second if before.tokens_per_second else None
    return f"{rates[0]:40} → {rates[1]:40} {'' if times is None else f'{times:.2f} times'}"


if __name__ == "__main__":
    sys.exit(main())
