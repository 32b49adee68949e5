"""The outcome of each fault in each phase, how soon every process is gone, and what is left behind.

python tests/benchmarks/fault_table.py [--json]. Two CPU ranks; the fault meets rank 1. "ms" runs from the moment at
which the rank met the fault (or the kill was sent) until the last rank and the last stray had ended. A stopped rank is
given one second; a hang ends at the stall limit, 6 s here. "left" is read when the trial has ended. After the
end of a driver it is read as soon as nothing is left, at most a minute later: Ray's processes need a few seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from autods.runner.runner import RayRunner
from autods.types import Failed, OutOfMemory
from tests.support.fits import ignore, question
from tests.support.watching import PHASES, FaultResult, Scene, end_fit_in_phase, kill_in_phase, run_with_fault

FAULTS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGSTOP", "os._exit(0)", "exception", "strays", "out of memory", "hang")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    fault: str
    phase: str
    reported: str
    gone_ms: float
    left: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    as_json = parser.parse_args().json
    rows = []
    if not as_json:
        print(f"{'fault':14} {'phase':9} {'ms':>6}  {'left':4} reported")
    for row in table():
        rows.append(row)
        if not as_json:
            left = ", ".join(row.left) or "none"
            print(f"{row.fault:14} {row.phase:9} {row.gone_ms:6.0f}  {left:4} {row.reported}", flush=True)
    if as_json:
        print(json.dumps([{name: getattr(row, name) for name in Row.__slots__} for row in rows], indent=2))
    sys.exit(any(row.left for row in rows))


def table() -> Iterator[Row]:
    with a_scene() as scene, RayRunner(question(str(scene.path), scene.out, stall_s=6.0), ignore) as runner:
        runner.survey()
        for fault in FAULTS:
            for phase in PHASES:
                # While building or initialising a longer limit holds.
                if fault != "hang" or phase not in ("build", "init"):
                    yield row_of(fault, phase, run_with_fault(runner, scene, fault, phase))
        for phase in PHASES:
            seen, _ = kill_in_phase(runner, scene, phase, lambda zygote: zygote)
            yield row_of("zygote -9", phase, seen)
    for phase in PHASES:
        with a_scene() as scene:
            yield row_of("driver -9", phase, end_fit_in_phase(scene, phase, signal.SIGKILL)[1])
    for name, number in (("Ctrl-C", signal.SIGINT), ("SIGTERM", signal.SIGTERM)):
        with a_scene() as scene:
            code, seen = end_fit_in_phase(scene, "forward", number, group=number == signal.SIGINT)
            yield row_of(name, "forward", seen, f"exit {code}")


@contextlib.contextmanager
def a_scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="faults_", ignore_cleanup_errors=True) as folder:
        yield Scene.at(Path(folder))
        time.sleep(0.1)


def row_of(fault: str, phase: str, seen: FaultResult, reported: str = "-") -> Row:
    match seen.outcome:
        case OutOfMemory() as outcome:
            reported = f"out of memory on {outcome.tier}, rank {outcome.rank}, {outcome.phase}"
        case Failed() as outcome:
            where = f"rank {outcome.rank}" if outcome.rank >= 0 else "no rank"
            reported = f"{outcome.failure}, {where}, {outcome.phase}: {outcome.evidence.rpartition('.py:')[2]}"
        case _:
            pass
    return Row(fault=fault, phase=phase, reported=reported, gone_ms=seen.gone_ms, left=seen.left)


if __name__ == "__main__":
    main()
