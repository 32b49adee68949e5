"""The forecast's verdicts against real CPU ranks: which budgets does it call enough, and which are?

python tests/benchmarks/forecast_verdicts.py [--setups gpt,t5] [--verify 12] [--json]
    [--measured tests/benchmarks/results/forecast_verdicts.json] [--out FILE] [--nvme FOLDER]

Each rung × micro batch of a setup is trained for real once (two optimizer steps, gloo, no budget) by the runner that a
fit uses, and the fullest rank's peak is kept. The same config is forecast by the simulated engine. For each budget from
256 to 832 MiB in steps of 16 the truth is: measured peak ≤ budget. --verify trains some again under budgets 3 % below
and 3 % above their peak, where the kernel enforces the budget: they must run out and fit.

Right: fits where it fits, cannot_fit where it does not; tight is not right. A false cannot_fit is one where it fits.
The constants of CPU ranks were set on two models at micro batch 1: those rows are "seen", all others "new".
After: the verdicts for micro batches from 2 on, once the trials of the same setup at micro batch 1 were learned from;
before: the same cases without that. Setups without a trial at micro batch 1 are left out there.

--measured: peaks of earlier runs, so that only the forecast is made again. --nvme: zero3-nvme is trained too.
Setups that are not asked for stay in --out as they are, with trials and forecasts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from autods.config.deepspeed import start_settings
from autods.config.rungs import list_ladder, read_rungs
from autods.errors import AutodsError
from autods.forecast.predict.calibration import Observation, calibrate_forecast
from autods.forecast.predict.verdict import judge_memory, judge_tier
from autods.forecast.simulate import ProcessSimulator, SimulationFailed
from autods.forecast.values import EngineSpec, Simulation, TierForecast
from autods.types import Fit, Knobs, ModelFacts, Steps, Trial, WorkloadSource
from autods.units import parse_bytes
from autods.workload import make_source
from tests.support.composed import compose_config

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "forecast_verdicts.json"
MIB = 2**20
BUDGETS = tuple(range(256, 833, 16))  # MiB
FAR = 0.1  # of the peak: farther from it than this, 95 % have to be right
BESIDE = 0.03  # of the peak: where --verify tries
BAR = 0.95

BASE = {"bf16": {"enabled": True}, "steps_per_print": 10**9}

# A path from the root of the repository, or a Hugging Face config.
WORKLOADS: Mapping[str, str | Mapping[str, Any]] = {
    "gpt": "examples/gpt.py",
    "t5": {
        "model_type": "t5", "is_encoder_decoder": True, "num_layers": 4, "num_decoder_layers": 4,
        "d_model": 384, "d_ff": 1536, "d_kv": 64, "num_heads": 6, "vocab_size": 8000, "n_positions": 96,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 8, "hidden_size": 512,
        "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 8192, "max_position_embeddings": 128,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One workload on so many ranks. sized_for: the device by whose size a fit would choose the buckets.

    seen: micro batches on which the constants of CPU ranks were set. rungs: all that can run there if not given.
    """

    name: str
    workload: str
    world_size: int = 2
    micro_batches: tuple[int, ...] = (1, 8)
    accumulation: int = 1
    checkpointing: bool = True
    sized_for: str = "512MiB"
    rungs: tuple[str, ...] = ()
    seen: tuple[int, ...] = ()


