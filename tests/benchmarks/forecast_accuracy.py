"""How far off is the peak that a tool says before training? autods beside DeepSpeed's estimators, accelerate and torch.

pip install --group bench -c constraints.txt
python tests/benchmarks/forecast_accuracy.py [--models gpt2,llama] [--rungs zero3] [--micro-batches 1,8] [--json]
    [--trials tests/benchmarks/results/forecast_verdicts.json] [--out FILE] [--check]
    [--engine tests/benchmarks/results/forecast_accuracy.json]

Two truths. engine: DeepSpeed's real engine as rank 0 of 8 on real CPU tensors (fake process group), small models of
five architectures, bf16, AdamW; the peak of live bytes over init and two steps, all tiers together. They are counted by
a few lines that share nothing with the forecast; --check counts them a second time with torch's MemTracker.
trial: peaks of real CPU ranks that forecast_verdicts.py measured, processes and malloc included. --engine: cases of an
earlier result, so that only the trials' are made again.

An error is said / true − 1. Too low: below the truth by more than 5 %, which sends a user into an out of memory.

What each tool says, and what it does not count:
- autods: against the engine the simulated engine's live bytes, against trials the forecast's middle. It runs the same
  code of DeepSpeed on fake tensors: what it can get wrong against the engine is what an operator allocates and keeps.
  The simulated GPU is compared in forecast_golden.py.
- deepspeed: estimate_zero2_model_states_mem_needs and estimate_zero3_…, the variant of the rung, zero_init=False as in
  the run; device + host / ranks where the rung offloads (elsewhere the host's part is the loading of the model). The
  host's part holds a safety factor of 1.5; "no factor" is the same with 1. Not counted: activations, logits, buckets,
  the flat copies of init and step, gathered parameters other than the largest layer. It has nothing for ddp, zero1 and
  NVMe, and takes parameters that are offloaded without the optimizer as not offloaded.
- accelerate estimate-memory: estimate_training_usage over calculate_maximum_sizes, its largest part as the command
  prints it; float32 is the rule of 4 × the model, bfloat16 its mixed precision. Not counted: activations, the batch,
  ZeRO, offloading, buckets; one number for every rung.
- torch MemTracker: torch.distributed._tools.mem_tracker around a plain loop of two steps: bf16 autocast over fp32
  parameters, AdamW. It counts activations exactly. Not counted: DeepSpeed, so neither shards nor buckets nor
  offloading; one number for every rung. Around DeepSpeed's engine it measures (--check), for which there must be the
  memory that was to be forecast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from autods.config.rungs import read_rungs

RESULTS = Path(__file__).parent / "results"
INSTALL = "pip install --group bench -c constraints.txt"
TOO_LOW = -0.05
WORLD = 8
ARCHITECTURES = ("gpt2", "llama", "t5", "bert", "opt")
RUNGS = tuple(sorted(read_rungs(), key=lambda name: read_rungs()[name].order))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine. said_bytes: tool → bytes; a tool that has nothing for the rung is missing."""

    truth: str  # "engine" or "trial"
    model: str
    rung: str
    world_size: int
    micro_batch: int
    checkpointing: bool
    true_bytes: int
    said_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors are said / true − 1; the median and the 95th percentile are of their absolute values."""

    cases: int
    median: float
    p95: float
    worst: float
    too_low: float  # share of the cases

    @classmethod
    def of(cls, errors: Sequence[float]) -> Score:
        sizes = sorted(abs(error) for error in errors)
        return cls(
            cases=len(errors),
            median=quantile(sizes, 0.5),
            p95=quantile(sizes, 0.95),
            worst=max(errors, key=abs),
            too_low=sum(error < TOO_LOW for error in errors) / len(errors),
        )


@dataclass(slots=True)
class Subject:
    """A model with its batches, and what the tools said of it so far."""

    name: str
    model: Callable[[], Any]
    batch: Callable[[int], Any]
    known: dict[Any, Any] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(ARCHITECTURES))
    parser.add_argument("--rungs", default=",".join(RUNGS))
    parser.add_argument("--micro-batches", default="1,8")
    parser.add_argument("--checkpointing", default="off,on")
    parser.add_argument("--trials", type=Path, default=RESULTS / "forecast_verdicts.json")
    parser.add_argument("--engine", type=Path, help="take the engine's cases of this result instead of running them")
    parser.add_argument("--check", action="store_true", help="count the engine's bytes with MemTracker, too")
    parser.add_argument("--out", type=Path, default=RESULTS / "forecast_accuracy.json")
    parser.add_argument("--json", action="store_true", help="print what is written to --out")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    need_peers()
    cases = []
    for case in chain(again(options.engine) if options.engine else of_the_engine(options), of_trials(options.trials)):
        cases.append(case)
        print(line_of(case), file=sys.stderr, flush=True)
    scores = {truth: scored([case for case in cases if case.truth == truth]) for truth in ("engine", "trial")}
    said = {
        "versions": versions(),
        "scores": {
            truth: [{"tool": tool, "rung": rung, **asdict(score)} for (tool, rung), score in found.items()]
            for truth, found in scores.items()
        },
        "cases": [asdict(case) for case in cases],
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(said, indent=1) + "\n")
    print(json.dumps(said) if options.json else "\n\n".join(table(truth, found) for truth, found in scores.items()))
    return 0


# ---- the cases


def of_the_engine(options: argparse.Namespace) -> Iterator[Case]:
    """What the real engine allocates, beside what the tools say."""
    from autods.forecast.simulate import ProcessSimulator, SimulationFailed
    from autods.forecast.values import EngineSpec
    from autods.rank.preload import preload
    from autods.workload import make_source
    from tests.support import golden_cases as golden

    preload()
    sizes = [int(size) for size in options.micro_batches.split(",")]
    for architecture in options.models.split(","):
        subject = Subject(
            name=architecture,
            model=lambda architecture=architecture: golden.model(architecture, plain=False),  # type: ignore[misc]
            batch=golden.batch,
        )
        with tempfile.TemporaryDirectory() as folder:
            source = make_source(golden.workload_file(architecture, Path(folder), plain=False))
            with ProcessSimulator(source, processes=1) as simulator:
                for rung, checkpointing in product(options.rungs.split(","), options.checkpointing.split(",")):
                    ask = EngineSpec(
                        rung=rung, ds_config=golden.config_of(rung, accumulation=1), world_size=WORLD,
                        ranks_per_node=WORLD, device_bytes=16 << 30, device="cpu", checkpointing=checkpointing == "on",
                    )  # fmt: skip
                    try:
                        found = simulator.simulate(ask, sizes)
                    except SimulationFailed as failed:
                        print(f"{architecture}, {rung}: {failed}", file=sys.stderr)
                        found = ()
                    for micro_batch, simulated in zip(sizes, found, strict=False):
                        yield engine_case(golden, subject, ask, micro_batch, simulated, check=options.check)


def again(path: Path) -> Iterator[Case]:
    """The engine's cases of an earlier result."""
    said = json.loads(path.read_text())["cases"]
    return (Case(**case) for case in said if case["truth"] == "engine")


