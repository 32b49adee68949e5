"""Forecast step time beside published tokens a second: 18 rows of llm-foundry's benchmark page on H100 80 GB SXM.

python tests/benchmarks/step_time.py [--schedules FOLDER] [--rows 7b] [--tune] [--json]

The rows trained MPT models in bf16 under FSDP's FULL_SHARD, which moves what ZeRO-3 moves; here DeepSpeed's ZeRO-3 runs
on the simulated GPU. Rows with an even place in the table (0, 2, …) chose the constants `TUNED` of
configs/forecast/step_time.toml, by --tune (random search for the least mean error, within `_BOUNDS`); the others judge
them. The bar for the others: median error ≤ 12 %, worst ≤ 30 %, ≥ 95 % of the pairs in the right order. --schedules
keeps the simulated steps, so that they run once.
An error is forecast tokens/s over published − 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autods.config.catalogue import read_catalogue
from autods.forecast.prices import Constants, PriceList, read_constants
from autods.forecast.schedule import Schedule
from autods.forecast.simulator.client import Simulator
from autods.forecast.step_time import StepTime, forecast_step
from autods.forecast.values import EngineSpec
from autods.types import WorkloadSource

MACHINE = "h100-80gb"
MODELS = {  # width, layers, heads
    "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40),
    "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
# Constants that these rows can tell apart; the others keep what their sources say.
TUNED = ("matmul", "matmul_half_dim", "attention", "memory", "contention")
_BOUNDS = {
    "matmul": (0.5, 0.85), "matmul_half_dim": (16, 512), "attention": (0.2, 0.6), "memory": (0.6, 0.92),
    "contention": (0.05, 1.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table; `published` is in tokens a second and GPU."""

    model: str
    length: int
    gpus: int
    micro_batch: int
    accumulation: int
    checkpointing: bool
    published: float

    @property
    def name(self) -> str:
        return f"{self.model}-{self.length}-{self.gpus}-{self.micro_batch}"


ROWS = tuple(
    Row(*values)
    for values in (
        ("70b", 2048, 64, 8, 4, True, 1039),
        ("70b", 2048, 32, 2, 16, True, 882),
        ("30b", 8192, 8, 1, 21, True, 1384),
        ("30b", 2048, 32, 14, 3, True, 2308),
        ("30b", 2048, 8, 3, 21, True, 2002),
        ("13b", 16384, 8, 3, 3, True, 2985),
        ("13b", 4096, 8, 10, 3, True, 4717),
        ("13b", 2048, 64, 2, 1, False, 4800),
        ("13b", 2048, 8, 2, 1, False, 4792),
        ("7b", 32768, 8, 2, 2, True, 3318),
        ("7b", 8192, 8, 8, 2, True, 6935),
        ("7b", 2048, 8, 6, 1, False, 10643),
        ("7b", 1024, 8, 64, 2, True, 10203),
        ("3b", 8192, 8, 3, 6, False, 16578),
        ("3b", 2048, 64, 6, 3, False, 22525),
        ("1b", 4096, 8, 7, 4, False, 38535),
        ("1b", 2048, 8, 14, 1, False, 45455),
        ("760m", 2048, 8, 24, 2, False, 63147),
    )
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=Path)
    parser.add_argument("--rows", default="", help="only rows whose name begins so")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for row in ROWS if row.name.startswith(options.rows)]
    schedules = {row: simulate(row, options.schedules) for row in rows}
    constants = read_constants()
    if options.tune:
        constants = tune({row: schedules[row] for row in rows[::2]}, constants)
    steps = {row: forecast(row, schedules[row], constants) for row in rows}
    errors = {row: tokens_per_s(row, step) / row.published - 1 for row, step in steps.items()}
    tuned, judging = rows[::2], rows[1::2]
    scores = {name: score(part, steps) for name, part in (("tuned on", tuned), ("judging", judging)) if part}
    if options.json:
        listed = [
            {"row": row.name, "published": row.published, "forecast": tokens_per_s(row, step), "bound": step.bound}
            for row, step in steps.items()
        ]
        print(json.dumps({"rows": listed, "scores": scores}))
        return 0
    print(f"{'row':18} {'published':>10} {'forecast':>10} {'error':>7}  {'':8} bound, share of the step by cause")
    for row, step in steps.items():
        part = "tuned on" if row in tuned else "judging"
        shares = "  ".join(f"{cause} {spent / step.seconds:.0%}" for cause, spent in step.spent.items())
        figures = f"{row.published:10,.0f} {tokens_per_s(row, step):10,.0f} {errors[row]:+7.1%}"
        print(f"{row.name:18} {figures}  {part:8} {step.bound}: {shares}")
    for name, scored in scores.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.1%}" for key, value in scored.items()))
    return 0