SETUPS = (
    Setup(name="gpt", workload="gpt", micro_batches=(1, 2, 4, 8), seen=(1,)),
    Setup(name="gpt, large buckets", workload="gpt", sized_for="6GiB", micro_batches=(4,)),
    Setup(name="gpt, accumulation 2", workload="gpt", accumulation=2, micro_batches=(4,)),
    Setup(name="gpt, 1 rank", workload="gpt", world_size=1, micro_batches=(1, 4)),
    Setup(name="gpt, 3 ranks", workload="gpt", world_size=3, micro_batches=(2,)),
    Setup(name="t5", workload="t5"),
    Setup(name="t5, no checkpointing", workload="t5", checkpointing=False, micro_batches=(8,)),
    Setup(name="bert", workload="bert"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rung × micro batch of a setup. measured_bytes: None where no trial ran, `problem` says why."""

    setup: str
    rung: str
    micro_batch: int
    seen: bool
    measured_bytes: int | None = None
    problem: str | None = None
    before: TierForecast | None = None
    after: TierForecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What the verdicts of some rows are worth."""

    rows: int
    cases: int
    false_cannot_fit: int
    false_fits: int
    tight: int
    far: int
    right_far: int
    errors: tuple[float, ...] = field(default=(), repr=False)  # forecast over measured − 1, a row

    @property
    def right_share(self) -> float:
        return self.right_far / self.far if self.far else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", help="names, separated by semicolons; all if not given")
    parser.add_argument("--verify", type=int, default=12, help="rows that are trained again under budgets")
    parser.add_argument("--measured", type=Path, nargs="+", help="take the peaks of these results, run no trials")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--nvme", type=Path, help="a folder for zero3-nvme, which is left out without one")
    parser.add_argument("--json", action="store_true", help="print what is written to --out")
    options = parser.parse_args()
    wanted = options.setups.split(";") if options.setups else [setup.name for setup in SETUPS]
    setups = [setup for setup in SETUPS if setup.name in wanted]
    rows, verified = read(options.measured or [path for path in [options.out] if path.exists()])
    with tempfile.TemporaryDirectory() as scratch:
        if not options.measured:
            for new, under in train(setups, options.verify, Path(scratch), options.nvme):
                rows, verified = replace_setups(rows, verified, new, under)
                write(options.out, rows, verified)  # an hour of trials is not lost with what comes after them
        for setup in setups:
            with ProcessSimulator(source(setup.workload, Path(scratch)), processes=1) as simulator:
                rows = [*(row for row in rows if row.setup != setup.name), *forecast(setup, rows, simulator)]
    write(options.out, rows, verified)
    print(options.out.read_text() if options.json else table(rows, verified))
    return 0 if passes(rows) else 1


# ---- what is true


def train(
    setups: Sequence[Setup], verify: int, scratch: Path, nvme: Path | None
) -> Iterator[tuple[list[Row], list[dict[str, Any]]]]:
    """For each workload and number of ranks the measured rows, and what came of the trials under a budget."""
    for (workload, world_size), group in groupby(setups, key=lambda setup: (setup.workload, setup.world_size)):
        same = list(group)
        with runner_of(source(workload, scratch), world_size, scratch / f"{workload}-{world_size}", nvme) as runner:
            rows = [row for setup in same for row in measured(setup, runner)]
            ran = [row for row in rows if row.measured_bytes is not None]
            chosen = random.Random(0).sample(ran, min(len(ran), -(-verify * len(same) // len(setups))))
            yield rows, [said for row in chosen for said in under_budgets(row, by_name(row.setup), runner)]


@contextlib.contextmanager
def runner_of(workload: WorkloadSource, world_size: int, out: Path, nvme: Path | None) -> Iterator[Any]:
    """The runner of a fit, surveyed."""
    from autods.runner.runner import RayRunner
    from autods.system.host import read_hardware
    from tests.support.settings import fit_settings

    settings = fit_settings(
        workload, hardware=read_hardware(), gpus=world_size, device="cpu", gpu_memory="4GiB", base_config=BASE,
        nvme_path=nvme, out=out,
    )  # fmt: skip
    with RayRunner(settings, lambda event: None) as runner:
        runner.survey()
        yield runner


def measured(setup: Setup, runner: Any) -> Iterator[Row]:
    """Each rung × micro batch once, without a budget."""
    for rung in setup.rungs or rungs_of(setup, nvme=runner.settings.nvme_path is not None):
        for micro_batch in setup.micro_batches:
            row = Row(setup=setup.name, rung=rung, micro_batch=micro_batch, seen=micro_batch in setup.seen)
            outcome = tried(row, setup, runner, limit_bytes=None)
            if isinstance(outcome, Fit):
                row = replace(row, measured_bytes=outcome.device_peak_bytes)
            else:
                row = replace(row, problem=outcome.evidence)
            said = f"{row.measured_bytes / MIB:8.1f} MiB" if row.measured_bytes else row.problem
            print(f"{setup.name:22} {rung:20} {micro_batch:2} {said}", file=sys.stderr, flush=True)
            yield row


def under_budgets(row: Row, setup: Setup, runner: Any) -> Iterator[dict[str, Any]]:
    """The same trial just below and just above its peak."""
    assert row.measured_bytes is not None
    for share, fits in ((1 - BESIDE, False), (1 + BESIDE, True)):
        budget = int(row.measured_bytes * share)
        outcome = tried(row, setup, runner, limit_bytes=budget)
        yield {
            "setup": row.setup, "rung": row.rung, "micro_batch": row.micro_batch, "budget_bytes": budget,
            "expected": "fit" if fits else "out_of_memory", "outcome": outcome.kind,
        }  # fmt: skip


def tried(row: Row, setup: Setup, runner: Any, *, limit_bytes: int | None) -> Any:
    """The outcome of one trial of two optimizer steps."""
    if limit_bytes is not None:
        runner.settings = replace(runner.settings, device_bytes=limit_bytes)
    trial = Trial(
        rung=row.rung,
        knobs=knobs_of(setup, row.rung, row.micro_batch, runner.facts),
        purpose="walk",
        steps=Steps(warmup=1, timed=1),
        limited=limit_bytes is not None,
    )
    tried.count = getattr(tried, "count", 0) + 1  # type: ignore[attr-defined]
    return runner.run(trial, id=tried.count).outcome  # type: ignore[attr-defined]


# ---- what is forecast


def forecast(setup: Setup, rows: Iterable[Row], simulator: ProcessSimulator) -> list[Row]:
    """The setup's rows with their forecasts, before and after they learned from those at micro batch 1."""
    own = [replace(row, before=None, after=None) for row in rows if row.setup == setup.name]
    ran: dict[str, list[Row]] = {}
    for row in own:
        if row.measured_bytes is not None:
            ran.setdefault(row.rung, []).append(row)
    asks: dict[str, EngineSpec] = {}
    found: dict[tuple[str, int], Simulation] = {}
    facts = simulator.facts("cpu")
    for rung, of_rung in ran.items():
        ask = asks[rung] = ask_of(setup, rung, facts)
        try:
            for row, said in zip(of_rung, simulator.simulate(ask, [row.micro_batch for row in of_rung]), strict=True):
                found[rung, row.micro_batch] = said
        except SimulationFailed as failed:
            print(f"{setup.name}, {rung}: {failed}", file=sys.stderr)
    done = []
    for row in own:
        said = found.get((row.rung, row.micro_batch))
        done.append(row if said is None else replace(row, before=_device(asks[row.rung], said, ())))
    pairs = pairs_of(done)
    return [
        row
        if row.before is None
        else replace(row, after=_device(asks[row.rung], found[row.rung, row.micro_batch], pairs))
        for row in done
    ]


def pairs_of(rows: Iterable[Row]) -> tuple[Observation, ...]:
    """What the trials at micro batch 1 teach."""
    return tuple(
        Observation(rung=row.rung, predicted_bytes=row.before.peak_bytes, measured_bytes=row.measured_bytes)
        for row in rows
        if row.micro_batch == 1 and row.before is not None and row.measured_bytes is not None
    )


def _device(ask: EngineSpec, said: Simulation, pairs: Iterable[Observation]) -> TierForecast:
    return judge_memory(ask, said, limits={}, calibration=calibrate_forecast(ask, pairs)).memory["device"]


def ask_of(setup: Setup, rung: str, facts: ModelFacts) -> EngineSpec:
    """The engine of that rung."""
    config = compose_config(
        read_rungs()[rung], knobs_of(setup, rung, 1, facts), base=BASE, world_size=setup.world_size,
        own_optimizer=False, nvme_path=Path("/local_nvme"),
    )  # fmt: skip
    return EngineSpec(
        rung=rung, ds_config=config, world_size=setup.world_size, ranks_per_node=setup.world_size,
        device_bytes=parse_bytes(setup.sized_for), device="cpu", checkpointing=setup.checkpointing,
    )  # fmt: skip


def knobs_of(setup: Setup, rung: str, micro_batch: int, facts: ModelFacts) -> Knobs:
    """As a fit starts on a device of that size."""
    said = start_settings(read_rungs()[rung], base=BASE, device_bytes=parse_bytes(setup.sized_for), facts=facts)
    return Knobs(
        micro_batch=micro_batch, accumulation=setup.accumulation, checkpointing=setup.checkpointing, settings=said
    )


def rungs_of(setup: Setup, *, nvme: bool) -> tuple[str, ...]:
    """Those of the ladder that can run there."""
    rungs = read_rungs()
    return tuple(
        name
        for name in list_ladder(rungs)
        if rungs[name].needs["world_size"] <= setup.world_size and (nvme or not rungs[name].uses_nvme)
    )


def by_name(name: str) -> Setup:
    return next(setup for setup in SETUPS if setup.name == name)


def source(workload: str, scratch: Path) -> WorkloadSource:
    """The reference that ranks and simulator load."""
    said = WORKLOADS[workload]
    if isinstance(said, str):
        return make_source(ROOT / said)
    folder = scratch / workload
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said))
    return make_source(folder, seq_len=128)


# ---- what the verdicts are worth


def tally(
    rows: Iterable[Row], said: Callable[[Row], TierForecast | None], budgets_mib: Sequence[int] = BUDGETS
) -> Tally:
    """Of the rows that were measured and forecast, each at every budget."""
    counts = dict.fromkeys(("rows", "cases", "false_cannot_fit", "false_fits", "tight", "far", "right_far"), 0)
    errors = []
    for row in rows:
        held = said(row)
        if held is None or row.measured_bytes is None:
            continue
        counts["rows"] += 1
        errors.append(held.peak_bytes / row.measured_bytes - 1)
        for budget in (size * MIB for size in budgets_mib):
            verdict = judge_tier(replace(held, limit_bytes=budget))
            fits = row.measured_bytes <= budget
            counts["cases"] += 1
            counts["false_cannot_fit"] += fits and verdict == "cannot_fit"
            counts["false_fits"] += not fits and verdict == "fits"
            counts["tight"] += verdict == "tight"
            if abs(budget / row.measured_bytes - 1) > FAR:
                counts["far"] += 1
                counts["right_far"] += verdict == ("fits" if fits else "cannot_fit")
    return Tally(**counts, errors=tuple(errors))


def tallies(rows: Sequence[Row]) -> Iterator[tuple[str, Tally]]:
    """Of all, seen and new rows, each setup and rung, and of those from micro batch 2 on before and after learning."""
    yield "all", tally(rows, _before)
    for name, seen in (("seen by the constants", True), ("new to the constants", False)):
        yield name, tally([row for row in rows if row.seen is seen], _before)
    for kind in ("setup", "rung"):
        for name in dict.fromkeys(getattr(row, kind) for row in rows):
            yield f"{kind} {name}", tally([row for row in rows if getattr(row, kind) == name], _before)
    taught = {row.setup for row in rows if row.micro_batch == 1}
    later = [row for row in rows if row.micro_batch > 1 and row.setup in taught]
    yield "micro batch > 1, before", tally(later, _before)
    yield "micro batch > 1, after", tally(later, lambda row: row.after)


def _before(row: Row) -> TierForecast | None:
    return row.before


def passes(rows: Sequence[Row]) -> bool:
    """No false cannot_fit in at least 200 cases, and 95 % right far from the limit."""
    said = tally(rows, _before)
    return said.cases >= 200 and not said.false_cannot_fit and said.right_share >= BAR


def shown(said: Tally) -> dict[str, Any]:
    """For JSON."""
    errors = sorted(said.errors)
    return {
        **{name: value for name, value in asdict(said).items() if name != "errors"},
        "right_share": round(said.right_share, 4),
        "lowest_error": round(errors[0], 4) if errors else None,
        "highest_error": round(errors[-1], 4) if errors else None,
    }


def table(rows: Sequence[Row], verified: Sequence[Mapping[str, Any]]) -> str:
    """For people."""
    lines = [
        f"{'':30}{'rows':>5}{'cases':>7}{'false':>12}{'false':>7}{'tight':>7}{'right':>8}{'forecast':>16}",
        f"{'':30}{'':5}{'':7}{'cannot_fit':>12}{'fits':>7}{'':7}{'far':>8}{'over measured':>16}",
    ]
    for name, said in tallies(rows):
        if said.cases:
            span = f"{min(said.errors):+.1%} … {max(said.errors):+.1%}"
            lines.append(
                f"{name:30}{said.rows:5}{said.cases:7}{said.false_cannot_fit:12}{said.false_fits:7}"
                f"{said.tight / said.cases:7.1%}{said.right_share:8.1%}{span:>16}"
            )
    held = sum(case["expected"] == case["outcome"] for case in verified)
    lines.append(f"trained again under budgets {BESIDE:.0%} beside the peak: {held} of {len(verified)} as expected")
    missing = [row for row in rows if row.problem]
    lines += [f"no trial: {row.setup}, {row.rung}, {row.micro_batch}: {row.problem}" for row in missing]
    return "\n".join(lines)


def write(path: Path, rows: Sequence[Row], verified: Sequence[Mapping[str, Any]]) -> None:
    """The result as JSON."""
    said = {
        "versions": versions(),
        "tallies": {name: shown(each) for name, each in tallies(rows) if each.cases},
        "verified": list(verified),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(said, indent=1) + "\n")


def read(paths: Iterable[Path]) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows and the verified cases of these results."""
    known = [json.loads(path.read_text()) for path in paths]
    return [_read_row(row) for said in known for row in said["rows"]], [
        case for said in known for case in said["verified"]
    ]


def replace_setups(
    rows: Iterable[Row], verified: Iterable[dict[str, Any]], new: list[Row], under: list[dict[str, Any]]
) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows and cases with those of a training in place of what its setups had before."""
    trained = {row.setup for row in new}
    others = [row for row in rows if row.setup not in trained]
    return others + new, [case for case in verified if case["setup"] not in trained] + under


def versions() -> dict[str, str]:
    """Of what allocates."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "deepspeed", "transformers")}


def _read_row(said: Mapping[str, Any]) -> Row:
    forecasts = {name: said[name] and TierForecast(**said[name]) for name in ("before", "after")}
    return Row(**{**said, **forecasts})


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AutodsError as error:
        sys.exit(f"forecast_verdicts.py: {error}")
