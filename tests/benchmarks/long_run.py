"""One run of hours on two CPU ranks, with a fault every few minutes: does it go on, and does anything grow?

python tests/benchmarks/long_run.py [--hours 2] [--every 3] [--seed 0] [--json]. Needs root, as run_faults.py does,
whose small model it trains: the faults are those that one command survives. At the end it gets SIGTERM.

Every minute the memory of driver, agent, zygote and Ray is read (USS, in MiB). A row for each fault has the minute, the
step that was seen, the attempts until then and what was done. After the end: every step from the first to the last was
trained; each epoch had every sample once; a step that was done again had the samples and the loss of the first time; no
fault took back more than the steps since the checkpoint before the last one. Exit code 1 when a claim is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks import run_faults
from tests.benchmarks.run_faults import Run, Trained
from tests.benchmarks.workloads.slow_steps import SAMPLES
from tests.support.leftovers import Place, run_in_namespaces
from tests.support.memory_groups import memory_group

STALL = ("--stall-limit", "30s")
EVERY = 50  # steps between checkpoints
RESCUED_WITHIN_S = 120.0
INSIDE = "AUTODS_LONG_RUN"


# ---------------------------------------------------------------------------------------------------------- the faults


def kill_rank(run: Run) -> None:
    os.kill(run.chance.choice(run.ranks()), signal.SIGKILL)


def stop_rank(run: Run) -> None:
    """One rank stands still, as after a lost disk: the other waits in a collective until the stall limit."""
    os.kill(run.chance.choice(run.ranks()), signal.SIGSTOP)


def kill_zygote(run: Run) -> None:
    run.scene.zygote().kill()


def kill_agent(run: Run) -> None:
    """Ray starts the actor of the node anew, or the driver does."""
    agent = run.scene.zygote().parent()
    assert agent is not None
    agent.kill()


def fill_host(run: Run) -> None:
    """One rank takes memory until the killer of the ranks' cgroup strikes."""
    with memory_group(limit_bytes=2**29, pids=[run.scene.zygote().pid, *run.ranks()]):
        strike_rank(run, "host")
        watch(run, lambda: not run.scene.family(), 60)


def fill_disk(run: Run) -> None:
    """The disk is full for half a minute, in which a checkpoint is due: nothing of the run has room."""
    strike_rank(run, "disk", rank=0)
    watch(run, lambda: False, 30)
    (run.out / "ballast").unlink(missing_ok=True)


def strike_rank(run: Run, fault: str, rank: int | None = None) -> None:
    (run.out / "struck.json").unlink(missing_ok=True)
    run.strike_rank(fault, rank)


FAULTS: Mapping[str, Callable[[Run], None]] = {
    "rank -9": kill_rank,
    "rank stopped": stop_rank,
    "zygote -9": kill_zygote,
    "agent -9": kill_agent,
    "host limit": fill_host,
    "full disk": fill_disk,
}


# --------------------------------------------------------------------------------------------------------- what is seen


