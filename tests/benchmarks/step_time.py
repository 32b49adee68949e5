"""Forecast step time beside published rates, of 13 tables on H100, A100, A800 and V100 (step_time.toml).

python tests/benchmarks/step_time.py [--schedules FOLDER] [--tables H100] [--half judging] [--tune] [--json]
python tests/benchmarks/step_time.py --leave-one-out [--schedules FOLDER] [--json]

Each row is simulated by the real engine with the ZeRO stage and offload that it ran with; rows of FSDP's FULL_SHARD run
as ZeRO-3, which moves the same. Rows at even places of the H100 table (0, 2, …) chose the constants `TUNED` of
configs/forecast/step_time.toml, by --tune (random search for the least mean error, within `_BOUNDS`). In the other
tables even places showed which mechanisms were missing. Odd places judge, in each table.
The bar for a judging half: median error ≤ 12 %, worst ≤ 30 %, ≥ 95 % of the pairs in the right order. --schedules
keeps the simulated steps, so that they run once.
--leave-one-out judges each source with the constants `FITTED` chosen on all the others, by the mean over sources of the
mean error. It prints errors by source and by kind of row.
An error is forecast rate over published − 1.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import pickle
import random
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autods.config.catalogue import Machine, read_catalogue
from autods.forecast.predict.prices import Constants, PriceList, read_constants
from autods.forecast.predict.step_time import Schedule, StepTime, forecast_step
from autods.forecast.simulate.client import ProcessSimulator
from autods.forecast.values import EngineSpec
from autods.types import WorkloadSource

HERE = Path(__file__).parent
# Constants that the H100 table can tell apart; the others keep what their sources say.
TUNED = ("matmul_traffic",)
_BOUNDS = {"matmul_traffic": (1.0, 4.0)}
# What --leave-one-out chooses on the other sources, group by group, of all combinations of these values. The others
# come from data sheets and from kernels measured alone. The second group decides steps that the host bounds.
FITTED: tuple[Mapping[str, tuple[float, ...]], ...] = (
    {"matmul_traffic": (1.4, 1.9, 2.4)},
    {"opcode_ns": (25, 35, 50), "collective_us": (40, 150, 300), "view_us": (2, 4)},
)
_HOST_BOUND = 0.3  # share of a step that the host needs to issue it: with less, the second group changes nothing
_KINDS: Mapping[str, Callable[[Table, Row], bool]] = {
    "long samples (from 8192)": lambda table, row: row.length >= 8192,
    "several nodes": lambda table, row: row.gpus > table.ranks_per_node,
    "offload": lambda table, row: row.offload != "none",
    "small steps (to 2048 tokens)": lambda table, row: row.length * row.micro_batch <= 2048,
    "fp32": lambda table, row: row.dtype == "fp32",
    "the rest": lambda table, row: False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured step: what ran, and the published figure in the unit of its table."""

    model: str
    length: int
    gpus: int
    micro_batch: int
    accumulation: int
    checkpointing: bool
    stage: int
    dtype: str
    published: float
    offload: str = "none"
    pinned: bool = True
    steady: bool = True  # False for a mean that holds the first step: it is shown, and judges nothing
    origin: str = ""

    @property
    def name(self) -> str:
        moved = "" if self.offload == "none" else f" offload {self.offload}"
        recomputed = " ckpt" if self.checkpointing else ""
        batch = f"{self.micro_batch}×{self.accumulation}"
        return f"{self.model} {self.length} {self.gpus} GPU {batch} z{self.stage}{recomputed}{moved}"

    @property
    def simulated(self) -> int:
        """How many micro batches of a step are simulated."""
        return min(self.accumulation, 2 if self.offload == "none" else 3)

    def seconds(self, unit: str) -> float:
        """The published figure as seconds of a step."""
        samples = self.micro_batch * self.accumulation
        if unit == "s_per_step":
            return self.published
        if unit == "samples_per_s":
            return samples * self.gpus / self.published
        assert unit == "tokens_per_s_per_gpu", unit
        return samples * self.length / self.published


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A source of published figures: its rows, and the machine that they were measured on."""

    name: str
    machine: Machine
    ranks_per_node: int
    workload: str
    models: Mapping[str, Mapping[str, Any]]
    unit: str
    halves: tuple[str, str]
    rows: tuple[Row, ...]
    zero: Mapping[str, Any]
    efficiency: Mapping[str, float]

    def half(self, name: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows[self.halves.index(name) :: 2] if row.steady)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=Path)
    parser.add_argument("--tables", default="", help="only tables whose name has this")
    parser.add_argument("--half", default="", help="only this half of each table: tuned, shown or judging")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tables = [table for table in read_tables() if options.tables in table.name]
    constants = read_constants()
    if options.leave_one_out:
        judged = leave_one_out(tables, constants, options.schedules)
        print(json.dumps(judged)) if options.json else show_sources(judged)
        return 0
    if options.tune:
        constants = tune(next(table for table in tables if "tuned" in table.halves), constants, options.schedules)
    answers = []
    for table in tables:
        halves = [half for half in table.halves if options.half in half and table.half(half)]
        steps = {
            row: forecast(table, row, simulate(table, row, options.schedules), constants)
            for row in table.rows
            if (not row.steady and not options.half) or any(row in table.half(half) for half in halves)
        }
        scores = {half: score(table, table.half(half), steps) for half in halves}
        answers.append({"table": table.name, "rows": list_rows(table, steps), "scores": scores})
        if not options.json:
            show(table, steps, scores)
    if options.json:
        print(json.dumps(answers))
    return 0


def read_tables() -> list[Table]:
    """The tables of step_time.toml."""
    data = tomllib.loads((HERE / "step_time.toml").read_text())
    catalogue = read_catalogue()
    tables = []
    for table in data["table"]:
        machine = catalogue[table["machine"]]
        assert machine.links is not None
        machine = replace(machine, links=replace(machine.links, **table.get("links", {})), **table.get("node", {}))
        shared = {"origin": table["origin"], **table["config"]}
        rows = [Row(**{**shared, **dict(zip(table["columns"], row, strict=True))}) for row in table["rows"]]
        first, second = table["halves"]
        tables.append(
            Table(
                name=table["name"],
                machine=machine,
                ranks_per_node=table.get("ranks_per_node", 8),
                workload=table["workload"],
                models=data["model"][table["workload"]],
                unit=table["unit"],
                halves=(first, second),
                rows=tuple(rows),
                zero=table.get("zero", {}),
                efficiency=table.get("efficiency", {}),
            )
        )
    return tables


def show(table: Table, steps: Mapping[Row, StepTime], scores: Mapping[str, Mapping[str, float]]) -> None:
    print(f"\n{table.name}; seconds of a step")
    print(f"{'row':44} {'published':>9} {'forecast':>9} {'error':>7}  {'':8} bound, share of the step by cause")
    for row, step in steps.items():
        shares = "  ".join(f"{cause} {spent / step.seconds:.0%}" for cause, spent in step.spent.items())
        figures = f"{row.seconds(table.unit):9.3f} {step.seconds:9.3f} {find_error(table, row, step):+7.1%}"
        print(f"{row.name:44} {figures}  {find_half(table, row):8} {step.bound}: {shares}")
    for name, scored in scores.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.1%}" for key, value in scored.items()))


def list_rows(table: Table, steps: Mapping[Row, StepTime]) -> list[dict[str, Any]]:
    return [
        {
            "row": row.name,
            "half": find_half(table, row),
            "published_s": row.seconds(table.unit),
            "forecast_s": step.seconds,
            "bound": step.bound,
        }
        for row, step in steps.items()
    ]


def find_half(table: Table, row: Row) -> str:
    return table.halves[table.rows.index(row) % 2] if row.steady else "unsteady"


def simulate(table: Table, row: Row, folder: Path | None) -> Schedule:
    """The work of the row's step, from the folder if it is there."""
    capability = table.machine.capability
    flash = capability is None or capability >= (8, 0)
    row_key = {key: value for key, value in asdict(row).items() if key not in ("published", "steady", "origin")}
    key = repr((table.workload, table.models[row.model], row_key, dict(table.zero), table.ranks_per_node, flash))
    kept = None if folder is None else folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.pickle"
    if kept is not None and kept.exists():
        return pickle.loads(kept.read_bytes())  # type: ignore[no-any-return]
    sizes = {**table.models[row.model], "length": row.length}
    batch = {key: sizes[key] for key in ("length", "vocabulary", "masked") if key in sizes}
    source = WorkloadSource(
        kind="file",
        path=str(HERE / "workloads" / f"{table.workload}.py"),
        name=row.model,
        digest="",
        arguments={
            **{f"build_model.{key}": size for key, size in sizes.items()},
            **{f"build_batch.{key}": size for key, size in batch.items()},
        },
    )
    spec = EngineSpec(
        rung=f"zero{row.stage}",
        ds_config=make_config(table, row),
        world_size=row.gpus,
        ranks_per_node=table.ranks_per_node,
        device_bytes=table.machine.device_bytes,
        checkpointing=row.checkpointing,
        machine=table.machine,
    )
    with ProcessSimulator(source) as simulator:
        (simulation,) = simulator.simulate(spec, [row.micro_batch])
    assert simulation.schedule is not None
    print(f"{row.name}: simulated in {simulation.seconds:.0f} s", file=sys.stderr)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(simulation.schedule))
    return simulation.schedule