def engine_case(golden: Any, subject: Subject, ask: Any, micro_batch: int, simulated: Any, *, check: bool) -> Case:
    def truth() -> int:
        said = golden.allocate_on_cpu(
            subject.name, ask.ds_config, checkpointing=ask.checkpointing, plain=False, micro_batch=micro_batch
        )
        return max(said.values())

    said = {"autods": max(simulated.summed_peak_bytes.values())}
    said |= peers(subject, ask.rung, WORLD, micro_batch, ask.checkpointing)
    if check:
        with counted_by_mem_tracker(golden):
            said["MemTracker around the engine"] = truth()
    return Case(
        truth="engine", model=subject.name, rung=ask.rung, world_size=WORLD, micro_batch=micro_batch,
        checkpointing=ask.checkpointing, true_bytes=truth(), said_bytes=said,
    )  # fmt: skip


def of_trials(path: Path) -> Iterator[Case]:
    """What forecast_verdicts.py measured of real CPU ranks, beside what the tools say."""
    if not path.exists():
        print(f"no trials: {path.name} is not there; forecast_verdicts.py writes it", file=sys.stderr)
        return
    import forecast_verdicts as verdicts

    from autods.workload import load

    setups = {setup.name: setup for setup in verdicts.SETUPS}
    subjects: dict[str, Subject] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in json.loads(path.read_text())["rows"]:
            setup = setups[row["setup"]]
            if row["measured_bytes"] is None or row["before"] is None or setup.accumulation > 1:
                continue
            if setup.workload not in subjects:
                workload = load(verdicts.source(setup.workload, Path(folder)))
                subjects[setup.workload] = Subject(
                    name=setup.workload, model=workload.build_model, batch=workload.build_batch
                )
            rung, micro_batch = row["rung"], row["micro_batch"]
            said = {"autods": int(row["before"]["peak_bytes"])}
            said |= peers(subjects[setup.workload], rung, setup.world_size, micro_batch, setup.checkpointing)
            yield Case(
                truth="trial", model=setup.workload, rung=rung, world_size=setup.world_size, micro_batch=micro_batch,
                checkpointing=setup.checkpointing, true_bytes=row["measured_bytes"], said_bytes=said,
            )  # fmt: skip