def watch(run: Run, condition: Callable[[], object], limit_s: float) -> bool:
    """Wait until it holds; return False where the time or the command is over before."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until and not run.ended:
        run.place.reap()
        if condition():
            return True
        time.sleep(0.5)
    return False


def latest_step(run: Run) -> int:
    """The last step that stands in the journal of the newest attempt."""
    for folder in sorted(run.out.glob("attempts/*"), key=lambda path: int(path.name), reverse=True):
        try:
            lines = (folder / "steps.jsonl").read_text().splitlines()
        except OSError:
            continue
        steps = [row["step"] for row in map(run_faults.read_line, lines[-3:]) if "loss" in row]
        if steps:
            return int(steps[-1])
    return 0


def read_memory_mib(run: Run) -> dict[str, float]:
    """USS of the processes that live as long as the run, by name: PSS hangs on who else shares their libraries."""
    found = {"driver": [run.process.pid], "zygote": [], "agent": []}
    for process in psutil.process_iter(["name"]):
        if process.info["name"] in ("raylet", "gcs_server"):
            found.setdefault(process.info["name"], []).append(process.pid)
    try:
        zygote = run.scene.zygote()
        found["zygote"], found["agent"] = [zygote.pid], [zygote.ppid()]
    except (StopIteration, psutil.Error):
        pass
    return {name: round(sum(map(_uss_bytes, pids)) / 2**20, 1) for name, pids in found.items() if pids}


def _uss_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0


# ----------------------------------------------------------------------------------------------------------- the claims


def find_broken(attempts: Sequence[Trained]) -> Iterator[str]:
    """What the attempts did other than they should."""
    seen: dict[int, Sequence[int]] = {}
    losses: dict[int, float] = {}
    for attempt in attempts:
        for step in range(attempt.first_step + 1, attempt.last_step + 1):
            samples = attempt.seen.get(step, ())
            if seen.setdefault(step, samples) != samples:
                yield f"step {step} had other samples when it was done again"
        for step, line in attempt.lines.items():
            if abs(losses.setdefault(step, line["loss"]) - line["loss"]) > 1e-6 * abs(line["loss"]):
                yield f"step {step} had another loss when it was done again"
    last = max(attempt.last_step for attempt in attempts)
    if sorted(step for step in seen if step <= last) != list(range(1, last + 1)):
        yield "a step was skipped"
    epoch = SAMPLES // run_faults.GLOBAL_BATCH
    for first in range(1, last - epoch + 2, epoch):
        samples = [sample for step in range(first, first + epoch) for sample in seen.get(step, ())]
        if sorted(samples) != list(range(SAMPLES)):
            yield f"the epoch from step {first} on lacks samples, or had some twice"
    for before, after in itertools.pairwise(attempts):
        # A rank that is stopped or killed amid a save loses that checkpoint; a full disk skips some.
        if not 0 <= before.last_step - after.first_step <= EVERY * (2 + before.unsaved):
            yield f"step {before.last_step} was followed by {after.first_step + 1}"


# --------------------------------------------------------------------------------------------------------- the campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=3.0, help="minutes between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (code := run_in_namespaces(__file__, INSIDE)) is not None:
        return code
    table = sys.stderr if options.json else sys.stdout
    place, chance = Place(), random.Random(options.seed)
    run_faults.make_reference(place, run_faults.WORKLOADS["model"], *STALL)
    run = Run("long", place, chance, run_faults.WORKLOADS["model"])
    run.out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "none", str(run.out)], check=True)  # one that fills
    began = time.monotonic()
    more = ("--steps", "100000000", "--checkpoint-every", str(EVERY), "--max-rescues", "10000", *STALL)
    run.start(*more)

    def minute() -> float:
        return round((time.monotonic() - began) / 60, 1)

    memory: list[dict[str, float]] = []
    rows: list[dict[str, object]] = []

    def look() -> None:
        if minute() >= len(memory) + 1:
            memory.append(read_memory_mib(run))
            if len(memory) % 10 == 1:
                print(f"{minute():6} memory in MiB: {memory[-1]}", file=table, flush=True)

    print("minute     step  attempts  fault", file=table, flush=True)
    names: list[str] = []
    for moment in itertools.count(1):
        until = min(moment * options.every, 60 * options.hours)
        watch(run, lambda until=until: look() or minute() >= until, 3600 * options.hours)
        if run.ended or minute() >= 60 * options.hours:
            break
        names = names or chance.sample(list(FAULTS), len(FAULTS))
        name, step = names.pop(), latest_step(run)
        problem = ""
        try:
            FAULTS[name](run)
            moved = watch(run, lambda step=step: look() or latest_step(run) > step + EVERY, RESCUED_WITHIN_S)
            problem = "" if moved else f"no {EVERY} new steps within {RESCUED_WITHIN_S:.0f} s"
        except (StopIteration, IndexError, psutil.Error, OSError) as error:  # met amid another rescue
            problem = f"not inflicted: {type(error).__name__}: {error}"
        attempts = len(list(run.out.glob("attempts/*")))
        rows.append({"minute": minute(), "step": step, "attempts": attempts, "fault": name, "problem": problem})
        print(f"{minute():6} {step:8} {attempts:9}  {name}  {problem}", file=table, flush=True)
    if not run.ended:
        os.kill(run.process.pid, signal.SIGTERM)
    run.finish()
    trained = run_faults.read_attempts(run.out)
    if not trained:
        raise SystemExit((run_faults.CASE / "long.txt").read_text(errors="replace")[-3000:])
    problems = [str(row["problem"]) for row in rows if row["problem"]]
    problems += [] if run.codes == [128 + signal.SIGTERM] else [f"it ended with {run.codes}"]
    problems += find_broken(trained)
    report = {"status": "unknown", "step": None}
    with contextlib.suppress(OSError):
        report = json.loads((run.out / "run.json").read_text())
    done = sum(attempt.last_step - attempt.first_step for attempt in trained)
    last = max(attempt.last_step for attempt in trained)
    summary = {
        "hours": round((time.monotonic() - began) / 3600, 2),
        "exits": run.codes,
        "status": report["status"],
        "step": report["step"],
        "faults": len(rows),
        "attempts": len(trained),
        "steps_done_again": done - last,
        "memory_mib_begin": memory[2] if len(memory) > 2 else {},
        "memory_mib_end": memory[-1] if memory else {},
        "problems": problems,
    }
    for key, value in summary.items():
        print(f"{key}: {value}", file=table)
    if problems:
        print((run_faults.CASE / "long.txt").read_text(errors="replace")[-6000:], file=sys.stderr)
    if options.json:
        print(json.dumps({**summary, "seed": options.seed, "rows": rows, "memory_mib": memory}, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
