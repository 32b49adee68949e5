"""The simulated engine against the real engine's allocations on CPU tensors: every rung, model, accumulation and
checkpointing, and the optimizers.

python tests/benchmarks/forecast_golden.py [--models gpt2,llama] [--rungs zero3] [--optimizers sgd,lion]
    [--precision bf16] [--out FILE] [--json]

cpu: the forecast for CPU ranks, the models as they come (SDPA, dropout). cuda: the simulated GPU, the sum of its tiers,
models with eager attention and without dropout, because both are other kernels on a GPU, and nothing pinned.

A row is printed as soon as both engines have run. --out is written after every row, and the rows that it holds are not
run again: Ctrl-C and the same command go on where it stopped, and parts of the grid add up in one file.
A case that the real engine refuses is within the bar when the simulated one refuses it with the same exception.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["DS_ACCELERATOR"] = "cpu"

from autods.config.rungs import read_rungs
from autods.forecast.simulate import ProcessSimulator, SimulationFailed
from autods.forecast.values import PHASES, EngineSpec
from autods.rank.preload import freeze, preload
from autods.workload import make_source
from tests.support import golden_cases as golden

BAR = {"build": 0.05, "init": 0.05, "forward": 0.01, "backward": 0.01, "step": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the grid; its fields are the first of its row."""

    device: Any
    model: str
    optimizer: str
    precision: str
    rung: str
    accumulation: int
    checkpointing: str

    @property
    def plain(self) -> bool:
        """With kernels that are the same on both devices."""
        return bool(self.device == "cuda")

    def ask(self) -> EngineSpec:
        config = golden.config_of(
            self.rung, accumulation=self.accumulation, pinned=not self.plain, precision=self.precision,
            optimizer=self.optimizer,
        )  # fmt: skip
        return EngineSpec(
            rung=self.rung, ds_config=config, world_size=golden.WORLD, ranks_per_node=golden.WORLD,
            device_bytes=16 << 30, device=self.device, checkpointing=self.checkpointing == "on",
        )  # fmt: skip


def main() -> int:
    options = _options()
    done = _rows_of(options.out) if options.out else {}
    cases = [case for case in _grid(options) if _key(case) not in done]
    rows = list(done.values())
    began, stopped = time.monotonic(), False
    try:
        for row in compared(cases):
            rows.append(row)
            print(line_of(row), file=sys.stderr, flush=True)
            if options.out:
                _write(options.out, rows)
    except KeyboardInterrupt:
        stopped = True
    print(summary(rows), file=sys.stderr)
    seconds = time.monotonic() - began
    left = len(done) + len(cases) - len(rows)
    print(f"{len(rows) - len(done)} run in {seconds:.0f} s, {left} left", file=sys.stderr)
    if options.json:
        print(json.dumps(rows))
    return 130 if stopped else int(any(not row["within"] for row in rows))