# ---- the tools


def need_peers() -> None:
    """Ends with the way to install them."""
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        sys.exit(f"forecast_accuracy.py: {error}: {INSTALL}")


def peers(subject: Subject, rung: str, world_size: int, micro_batch: int, checkpointing: bool) -> dict[str, int]:
    """What the others say."""
    said = {}
    for name, factor in (("deepspeed estimators", 1.5), ("deepspeed, no factor", 1.0)):
        size = deepspeed_says(subject, rung, world_size, factor)
        if size is not None:
            said[name] = size
    for precision in ("float32", "bfloat16"):
        said[f"accelerate {precision}"] = accelerate_says(subject, precision)
    key = ("MemTracker", micro_batch, checkpointing)
    if key not in subject.known:
        subject.known[key] = mem_tracker_says(subject, micro_batch, checkpointing)
    return said | {"torch MemTracker": subject.known[key]}


def deepspeed_says(subject: Subject, rung: str, world_size: int, factor: float) -> int | None:
    """Bytes of a rank on both tiers; None: it has no estimator for that rung. All ranks on one node."""
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    variant = deepspeed_variant(rung)
    if variant is None:
        return None
    if "elements" not in subject.known:
        subject.known["elements"] = stage3.model_to_params(subject.model())
    total, largest = subject.known["elements"]
    common = {"num_gpus_per_node": world_size, "num_nodes": 1, "additional_buffer_factor": factor}
    if read_rungs()[rung].stage == 2:
        host, device = zero2(total, **common, **variant)
    else:
        host, device, _ = stage3.estimate_zero3_model_states_mem_needs(
            total, largest, **common, **variant, zero_init=False
        )
    return int(device + (host / world_size if variant["cpu_offload"] else 0))


def deepspeed_variant(rung: str) -> dict[str, bool] | None:
    """The estimator's switches for a rung."""
    said = read_rungs()[rung]
    if said.stage < 2 or said.uses_nvme:
        return None
    offload = said.places["optimizer"] == "host"
    if said.stage == 2:
        return {"cpu_offload": offload}
    return {"cpu_offload": offload, "cpu_offload_params": offload and said.places["parameters"] == "host"}


