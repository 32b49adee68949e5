"""What a search must not get wrong, as whole fits on real CPU ranks, and what deciding costs beside running.

python tests/benchmarks/search_cases.py [leaner short_batch planted] [--json]

leaner: plain data parallelism fits and leaves room for few samples; a leaner rung has to win by the race.
short_batch: the config that wins on short texts runs out of memory on a long one; the certificate has to back off.
planted: a rung has a knob that is fast and trains something else; tuning takes it, the comparison of losses has to name
it and take it back.

Deciding is the processor time of the fit's own process between two trials: search, Optuna, journal, and replaying
traces for forecasts. The simulations that it waits for there run in another process, and are told apart as "waiting".
Exit code 1 when a case goes wrong or deciding takes more than 2 % of a fit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import autods
from autods.events import Event, TrialFinished, TrialStarted
from autods.report import FitReport
from autods.types import Fit, OutOfMemory

HERE = Path(__file__).parent
CASES = HERE / "cases"
BAR = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fit, and what has to be true of its report; holds says what was seen, or raises AssertionError."""

    workload: Path
    asked: Mapping[str, Any]
    holds: Callable[[FitReport], str]


@dataclass(slots=True)
class Clock:
    """Between the first trial and the last: seconds between two of them, and those of this process's processor."""

    between_s: float = 0.0
    deciding_s: float = 0.0
    _since: tuple[float, float] | None = field(default=None)

    def __call__(self, event: Event) -> None:
        match event:
            case TrialStarted():
                if self._since is not None:
                    self.between_s += time.monotonic() - self._since[0]
                    self.deciding_s += time.process_time() - self._since[1]
            case TrialFinished():
                self._since = time.monotonic(), time.process_time()
                print(f"  {event.record.trial.rung} {_knobs(event)}", file=sys.stderr, flush=True)


def _knobs(event: TrialFinished) -> str:
    trial, outcome = event.record.trial, event.record.outcome
    said = f"{outcome.samples_per_second:.3g} samples/s" if isinstance(outcome, Fit) else outcome.kind
    return f"{trial.purpose} micro batch {trial.knobs.micro_batch}: {said} [{event.record.seconds:.1f} s]"


def leaner(report: FitReport) -> str:
    walked = [one for one in report.trials if one.trial.purpose == "walk" and isinstance(one.outcome, Fit)]
    first = walked[0].trial.rung
    assert report.rung != first, f"{first}, the first rung that fits, was taken"
    assert report.rung in report.reasons
    return f"{first} fits first, {report.rung} wins; {first}: {report.reasons[first]}"


def short_batch(report: FitReport) -> str:
    exams = [one for one in report.trials if one.trial.exam == "worst_case"]
    rejected = [one for one in exams if isinstance(one.outcome, OutOfMemory)]
    assert rejected, "the longest batch of the winner fits: the case is too easy"
    assert report.certificate.passed, report.certificate
    assert report.certificate.backed_off, "nothing was backed off"
    return f"{report.reasons['certify']}"


def planted(report: FitReport) -> str:
    assert any(one.trial.knobs.settings.get("skips_half") for one in report.trials if one.trial.purpose == "certify")
    assert report.ds_config is not None
    assert not report.ds_config.get("skips_half"), "the broken knob was kept"
    said = " ".join(report.certificate.backed_off)
    assert "skips_half" in said, said
    return said


RANKS: dict[str, Any] = {"gpus": 2, "device": "cpu", "config": str(CASES / "cases.toml")}
WITH_PLANTED = {"ladder": "planted", "strategies": [CASES / "strategies"], "precision": "fp32"}
ALL = {
    "leaner": Case(workload=CASES / "few_samples.py", asked={**RANKS, "gpu_memory": "270MiB"}, holds=leaner),
    "short_batch": Case(
        workload=CASES / "short_then_long.py", asked={**RANKS, "gpu_memory": "160MiB"}, holds=short_batch
    ),
    "planted": Case(
        workload=CASES / "planted.py", asked={**RANKS, "gpu_memory": "256MiB", **WITH_PLANTED}, holds=planted
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*ALL, []], help="all, if none is named")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [run(name) for name in asked.cases or ALL]
    if asked.json:
        print(json.dumps(rows, indent=2))
    for row in rows:
        print(f"{row['case']}: {'ok' if row['ok'] else 'WRONG'}: {row['said']}", file=sys.stderr)
        cost = f"{row['seconds']:.0f} s, {row['trials']} trials; deciding {row['deciding']:.1%} of it"
        cost += f", waiting {row['waiting']:.1%}"
        print(f"  {cost}", file=sys.stderr)
    return 0 if all(row["ok"] and row["deciding"] <= BAR for row in rows) else 1


def run(name: str) -> dict[str, Any]:
    """One fit, as a row."""
    case, clock = ALL[name], Clock()
    print(name, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="autods-cases-") as folder:
        report = autods.find_best_config(case.workload, **case.asked, out=folder, on_event=clock)
    try:
        ok, said = True, case.holds(report)
    except AssertionError as wrong:
        ok, said = False, str(wrong)
    return {
        "case": name, "ok": ok, "said": said, "rung": report.rung,
        "knobs": asdict(report.knobs) if report.knobs else None, "trials": len(report.trials),
        "seconds": report.seconds, "deciding": clock.deciding_s / report.seconds,
        "waiting": max(0.0, clock.between_s - clock.deciding_s) / report.seconds, "reasons": dict(report.reasons),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