def compared(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """One row a case, as both engines have run it. Both run at the same time, one process each."""
    if not cases:
        return
    said: queue.SimpleQueue[tuple[str, Case, Any]] = queue.SimpleQueue()
    with _real_engines(cases) as real:
        for source in (_simulated(cases), _really(real, cases)):
            threading.Thread(target=_tell, args=(source, said), daemon=True).start()
        waiting: dict[Case, dict[str, Any]] = {case: {} for case in cases}
        while waiting:
            side, case, found = said.get()
            if side == "broken":
                raise found
            waiting[case][side] = found
            if len(waiting[case]) == 2:
                yield row_of(case, **waiting.pop(case))


def row_of(case: Case, real: dict[str, Any], simulated: Any) -> dict[str, Any]:
    """Relative error by phase, or the refusals."""
    row: dict[str, Any] = asdict(case)
    if "refused" in real or isinstance(simulated, SimulationFailed):
        failed = str(simulated) if isinstance(simulated, SimulationFailed) else None
        refused = real.get("refused")
        both = refused is not None and failed is not None and refused.partition(":")[0] in failed
        return row | {"within": both, "refused": refused, "failed": failed}
    errors = {phase: simulated.summed_peak_bytes[phase] / real[phase] - 1 for phase in PHASES}
    within = all(abs(errors[phase]) <= BAR[phase] for phase in PHASES)
    return row | {"real": real, "errors": errors, "within": within, "assumed": list(simulated.assumed)}


def line_of(row: dict[str, Any]) -> str:
    """One line."""
    name = (
        f"{row['device']:5}{row['model']:6}{row['optimizer']:14} {row['rung']:20}{row['accumulation']:2} "
        f"{row['checkpointing']:4}"
    )
    mark = "" if row["within"] else "  <-"
    if "errors" not in row:
        real, failed = (str(row[side]).splitlines()[0][:90] for side in ("refused", "failed"))
        return f"{name} real: {real}; simulated: {failed}{mark}"
    return f"{name} " + "  ".join(f"{phase} {row['errors'][phase]:+7.2%}" for phase in PHASES) + mark


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The worst row of each phase and device, and how many are within the bar."""
    lines = [f"{sum(row['within'] for row in rows)} of {len(rows)} cases within the bar"]
    refused = sum("errors" not in row and row["within"] for row in rows)
    if refused:
        lines[0] += f", {refused} of them refused by both engines"
    measured = [row for row in rows if "errors" in row]
    for device in sorted({row["device"] for row in measured}):
        for phase in PHASES:
            worst = max((row for row in measured if row["device"] == device), key=lambda row: abs(row["errors"][phase]))
            lines.append(f"worst {phase:9} {line_of(worst)}")
    return "\n".join(lines)


# ---- the two engines


def _simulated(cases: Sequence[Case]) -> Iterator[tuple[str, Case, Any]]:
    """One prepared process for each device, model and workload."""
    for group, members in _grouped(cases).items():
        device, architecture, own = group
        with tempfile.TemporaryDirectory() as folder:
            path = golden.workload_file(architecture, Path(folder), plain=device == "cuda", optimizer=own or "adamw")
            with ProcessSimulator(make_source(path), processes=1) as simulator:
                asks = [(case, case.ask()) for case in members]
                for case, ask in asks:
                    try:
                        yield "simulated", case, simulator.simulate(ask, (2,))[0]
                    except SimulationFailed as failed:
                        yield "simulated", case, failed


def _grouped(cases: Sequence[Case]) -> dict[tuple[Any, str, str], list[Case]]:
    found: dict[tuple[Any, str, str], list[Case]] = {}
    for case in cases:
        own = case.optimizer if case.optimizer.startswith("own-") else ""
        # Cases of one checkpointing share a model that is built once: they stand together.
        found.setdefault((case.device, case.model, own), []).append(case)
    return {key: sorted(members, key=lambda case: case.checkpointing) for key, members in found.items()}


def _really(lines: IO[str], cases: Sequence[Case]) -> Iterator[tuple[str, Case, Any]]:
    for case in [case for members in _grouped(cases).values() for case in members]:
        line = lines.readline()
        if not line:
            raise RuntimeError("the process of the real engines died")
        yield "real", case, json.loads(line)


@contextlib.contextmanager
def _real_engines(cases: Sequence[Case]) -> Iterator[IO[str]]:
    """A process that runs the cases in their order, each in a fork of it, and says a line for each."""
    ours, theirs = os.pipe()
    pid = os.fork()  # before there are threads
    if pid == 0:
        os.setpgid(0, 0)
        os.close(ours)
        with os.fdopen(theirs, "w") as out:
            _serve(cases, out)
        os._exit(0)
    os.close(theirs)
    try:
        with os.fdopen(ours) as lines:
            yield lines
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with the engine that it runs
        os.waitpid(pid, 0)


def _serve(cases: Sequence[Case], out: IO[str]) -> None:
    warnings.simplefilter("ignore")
    preload()
    for architecture in sorted({case.model for case in cases}):
        golden.model(architecture, plain=False)  # transformers imports each architecture at its first use
    freeze()
    for case in [case for members in _grouped(cases).values() for case in members]:
        try:
            found: dict[str, Any] = golden.allocate_on_cpu(
                case.model, case.ask().ds_config, checkpointing=case.checkpointing == "on", plain=case.plain,
                optimizer=case.optimizer,
            )  # fmt: skip
        except golden.Refused as refused:
            found = {"refused": refused.args[0], "traceback": refused.args[1]}
        print(json.dumps(found), file=out, flush=True)


def _tell(source: Iterator[tuple[str, Case, Any]], said: queue.SimpleQueue[tuple[str, Case, Any]]) -> None:
    try:
        for one in source:
            said.put(one)
    except BaseException as error:
        said.put(("broken", None, error))  # type: ignore[arg-type]


# ---- the grid and its file


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(golden.ARCHITECTURES))
    parser.add_argument("--rungs", default=",".join(sorted(read_rungs(), key=lambda name: read_rungs()[name].order)))
    parser.add_argument("--devices", default="cpu,cuda")
    parser.add_argument("--optimizers", default="adamw", help=", ".join(golden.OPTIMIZERS))
    parser.add_argument("--accumulation", default="1,2")
    parser.add_argument("--checkpointing", default="off,on")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "fp16", "bf16"])
    parser.add_argument("--out", type=Path, help="a JSON file; the rows that it holds already are not run again")
    parser.add_argument("--json", action="store_true", help="print all rows at the end")
    return parser.parse_args()


def _grid(options: argparse.Namespace) -> list[Case]:
    axes = (
        options.devices, options.models, options.optimizers, options.rungs, options.accumulation, options.checkpointing,
    )  # fmt: skip
    return [
        Case(
            device=device, model=model, optimizer=optimizer, precision=options.precision, rung=rung,
            accumulation=int(accumulation), checkpointing=checkpointing,
        )
        for device, model, optimizer, rung, accumulation, checkpointing in product(*(axis.split(",") for axis in axes))
    ]  # fmt: skip


def _key(case: Case) -> tuple[Any, ...]:
    return tuple(asdict(case).values())


def _rows_of(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of an earlier run. Ends when they were made with other versions."""
    if not path.exists():
        return {}
    said = json.loads(path.read_text())
    if said["versions"] != versions():
        sys.exit(f"{path}: made with {said['versions']}, here are {versions()}\n  give another --out, or delete it")
    return {tuple(row[name] for name in Case.__dataclass_fields__): row for row in said["rows"]}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    said = {"versions": versions(), "bar": BAR}
    head = json.dumps(said, indent=1).removesuffix("\n}")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(head + ',\n "rows": [\n  ' + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]\n}\n")
    temporary.replace(path)


def versions() -> dict[str, str]:
    """Of what both engines are made of."""
    return {name: metadata.version(name) for name in ("torch", "deepspeed", "transformers")}


if __name__ == "__main__":
    sys.exit(main())