def accelerate_says(subject: Subject, precision: str) -> int:
    """As `accelerate estimate-memory` prints it for training with Adam."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    if "size" not in subject.known:
        import torch

        with torch.device("meta"):
            subject.known["size"] = calculate_maximum_sizes(subject.model())[0]
    return int(max(estimate_training_usage(subject.known["size"], precision).values()))


def mem_tracker_says(subject: Subject, micro_batch: int, checkpointing: bool) -> int:
    """Its peak over two steps of a plain loop on fake CPU tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    made = subject.batch(micro_batch)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = subject.model()
        if checkpointing:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()
        optimizer = torch.optim.AdamW(model.parameters())
        batch = {name: mode.from_tensor(tensor) for name, tensor in made.items()}
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        with tracker:
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
                tracker.reset_mod_stats()  # of modules, which it cannot follow over two calls; the peak stays
    return peak_of(tracker)


def peak_of(tracker: Any) -> int:
    """Bytes on the CPU."""
    return max((kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values()), default=0)


@contextlib.contextmanager
def counted_by_mem_tracker(golden: Any) -> Iterator[None]:
    """`golden.allocate_on_cpu` with torch's meter in place of its own."""
    from torch.distributed._tools.mem_tracker import MemTracker

    @contextlib.contextmanager
    def counted() -> Iterator[tuple[Callable[[str], None], dict[str, int]]]:
        peaks = dict.fromkeys(("build", "init", "forward", "backward", "step"), 0)
        tracker = MemTracker()

        def phase(name: str) -> None:
            peaks["step"] = peak_of(tracker)
            if name == "forward":
                tracker.reset_mod_stats()

        with tracker:
            yield phase, peaks

    own, golden.count_bytes = golden.count_bytes, counted
    try:
        yield
    finally:
        golden.count_bytes = own


# ---- the table


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that is not below that share of them."""
    return ordered[max(0, -(-len(ordered) * share // 1).__int__() - 1)]


def scored(cases: Iterable[Case]) -> dict[tuple[str, str], Score]:
    """(tool, rung) → score; rung "all" for all of them."""
    errors: dict[tuple[str, str], list[float]] = {}
    for case in cases:
        for tool, said in case.said_bytes.items():
            for rung in ("all", case.rung):
                errors.setdefault((tool, rung), []).append(said / case.true_bytes - 1)
    return {key: Score.of(found) for key, found in errors.items()}


def table(truth: str, scores: Mapping[tuple[str, str], Score]) -> str:
    """For people: all rungs, then each tool's median and worst by rung."""
    if not scores:
        return f"{truth}: no cases"
    tools = list(dict.fromkeys(tool for tool, _ in scores))
    lines = [f"truth: {truth:22}{'cases':>6}{'median':>9}{'p95':>9}{'worst':>10}{'too low':>9}"]
    for tool in tools:
        score = scores[tool, "all"]
        lines.append(
            f"{tool:29}{score.cases:6}{score.median:9.2%}{score.p95:9.1%}{score.worst:+10.1%}{score.too_low:9.0%}"
        )
    rungs = [rung for rung in RUNGS if any((tool, rung) in scores for tool in tools)]
    lines += ["", f"{'median / worst':21}" + "".join(f"{rung.replace('offload', 'off'):>17}" for rung in rungs)]
    for tool in tools:
        cells = [scores.get((tool, rung)) for rung in rungs]
        shown = ["–" if cell is None else f"{cell.median:.1%} {cell.worst:+.0%}" for cell in cells]
        lines.append(f"{tool:21}" + "".join(f"{text:>17}" for text in shown))
    return "\n".join(lines)


def line_of(case: Case) -> str:
    """One case as it comes."""
    errors = "  ".join(f"{tool} {said / case.true_bytes - 1:+.1%}" for tool, said in case.said_bytes.items())
    switch = "on" if case.checkpointing else "off"
    return f"{case.truth:7}{case.model:7}{case.rung:20}{case.micro_batch:3} {switch:4}{errors}"


def versions() -> dict[str, str]:
    """Of the tools."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "deepspeed", "accelerate", "transformers")}


if __name__ == "__main__":
    sys.exit(main())