def make_config(table: Table, row: Row) -> dict[str, Any]:
    """The DeepSpeed config of the row; all that it and its table leave open is DeepSpeed's default."""
    place = {"device": "cpu", "pin_memory": row.pinned}
    zero: dict[str, Any] = {"stage": row.stage, **table.zero}
    if row.offload != "none":
        zero["offload_optimizer"] = place
    if row.offload == "all":
        zero["offload_param"] = place
    return {
        "train_micro_batch_size_per_gpu": row.micro_batch,
        "gradient_accumulation_steps": row.simulated,
        "gradient_clipping": 1.0,
        **({} if row.dtype == "fp32" else {row.dtype: {"enabled": True}}),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def forecast(table: Table, row: Row, schedule: Schedule, constants: Constants) -> StepTime:
    efficiency = replace(constants.efficiency, **table.efficiency)
    prices = PriceList(
        machine=table.machine, ranks_per_node=min(table.ranks_per_node, row.gpus), efficiency=efficiency,
        has_cudnn_attention=False,  # all tables are older than torch 2.11
    )  # fmt: skip
    return forecast_step(schedule, prices, constants, accumulation=row.accumulation)


def find_error(table: Table, row: Row, step: StepTime) -> float:
    """Forecast rate over published − 1."""
    return row.seconds(table.unit) / step.seconds - 1


def score(table: Table, rows: Sequence[Row], steps: Mapping[Row, StepTime]) -> dict[str, float]:
    """Errors of the rows, the share of them within the forecast's interval, and of the pairs in the right order.

    The order is that of tokens a GPU.
    """
    errors = [abs(find_error(table, row, steps[row])) for row in rows]

    def rate(row: Row, seconds: float) -> float:
        return row.micro_batch * row.accumulation * row.length / seconds

    pairs = [
        (rate(one, steps[one].seconds) > rate(other, steps[other].seconds))
        == (rate(one, one.seconds(table.unit)) > rate(other, other.seconds(table.unit)))
        for one, other in itertools.combinations(rows, 2)
    ]
    held = [steps[row].low_seconds <= row.seconds(table.unit) <= steps[row].high_seconds for row in rows]
    return {
        "median": statistics.median(errors),
        "worst": max(errors),
        "within the interval": statistics.fmean(held),
        "right order": statistics.fmean(pairs or [1.0]),
    }


def tune(table: Table, constants: Constants, folder: Path | None) -> Constants:
    """Choose the constants of `TUNED` by a random search on the tuned half, then print them."""
    draw = random.Random(0)
    schedules = {row: simulate(table, row, folder) for row in table.half("tuned")}

    def loss(candidate: Constants) -> float:
        errors = [
            find_error(table, row, forecast(table, row, schedule, candidate)) for row, schedule in schedules.items()
        ]
        return statistics.fmean(map(abs, errors))

    best, least = constants, loss(constants)
    for attempt in range(120):
        width = 0.3 * 0.97**attempt
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


def leave_one_out(tables: Sequence[Table], constants: Constants, folder: Path | None) -> list[dict[str, Any]]:
    """Judge each row of steady steps with constants that were chosen on the other sources."""
    rows = [(table, row, simulate(table, row, folder)) for table in tables for row in table.rows if row.steady]
    shipped = [forecast(table, row, schedule, constants) for table, row, schedule in rows]

    def log_errors(changes: Mapping[str, float], host_bound: bool) -> list[float]:
        candidate = change(constants, changes)
        steps = [
            known if host_bound and known.issued_seconds < _HOST_BOUND * known.seconds else forecast(*each, candidate)
            for each, known in zip(rows, shipped, strict=True)
        ]
        return [
            abs(math.log(step.seconds / row.seconds(table.unit)))
            for (table, row, _), step in zip(rows, steps, strict=True)
        ]

    groups = []
    for place, values in enumerate(FITTED):
        candidates = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
        groups.append([(changes, log_errors(changes, host_bound=place == 1)) for changes in candidates])
    judged = []
    for origin in dict.fromkeys(row.origin for _, row, _ in rows):
        others = [place for place, (_, row, _) in enumerate(rows) if row.origin != origin]
        weights = Counter(rows[place][1].origin for place in others)
        chosen: dict[str, float] = {}
        for group in groups:
            chosen |= min(group, key=lambda each: sum(each[1][i] / weights[rows[i][1].origin] for i in others))[0]
        for each, known in zip(rows, shipped, strict=True):
            table, row, _ = each
            if row.origin == origin:
                step, seconds = forecast(*each, change(constants, chosen)), row.seconds(table.unit)
                judged.append(
                    {
                        "source": origin,
                        "table": table.name,
                        "row": row.name,
                        "kinds": [kind for kind, has in _KINDS.items() if has(table, row)] or ["the rest"],
                        "error": seconds / step.seconds - 1,
                        "error as shipped": seconds / known.seconds - 1,
                        "within": step.low_seconds <= seconds <= step.high_seconds,
                        "chosen": chosen,
                    }
                )
    return judged


def change(constants: Constants, changes: Mapping[str, float]) -> Constants:
    return replace(constants, efficiency=replace(constants.efficiency, **changes))


def show_sources(judged: Sequence[Mapping[str, Any]]) -> None:
    """Print the errors by source, by kind and of all rows."""

    def line(name: str, rows: Sequence[Mapping[str, Any]]) -> float:
        errors, shipped = ([row[key] for row in rows] for key in ("error", "error as shipped"))
        median = statistics.median(map(abs, errors))
        print(
            f"{name:30} {len(rows):4} {median:7.1%} {max(map(abs, errors)):7.1%} {statistics.median(errors):+7.1%}"
            f" {statistics.fmean(row['within'] for row in rows):7.0%} {statistics.median(map(abs, shipped)):9.1%}"
        )
        return median

    print(f"{'':30} {'rows':>4} {'median':>7} {'worst':>7} {'signed':>7} {'within':>7} {'shipped':>9}")
    sources = dict.fromkeys(row["source"] for row in judged)
    medians = [line(source, [row for row in judged if row["source"] == source]) for source in sources]
    print()
    for kind in _KINDS:
        if rows := [row for row in judged if kind in row["kinds"]]:
            line(kind, rows)
    line("all rows", judged)
    print(f"{'median of the sources':30} {statistics.median(medians):12.1%}; worst source's median {max(medians):.1%}")


if __name__ == "__main__":
    sys.exit(main())