def simulate(row: Row, folder: Path | None) -> Schedule:
    """The work of the row's step, from the folder if it is there."""
    kept = None if folder is None else folder / f"{row.name}.pickle"
    if kept is not None and kept.exists():
        return pickle.loads(kept.read_bytes())  # type: ignore[no-any-return]
    width, layers, heads = MODELS[row.model]
    sizes = {"width": width, "layers": layers, "heads": heads, "length": row.length}
    source = WorkloadSource(
        kind="file",
        path=str(Path(__file__).parent / "workloads" / "mpt.py"),
        name=row.model,
        digest="",
        arguments={**{f"build_model.{key}": size for key, size in sizes.items()}, "build_batch.length": row.length},
    )
    config = {
        "train_micro_batch_size_per_gpu": row.micro_batch,
        "gradient_accumulation_steps": simulated(row),
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
    spec = EngineSpec(
        rung="zero3",
        ds_config=config,
        world_size=row.gpus,
        ranks_per_node=8,
        device_bytes=read_catalogue()[MACHINE].device_bytes,
        checkpointing=row.checkpointing,
    )
    with Simulator(source) as simulator:
        (simulation,) = simulator.simulate(spec, [row.micro_batch])
    assert simulation.schedule is not None
    print(f"{row.name}: simulated in {simulation.seconds:.0f} s", file=sys.stderr)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(simulation.schedule))
    return simulation.schedule


def simulated(row: Row) -> int:
    """How many micro batches of a step are simulated."""
    return min(2, row.accumulation)


def forecast(row: Row, schedule: Schedule, constants: Constants) -> StepTime:
    prices = PriceList(machine=read_catalogue()[MACHINE], ranks_per_node=8, efficiency=constants.efficiency)
    return forecast_step(schedule, prices, constants, micro_batches=simulated(row), accumulation=row.accumulation)


def tokens_per_s(row: Row, step: StepTime) -> float:
    """Tokens a second and GPU."""
    return row.micro_batch * row.accumulation * row.length / step.seconds


def score(rows: Sequence[Row], steps: dict[Row, StepTime]) -> dict[str, float]:
    errors = [abs(tokens_per_s(row, steps[row]) / row.published - 1) for row in rows]
    pairs = [
        (tokens_per_s(one, steps[one]) > tokens_per_s(other, steps[other])) == (one.published > other.published)
        for one, other in itertools.combinations(rows, 2)
    ]
    return {"median": statistics.median(errors), "worst": max(errors), "right order": statistics.fmean(pairs or [1.0])}


def tune(schedules: dict[Row, Schedule], constants: Constants) -> Constants:
    """Choose the constants of `TUNED` by a random search, then print them."""
    draw = random.Random(0)

    def loss(candidate: Constants) -> float:
        errors = [
            tokens_per_s(row, forecast(row, schedule, candidate)) / row.published - 1
            for row, schedule in schedules.items()
        ]
        return statistics.fmean(map(abs, errors))

    best, least = constants, loss(constants)
    for attempt in range(300):
        width = 0.3 * 0.985**attempt
        changed: dict[str, Any] = {}
        for name in TUNED:
            low, high = _BOUNDS[name]
            value = getattr(best.efficiency, name) * (1 + draw.uniform(-width, width))
            changed[name] = min(high, max(low, value))
        candidate = replace(best, efficiency=replace(best.efficiency, **changed))
        if (error := loss(candidate)) < least:
            best, least = candidate, error
    print({name: round(getattr(best.efficiency, name), 3) for name in TUNED}, f"mean error {least:.1%}")
    return best


if __name__ == "__main__":
    sys.exit(main())
