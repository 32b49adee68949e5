"""Regret on real CPU ranks: how close to the best of the full grid does the search come, in how many trials?

python tests/benchmarks/regret_cpu.py grid gpt [--seconds 500] [--turns 2] [--again 2]
python tests/benchmarks/regret_cpu.py replay [gpt bert t5] [--seeds 10] [--trials 25] [--noise …] [--show SEED] [--json]
python tests/benchmarks/regret_cpu.py real gpt [--trials 25] [--turns 4] [--json]

grid: every rung × checkpointing × micro batch of a workload is trained for real under its budget, on 2 ranks, by the
runner that a fit uses, `--turns` times in another order each; the 12 that are fastest by then `--again` times more, so
that the best is known better than the rest. It ends after --seconds; the same command goes on. Each trial is a line of
results/regret_cpu_grid_<workload>.jsonl, with every step's time, the peak and the machine's load.

replay: the search of a fit with its own forecasts, for each seed; a trial is answered by a recorded one of its config,
drawn by the seed. A global batch makes the search offer just the micro batches of the grid. It neither tunes nor
certifies, since the grid has the settings that a fit starts with. An answer is worth the median of all recorded steps
of its config, over the grid's best by the same measure that leaves the headroom. A grid takes far longer than a search,
and others may use the machine meanwhile: --noise steady (the default) takes its slow drift out of the recordings, raw
leaves it in, and steps leaves only the noise of steps within a trial, as if trials were repeatable: what is missed
then is the search's fault alone.

real: one fit of the default config with so many trials; its answer and the grid's best are measured again in turn.

Passes when every answer reaches 97 % with 25 trials or fewer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from recorded import (
    Point,
    Recorded,
    RecordedRunner,
    Recording,
    Truth,
    header,
    line,
    point_of,
    points,
    read,
    repeatable,
    runnable,
    trial_of,
    truths,
    without_drift,
)

from autods.config.profiles import Budget
from autods.config.settings import Settings
from autods.errors import AutodsError
from autods.forecast.values import Engine, EngineSpec, Simulation, Simulator
from autods.journal import Journal, TrialStore
from autods.system.host import installed_versions, read_hardware
from autods.tuner.fit import fit, search
from autods.tuner.fit_report import FitResult
from autods.tuner.trial_forecasts import open_forecaster
from autods.tuner.trials import FitContext
from autods.types import Fit, ModelFacts, OutOfMemory, Record, Steps, Trial
from autods.units import format_bytes
from autods.workload import make_source
from tests.support.settings import fit_settings

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BAR, MOST_TRIALS = 0.97, 25
NEAREST = 12  # so many of the fastest are recorded again
RANKS = 2

NOISE: Mapping[str, Callable[[Recorded], Recorded]] = {
    "steady": without_drift,
    "raw": lambda recorded: recorded,
    "steps": lambda recorded: repeatable(without_drift(recorded)),
}

STEPS = Steps(warmup=1, timed=2, most_timed=10, spread=0.0, budget_s=1.5)
DUEL = Steps(warmup=2, timed=6, most_timed=16, spread=0.0, budget_s=4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, and on what: the device's memory of a rank, the samples of an optimizer step."""

    name: str
    gpu_memory: str
    global_batch: int
    about: str


