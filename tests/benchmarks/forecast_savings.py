"""The same fits with and without the forecast: trials, wall time, and whether the answer is the same.

python tests/benchmarks/forecast_savings.py [--workload examples/gpt.py] [--budgets 320MiB,416MiB,832MiB,4GiB] [--json]

Each fit is the command `autods fit … --device cpu --gpus 2 --config quick --fresh`, once as it is and once with
--no-forecast, in turn. On CPU ranks a trial that runs out ends after a second, which is less than its forecast costs:
what is saved there is trials. On a GPU a trial that runs out has loaded the model first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One fit. out_of_memory: trials that ran out; foretold: rungs that were not tried because they cannot fit."""

    budget: str
    forecast: bool
    rung: str | None
    micro_batch: int | None
    trials: int
    out_of_memory: int
    foretold: int
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="examples/gpt.py")
    parser.add_argument("--budgets", default="320MiB,416MiB,832MiB,4GiB")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    seen = []
    with tempfile.TemporaryDirectory(prefix="autods-savings-") as folder:
        for budget in asked.budgets.split(","):
            for forecast in (True, False):
                seen.append(fitted(asked.workload, budget, Path(folder) / f"{budget}-{forecast}", forecast=forecast))
                print(show(seen[-1]), file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps([asdict(one) for one in seen], indent=2))
    else:
        print_table(seen)
    pairs = zip(seen[::2], seen[1::2], strict=True)
    return 0 if all(one.rung == other.rung for one, other in pairs) else 1


def fitted(workload: str, budget: str, out: Path, *, forecast: bool) -> Seen:
    words = ["fit", workload, "--device", "cpu", "--gpus", "2", "--gpu-memory", budget, "--config", "quick"]
    more = ["--fresh", "--quiet", "--json", "--out", str(out), *([] if forecast else ["--no-forecast"])]
    done = subprocess.run(
        [sys.executable, "-m", "autods", *words, *more], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        sys.exit(f"forecast_savings.py: the fit ended with {done.returncode}: {done.stderr.strip()}")
    report = json.loads(done.stdout)
    kinds = [trial["outcome"]["kind"] for trial in report["trials"]]
    tried = {trial["rung"] for trial in report["trials"]}
    return Seen(
        budget=budget,
        forecast=forecast,
        rung=report["rung"],
        micro_batch=report["knobs"]["micro_batch"] if report["knobs"] else None,
        trials=len(kinds),
        out_of_memory=kinds.count("out_of_memory"),
        foretold=sum(row["verdict"] == "cannot_fit" and row["rung"] not in tried for row in report["forecast"]),
        seconds=report["seconds"],
    )


def show(one: Seen) -> str:
    how = "with" if one.forecast else "without"
    return f"{one.budget} {how} the forecast: {one.rung}, {one.trials} trials, {one.seconds:.0f} s"


def print_table(seen: list[Seen]) -> None:
    table = Table(title="the same fits with and without the forecast")
    for name in ("budget", "forecast", "answer", "micro batch", "trials", "ran out", "foretold", "seconds"):
        table.add_column(name, justify="left" if name in ("budget", "forecast", "answer") else "right")
    for one in seen:
        how, batch = "yes" if one.forecast else "no", "" if one.micro_batch is None else str(one.micro_batch)
        answer = one.rung or "nothing fits"
        counts = (str(one.trials), str(one.out_of_memory), str(one.foretold) if one.forecast else "")
        table.add_row(one.budget, how, answer, batch, *counts, f"{one.seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