WORKLOADS = {
    one.name: one
    for one in (
        Workload(name="gpt", gpu_memory="512MiB", global_batch=16, about="everything fits"),
        Workload(name="bert", gpu_memory="152MiB", global_batch=16, about="ddp does not fit"),
        Workload(name="t5", gpu_memory="124MiB", global_batch=16, about="memory limits the micro batch"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the search of one seed found. share: of the grid's best. best_tried: whether that was among its trials.

    tried: config by config, in order, and why each rung won or lost.
    """

    seed: int
    answer: str
    share: float
    fits: bool
    best_tried: bool
    trials: int
    out_of_memory: int
    tried: tuple[str, ...]


def main() -> int:
    options = _options()
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves ranks on a machine where others work
    if options.command == "grid":
        return record(WORKLOADS[options.workload], options)
    if options.command == "real":
        return real(WORKLOADS[options.workload], options)
    said = {name: replayed(WORKLOADS[name], options) for name in options.workloads or WORKLOADS}
    keep(f"replay_{options.noise}", said)
    print(json.dumps(said, indent=1) if options.json else table(said))
    return 0 if all(row["passed"] for row in said.values()) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    grid = commands.add_parser("grid", help="record the full grid of a workload")
    grid.add_argument("workload", choices=WORKLOADS)
    grid.add_argument("--seconds", type=float, default=500.0, help="begin no trial after so many")
    grid.add_argument("--fresh", action="store_true", help="forget what was recorded")
    grid.add_argument("--turns", type=int, default=2, help="trials of each config")
    grid.add_argument("--again", type=int, default=2, help=f"more of the {NEAREST} that are fastest by then")
    replay = commands.add_parser("replay", help="search the recorded grids")
    replay.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    replay.add_argument("--seeds", type=int, default=10)
    replay.add_argument("--trials", type=int, default=MOST_TRIALS)
    replay.add_argument("--show", type=int, help="print the trials of this seed")
    replay.add_argument("--no-forecast", action="store_true")
    replay.add_argument("--noise", choices=NOISE, default="steady", help="what is left in the recorded times")
    duel = commands.add_parser("real", help="one fit, and its answer beside the grid's best")
    duel.add_argument("workload", choices=WORKLOADS)
    duel.add_argument("--trials", type=int, default=MOST_TRIALS)
    duel.add_argument("--turns", type=int, default=4)
    for command in (replay, duel):
        command.add_argument("--json", action="store_true")
    return parser.parse_args()


def settings_of(workload: Workload, out: Path, *, seed: int = 0, trials: int | None = None) -> Settings:
    """The question, as `autods fit` with the default config asks it."""
    return fit_settings(
        make_source(HERE / "workloads" / f"regret_{workload.name}.py"), hardware=read_hardware(), gpus=RANKS,
        device="cpu", gpu_memory=workload.gpu_memory, global_batch=workload.global_batch, out=out,
        seed=seed, max_trials=trials,
    )  # fmt: skip


def usable(settings: Settings) -> float:
    """Of a device, with the headroom left."""
    return settings.device_bytes * (1 - settings.profile.memory.headroom)


def digest_of(settings: Settings) -> str:
    """Recordings answer one workload on one device; seeds and profiles may differ."""
    return f"{settings.source.digest[:16]} {settings.gpus} × {settings.device_bytes} {settings.global_batch}"


# ---- grid


def record(workload: Workload, options: argparse.Namespace) -> int:
    """Run what is not recorded yet."""
    from autods.runner.runner import RayRunner

    ends, path = time.monotonic() + options.seconds, grid_path(workload)
    if options.fresh:
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(workload, Path(folder))
        with RayRunner(settings, lambda event: None) as runner:
            facts, problems = runner.survey()
            known = _begun(path, settings, facts, problems)
            starts = runnable(settings, facts, problems)
            done = list(known.recordings)
            for turn in range(1, options.turns + options.again + 1):
                todo = wanted(turn, options.turns, settings, replace(known, recordings=tuple(done)))
                for number, point in enumerate(todo):
                    if time.monotonic() > ends:
                        print(f"{workload.name}, turn {turn}: {len(todo) - number} left; run it again")
                        return 0
                    one = recording(point, turn, runner.run, trial_of(point, starts, STEPS), len(done))
                    done.append(one)
                    with path.open("a") as file:
                        file.write(line(one))
                    print(shown(one), file=sys.stderr, flush=True)
    print(f"{workload.name}: {len(done)} recordings in {path}")
    return 0


def _begun(path: Path, settings: Settings, facts: ModelFacts, problems: Mapping[str, str]) -> Recorded:
    if not path.exists():
        here = {"versions": installed_versions(), "hardware": asdict(read_hardware())}
        more = {"device_bytes": settings.device_bytes, **here}
        path.write_text(header(digest_of(settings), facts, problems, **more))
    return checked(path, settings)


def checked(path: Path, settings: Settings) -> Recorded:
    """The recordings, if they answer this question."""
    if not path.exists():
        sys.exit(f"regret_cpu.py: nothing is recorded yet: run the sub-command grid first ({path})")
    known = read(path)
    if known.digest != digest_of(settings):
        sys.exit(f"regret_cpu.py: {path} was recorded of another workload or device\n  remove it to record again")
    return known


def wanted(turn: int, turns: int, settings: Settings, known: Recorded) -> list[Point]:
    """What this turn still has to run, in an order of its own, so that no config has the quiet hours to itself."""
    grid, looks = points(settings, known.facts, known.op_problems)
    if turn > turns:
        before = replace(known, recordings=tuple(one for one in known.recordings if one.turn < turn))
        true = truths(without_drift(before), grid, world_size=RANKS, usable_bytes=usable(settings)).values()
        fastest = sorted((one for one in true if one.fits), key=lambda one: one.rate, reverse=True)
        chosen = [one.point for one in fastest[:NEAREST]]
    else:
        chosen = [*grid, *looks]
    had = {one.point for one in known.recordings if one.turn == turn}
    random.Random(f"{settings.source.name} {turn}").shuffle(chosen)
    return [point for point in chosen if point not in had]


def recording(point: Point, turn: int, run: Any, trial: Trial, id: int) -> Recording:
    """One real trial."""
    at, load = datetime.now(UTC).isoformat(timespec="seconds"), os.getloadavg()[0]
    record: Record = run(trial, id=id)
    said = Recording(point=point, turn=turn, at=at, load=round(load, 2), seconds=round(record.seconds, 2))
    outcome = record.outcome
    if isinstance(outcome, Fit):
        return replace(said, step_s=outcome.step_s, peak_bytes=outcome.device_peak_bytes)
    return replace(said, failure=outcome)


def shown(one: Recording) -> str:
    """A line for who waits."""
    if one.failure is not None:
        return f"{one.turn} {one.point!s:52} {one.failure.kind}: {one.failure.evidence.splitlines()[0][:60]}"
    rate = RANKS * one.samples / median(one.step_s)
    return (
        f"{one.turn} {one.point!s:52} {rate:7.1f}/s {len(one.step_s):3} steps  {format_bytes(one.peak_bytes):>10}"
        f" {one.seconds:5.1f} s  load {one.load:.1f}"
    )


def best_of(true: Iterable[Truth]) -> Truth:
    """The fastest that leaves the headroom."""
    return max((one for one in true if one.fits), key=lambda one: one.rate)


def grid_path(workload: Workload) -> Path:
    return RESULTS / f"regret_cpu_grid_{workload.name}.jsonl"


# ---- replay


def replayed(workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """The search of every seed against the recorded grid."""
    from autods.forecast.simulate import ProcessSimulator as RealSimulator

    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(workload, Path(folder))
        recorded = checked(grid_path(workload), settings)
        recorded = NOISE[options.noise](recorded)
        grid, _ = points(settings, recorded.facts, recorded.op_problems)
        true = truths(recorded, grid, world_size=RANKS, usable_bytes=usable(settings))
        with RealSimulator(settings.source) as simulator:
            known = Remembered(simulator)
            answers = [
                searched(settings, seed, recorded, true, known, options) for seed in range(options.seeds)
            ]  # fmt: skip
    for one in answers:
        if one.seed == options.show:
            print(f"{workload.name}, seed {one.seed}:", *one.tried, sep="\n  ", file=sys.stderr)
    return summary(workload, true, recorded, answers, options.trials)


def searched(
    settings: Settings,
    seed: int,
    recorded: Recorded,
    true: Mapping[Point, Truth],
    simulator: Remembered,
    options: argparse.Namespace,
) -> Answer:
    """One search, in a folder of its own."""
    profile = settings.profile
    profile = replace(
        profile,
        tune=replace(profile.tune, trials=0),
        certify=replace(profile.certify, most_trials=0),
    )
    settings = replace(
        settings, profile=profile, seed=seed, budget=Budget(trials=options.trials), forecast=not options.no_forecast
    )  # fmt: skip
    runner = RecordedRunner(settings, recorded, seed)
    with tempfile.TemporaryDirectory() as out:
        journal = Journal(Path(out) / "journal.jsonl")
        past = journal.open(fingerprint=settings.fingerprint())
        memory = TrialStore(journal, past, runner.run, lambda event: None)
        start = lambda source: contextlib.nullcontext(simulator)  # noqa: E731
        facts, op_problems = runner.survey()
        with open_forecaster(settings, facts, memory, lambda event: None, start=start) as forecaster:
            context = FitContext(
                settings=settings, facts=facts, op_problems=op_problems, memory=memory, forecaster=forecaster,
                study=Path(out) / "study.jsonl", final_config=runner.final_config,
            )  # fmt: skip
            found = search(context)
    records = memory.records
    best = best_of(true.values())
    said: dict[str, Any] = {
        "seed": seed,
        "best_tried": best.point in {point_of(record.trial) for record in records},
        "trials": len(records),
        "out_of_memory": sum(isinstance(record.outcome, OutOfMemory) for record in records),
    }
    if not isinstance(found, FitResult):
        return Answer(answer="nothing fits", share=0.0, fits=False, tried=told(records, {}), **said)
    point = point_of(found.best.trial)
    share = true[point].rate / best.rate
    return Answer(
        answer=str(point), share=round(share, 4), fits=true[point].fits, tried=told(records, found.raced.reasons),
        **said,
    )  # fmt: skip


def told(records: Sequence[Record], reasons: Mapping[str, str]) -> tuple[str, ...]:
    """The trials and the reasons, for who wants to know why."""
    lines = []
    for record in records:
        trial, outcome = record.trial, record.outcome
        knobs = trial.knobs
        what = f"{trial.purpose:7}{trial.rung:20}{knobs.micro_batch:3} × {knobs.accumulation:<3}"
        what += "recomputes " if knobs.checkpointing else "keeps      "
        if isinstance(outcome, Fit):
            peak = format_bytes(outcome.device_peak_bytes)
            lines.append(f"{what}{outcome.samples_per_second:8.1f}/s ±{outcome.spread:.0%} {peak}")
        else:
            lines.append(f"{what}{outcome.kind}")
    return (*lines, *(f"{name}: {why}" for name, why in reasons.items()))


class Remembered:
    """A simulator whose answers are kept from seed to seed: they are the same."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.known: dict[tuple[str, int], Simulation] = {}

    def facts(self, device: str = "cuda", *, ranks: int = 1) -> ModelFacts:
        return self.simulator.facts(device)

    @contextlib.contextmanager
    def engine(self, ask: EngineSpec) -> Iterator[Engine]:
        """An engine that begins to exist with the first question that is new."""
        with contextlib.ExitStack() as stack:
            yield _RememberedEngine(self, ask, stack)

    def simulate(self, ask: EngineSpec, micro_batches: Sequence[int]) -> tuple[Simulation, ...]:
        with self.engine(ask) as engine:
            return tuple(engine.measure(micro_batch) for micro_batch in micro_batches)


@dataclass(slots=True)
class _RememberedEngine:
    simulator: Remembered
    ask: EngineSpec
    stack: contextlib.ExitStack
    real: Engine | None = None

    def measure(self, micro_batch: int) -> Simulation:
        key = (json.dumps(asdict(self.ask), sort_keys=True), micro_batch)
        if key not in self.simulator.known:
            self.real = self.real or self.stack.enter_context(self.simulator.simulator.engine(self.ask))
            self.simulator.known[key] = self.real.measure(micro_batch)
        return self.simulator.known[key]


def summary(
    workload: Workload, true: Mapping[Point, Truth], recorded: Recorded, answers: Sequence[Answer], trials: int
) -> dict[str, Any]:
    """What is said of a workload. near: configs that are within 3 % of the best, which is among them."""
    best = best_of(true.values())
    fitting = [one for one in true.values() if one.fits]
    shares = [one.share for one in answers]
    near = sorted((one for one in fitting if one.rate >= BAR * best.rate), key=lambda one: -one.rate)
    counts = Counter(one.point for one in recorded.recordings)
    return {
        "about": f"{workload.about} ({workload.gpu_memory} a rank, global batch {workload.global_batch})",
        "grid": len(true),
        "fit": len(fitting),
        "recordings": sum(counts[point] for point in true),
        "spread": round(median(one.spread for one in fitting), 3),
        "load": round(median(one.load for one in recorded.recordings), 1),
        "best": {"config": str(best.point), "samples_per_second": round(best.rate, 1)},
        "best_recordings": counts[best.point],
        "near": [f"{one.point}: {one.rate / best.rate:.3f} of the best" for one in near],
        "share_min": min(shares),
        "share_median": median(shares),
        "reached": sum(one.share >= BAR and one.fits for one in answers),
        "seeds": len(answers),
        "trials_max": max(one.trials for one in answers),
        "out_of_memory_share": round(
            sum(one.out_of_memory for one in answers) / sum(one.trials for one in answers), 3
        ),
        "passed": all(one.share >= BAR and one.fits and one.trials <= MOST_TRIALS for one in answers),
        "answers": [asdict(one) for one in answers],
    }  # fmt: skip


def table(said: Mapping[str, Mapping[str, Any]]) -> str:
    """For people."""
    lines = [
        f"{'':6}{'grid':>5}{'fit':>5}{'within':>8}{'spread of':>11}  {'best':44}{'share of the best':>19}{'≥ 97%':>8}"
        f"{'trials':>8}{'out of':>8}",
        f"{'':6}{'':5}{'':5}{'3%':>8}{'a config':>11}  {'':44}{'min':>10}{'median':>9}{'':8}{'max':>8}{'memory':>8}",
    ]
    for name, row in said.items():
        best = f"{row['best']['config']}, {row['best']['samples_per_second']:.0f}/s"
        lines.append(
            f"{name:6}{row['grid']:5}{row['fit']:5}{len(row['near']):8}{row['spread']:11.0%}  {best:44}"
            f"{row['share_min']:10.1%}{row['share_median']:9.1%}{row['reached']:5}/{row['seeds']}{row['trials_max']:8}"
            f"{row['out_of_memory_share']:8.1%}"
        )
    for name, row in said.items():
        lines += [
            f"{name}, seed {one['seed']}: {one['answer']} has {one['share']:.1%} of the best"
            + ("" if one["fits"] else " and does not leave the headroom")
            + ("; the best was tried" if one["best_tried"] else "; the best was never tried")
            for one in row["answers"]
            if one["share"] < BAR or not one["fits"]
        ]
    return "\n".join(lines)


# ---- real


def real(workload: Workload, options: argparse.Namespace) -> int:
    """A fit as a user runs it, then its answer and the grid's best in turn."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(workload, Path(folder), trials=options.trials)
        recorded = without_drift(checked(grid_path(workload), settings))
        grid, _ = points(settings, recorded.facts, recorded.op_problems)
        best = best_of(truths(recorded, grid, world_size=RANKS, usable_bytes=usable(settings)).values())
        report = fit(settings, listen=lambda event: None)
        if report.rung is None or report.knobs is None:
            sys.exit(f"regret_cpu.py: nothing fits, says the fit of {workload.name}")
        answer = Trial(rung=report.rung, knobs=report.knobs, purpose="verify", steps=DUEL)
        start = trial_of(best.point, runnable(settings, recorded.facts, recorded.op_problems), DUEL)
        rates = duel(settings, (answer, start), options.turns)
    share, took = median(rates[0]) / median(rates[1]), Counter(record.trial.purpose for record in report.trials)
    said = {
        "answer": {"rung": report.rung, "knobs": asdict(report.knobs)},
        "best": str(best.point),
        "share": round(share, 4),
        "answer_rates": rates[0],
        "best_rates": rates[1],
        "trials": len(report.trials),
        "by_purpose": dict(took),
        "out_of_memory": sum(isinstance(record.outcome, OutOfMemory) for record in report.trials),
        "seconds": round(report.seconds, 1),
        "load": round(os.getloadavg()[0], 1),
        "tried": told(report.trials, report.reasons),
    }
    keep("real", {workload.name: said})
    if options.json:
        print(json.dumps(said, indent=1))
    else:
        print(
            f"{workload.name}: {report.rung} {report.knobs.micro_batch}×{report.knobs.accumulation}"
            f"{'' if report.knobs.checkpointing else ' without checkpointing'} has {share:.1%} of {best.point},"
            f" measured in {options.turns} turns; {len(report.trials)} trials ({dict(took)}), {report.seconds:.0f} s"
        )
    return 0 if share >= BAR else 1


def duel(settings: Settings, trials: Sequence[Trial], turns: int) -> list[list[float]]:
    """Samples a second of each, measured in turn: A B A B …; 0 where it did not fit."""
    from autods.runner.runner import RayRunner

    rates: list[list[float]] = [[] for _ in trials]
    with RayRunner(replace(settings, out=settings.out / "duel"), lambda event: None) as runner:
        runner.survey()
        for turn in range(turns):
            for place, trial in enumerate(trials):
                outcome = runner.run(trial, id=turn * len(trials) + place).outcome
                rates[place].append(round(outcome.samples_per_second, 2) if isinstance(outcome, Fit) else 0.0)
    return rates


def keep(name: str, said: Mapping[str, Any]) -> None:
    """Into the result file, beside what other commands found, without each seed's trials."""
    said = {workload: {key: row[key] for key in row if key != "answers"} for workload, row in said.items()}
    path = RESULTS / "regret_cpu.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    kept = {**known, "versions": installed_versions(), name: {**known.get(name, {}), **said}}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AutodsError as error:
        sys.exit(f"regret_cpu.py: {error}")
