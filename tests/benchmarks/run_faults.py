"""Runs that meet a fault at a random moment: does each end at its last step, with every sample seen once?

python tests/benchmarks/run_faults.py [--runs 20] [--seed 0] [--only WORD] [--workload KIND] [--json] [--show]. Needs
root: the campaign has namespaces of its own, so that everything that is there after a run is left by it.

Two CPU ranks train a small model, as a model.py or as a script of accelerate or Lightning, for 40 steps, with a
checkpoint every 5, from one finished fit. A run that ends with an exit code that says so is started again by the same
command. A row shows the moment of the fault (seconds after the start, or an optimizer step), the exit codes, the steps
that were done again, whether every step trained on the samples of an undisturbed run (as the ranks saw them), the
largest difference of a step's loss from that run's, and what is left 10 s after the end. --json prints the rows, and
the table on standard error. Exit code 1 when a run breaks a claim.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from autods.rank.training_run.checkpoints import MARK, list_checkpoints
from tests.support.leftovers import Left, Place, run_in_namespaces, subtract
from tests.support.memory_groups import memory_group
from tests.support.watching import Scene

FOLDER = Path(__file__).parent / "workloads"
WORKLOADS: Mapping[str, tuple[str, ...]] = {  # a file, and the arguments of a script
    "model": ("slow_steps.py",),
    "accelerate": ("slow_accelerate.py", "--"),
    "lightning": (
        "slow_lightning.py", "--", "--deepspeed_config", "{ds_config}", "--batch_size", "{micro_batch_size}",
        "--accumulate", "{gradient_accumulation_steps}",
    ),
}  # fmt: skip
CASE = Path("/tmp/case")  # in the campaign's own /tmp
STEPS, EVERY, GLOBAL_BATCH = 40, 5, 8
LOSS_TOLERANCE = 1e-2  # a bf16 number has three digits; a smaller micro batch sums in another order
START_S = 15.0  # about as long as Ray and the ranks take to start
CALLS = 4  # of the same command, at most
INSIDE = "AUTODS_RUN_FAULTS"


# ------------------------------------------------------------------------------------------------ one run, and its end


@dataclass(slots=True)
class Run:
    """A run and the calls of its command."""

    name: str
    place: Place
    chance: random.Random
    workload: tuple[str, ...]
    scene: Scene = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)
    moment: str = ""
    note: str = ""  # what a fault did
    tears: int = 0  # checkpoints that it spoiled
    codes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scene = Scene(CASE / self.name, CASE / self.workload[0])

    @property
    def out(self) -> Path:
        return self.scene.out

    def start(self, *more: str) -> None:
        """Call the command. An option that is given again counts."""
        command = [sys.executable, "-m", "autods", "run", str(self.scene.path), "--fit", str(CASE / "fit")]
        command += ["--device", "cpu", "--gpus", "2", "--gpu-memory", "1GiB", "--ladder", "zero2", "--no-forecast"]
        command += ["--config", "quick", "--global-batch", str(GLOBAL_BATCH), "--steps", str(STEPS)]
        command += ["--checkpoint-every", str(EVERY), "--out", str(self.out), *more, *self.workload[1:]]
        with open(CASE / f"{self.name}.txt", "ab") as output:
            self.process = subprocess.Popen(
                command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def finish(self) -> None:
        """Wait for the end of the command."""
        self.place.wait(lambda: self.ended)
        self.process.returncode = self.place.codes[self.process.pid]
        self.codes.append(self.process.returncode)

    @property
    def ended(self) -> bool:
        return self.process.pid in self.place.codes

    @property
    def step(self) -> int:
        """The last step of the last attempt, by what its ranks have seen: its lines come in groups."""
        attempts = read_attempts(self.out)
        return attempts[-1].last_step if attempts else 0

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until it holds, or the command has ended."""
        self.place.wait(lambda: condition() or self.ended)

    def wait_for_step(self) -> None:
        """Wait for a random moment between the first step and the last."""
        moment = self.chance.uniform(1, STEPS - 1)
        self.moment = f"step {moment:.1f}"
        self.wait_for(lambda: self.step >= int(moment))
        time.sleep(moment % 1 * 0.1)

    def wait_for_moment(self) -> None:
        """Wait for a random moment of the whole run, its start included."""
        if self.chance.random() < 0.75:
            return self.wait_for_step()
        moment = self.chance.uniform(0.5, START_S)
        self.moment = f"{moment:.1f} s"
        self.wait_for_s(moment)
        return None

    def wait_for_s(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.wait_for(lambda: time.monotonic() > until)

    def strike_rank(self, fault: str, rank: int | None = None) -> None:
        """Let a rank meet a fault of the workload, and wait until it did."""
        text = json.dumps({"fault": fault, "rank": self.chance.randrange(2) if rank is None else rank})
        (self.out / "strike.tmp").write_text(text)
        os.replace(self.out / "strike.tmp", self.out / "strike.json")
        self.wait_for((self.out / "struck.json").exists)

    def ranks(self) -> list[int]:
        """The ranks, while they run."""
        pids: list[int] = []

        def look() -> bool:
            with contextlib.suppress(StopIteration, psutil.Error):
                pids[:] = [child.pid for child in self.scene.zygote().children()]
            return len(pids) == 2

        self.wait_for(look)
        return pids


def read_line(text: str) -> dict[str, Any]:
    """A line of a journal; nothing where it is cut off."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(text))
    return {}


# ---------------------------------------------------------------------------------------------------------- the faults


def fill_device(run: Run) -> None:
    run.wait_for_step()
    run.strike_rank("device")


def fill_host(run: Run) -> None:
    """One rank takes memory until the killer of the ranks' cgroup strikes."""
    run.wait_for_step()
    pids = run.ranks()
    if run.ended:
        return
    with memory_group(limit_bytes=2**29, pids=[run.scene.zygote().pid, *pids]):
        run.strike_rank("host")
        run.finish()


def kill_rank(run: Run) -> None:
    run.wait_for_step()
    pids = run.ranks()
    kill(run.chance.choice(pids or [0]), signal.SIGKILL)


def kill_driver(run: Run) -> None:
    run.wait_for_moment()
    kill(run.process.pid, signal.SIGKILL)


def kill_named(name: str) -> Callable[[Run], None]:
    """Kill a process of Ray's by the name of its program."""

    def strike(run: Run) -> None:
        run.wait_for_moment()
        pids: list[int] = []

        def look() -> bool:
            pids[:] = [each.pid for each in psutil.process_iter(["name"]) if each.info["name"] == name]
            return bool(pids)

        run.wait_for(look)
        for pid in pids:
            kill(pid, signal.SIGKILL)

    return strike


def ask_to_end(run: Run) -> None:
    run.wait_for_moment()
    kill(run.process.pid, signal.SIGTERM)


def press_ctrl_c(run: Run) -> None:
    run.wait_for_moment()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGINT)


def tear_checkpoint(run: Run) -> None:
    """Kill the driver and spoil the newest checkpoint, as a save does that was cut off."""
    run.wait_for_step()
    kill(run.process.pid, signal.SIGKILL)
    run.place.wait(lambda: run.ended and not run.scene.family())
    latest = list_checkpoints(run.out / "checkpoints").latest
    if latest is None:
        run.note = "there was no checkpoint yet"
        return
    names = [name for name, size in latest.manifest.files.items() if size]
    victim = latest.path / run.chance.choice([MARK, MARK, *names])
    if victim.name == MARK and run.chance.random() < 0.5:
        victim.unlink()
        run.note = f"{latest.path.name}: no {MARK}"
    else:
        os.truncate(victim, run.chance.randrange(victim.stat().st_size))
        run.note = f"{latest.path.name}: {victim.name} is cut off"
    run.tears += 1


def fill_disk(run: Run) -> None:
    """Fill the run's disk while it saves, or between two saves; free it some seconds later, or after the command."""
    run.wait_for_step()
    name = "disk in a save" if run.chance.random() < 0.7 else "disk"
    run.strike_rank(name, rank=0)
    run.wait_for_s(run.chance.uniform(0, 15))
    run.note = f"{name}, freed {'after the end' if run.ended else 'meanwhile'}"
    (run.out / "ballast").unlink(missing_ok=True)


def kill(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`strike` waits for a moment and inflicts it. `codes` are those that the first call may end with, besides 0.

    `later` are those of the calls after it: a fault that lasts meets them, too.
    """

    strike: Callable[[Run], None]
    codes: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    disk: str | None = None  # the size of a file system of its own for the run's folder


FAULTS: Mapping[str, Fault] = {
    "device memory, one rank": Fault(strike=fill_device),
    "host limit": Fault(strike=fill_host),
    "rank -9": Fault(strike=kill_rank),
    "driver -9": Fault(strike=kill_driver, codes=(-signal.SIGKILL,)),
    "raylet -9": Fault(strike=kill_named("raylet"), codes=(3,)),
    "GCS -9": Fault(strike=kill_named("gcs_server"), codes=(3,)),
    "full disk": Fault(strike=fill_disk, codes=(3,), later=(3,), disk="100m"),
    "torn checkpoint": Fault(strike=tear_checkpoint, codes=(-signal.SIGKILL,)),
    "SIGTERM": Fault(strike=ask_to_end, codes=(128 + signal.SIGTERM, -signal.SIGTERM)),
    "Ctrl-C": Fault(strike=press_ctrl_c, codes=(128 + signal.SIGINT, -signal.SIGINT)),
}


# ----------------------------------------------------------------------------------------------------------- the claims


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of a run. `problems` are the claims that it breaks, `left` is what was there 10 s after its end."""

    run: int
    fault: str
    moment: str
    note: str
    codes: list[int]
    attempts: int
    repeated: list[int]
    same_samples: bool
    loss_difference: float
    left: Left
    seconds: float
    problems: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What an attempt did: the lines of its steps, the samples that its ranks saw in each, saves that were skipped."""

    first_step: int
    lines: Mapping[int, Mapping[str, Any]]
    seen: Mapping[int, Sequence[int]]
    global_batch: int
    unsaved: int

    @property
    def last_step(self) -> int:
        """The last step that was done. A killed attempt lacks the lines of its last second, and saw one step more."""
        return max([self.first_step, *self.lines, *(step - 1 for step in self.seen)])


def read_attempts(out: Path) -> list[Trained]:
    """The attempts of a run that did a step, from its files."""
    attempts = []
    for folder in sorted(out.glob("attempts/*"), key=lambda path: int(path.name)):
        if not list(folder.glob("seen.*")):
            continue
        job, text = json.loads((folder / "job.json").read_text()), ""
        order = job["order"]
        with contextlib.suppress(FileNotFoundError):  # killed in its first steps
            text = (folder / "steps.jsonl").read_text()
        rows = [read_line(line) for line in text.splitlines()]
        first_step = int(order["restore"].rpartition("-")[2]) if order["restore"] else 0
        seen: dict[int, list[int]] = {}
        for file in folder.glob("seen.*"):
            for index, line in enumerate(file.read_text().splitlines()):
                with contextlib.suppress(ValueError):  # being written
                    seen.setdefault(first_step + 1 + index // job["accumulation"], []).extend(json.loads(line))
        attempts.append(
            Trained(
                first_step=first_step,
                lines={row["step"]: row for row in rows if "loss" in row},
                seen={step: sorted(samples) for step, samples in seen.items()},
                global_batch=job["micro_batch"] * job["accumulation"] * job["world_size"],
                unsaved=sum("unsaved" in row for row in rows),
            )
        )
    return attempts


def judge(run: Run, fault: Fault, reference: Trained) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of a finished run's row, and what it did other than it should."""
    problems, attempts = [], read_attempts(run.out)
    if run.codes[0] not in (0, *fault.codes):  # 0: it ended before the fault met it
        problems.append(f"the first call ended with {run.codes[0]}")
    problems += [f"a later call ended with {code}" for code in run.codes[1:] if code not in (0, *fault.later)]
    if run.codes[-1] != 0:
        problems.append(f"the last call ended with {run.codes[-1]}")
    with contextlib.suppress(OSError):
        report = json.loads((run.out / "run.json").read_text())
        if (report["status"], report["step"]) != ("done", STEPS):
            problems.append(f"it is {report['status']} at step {report['step']}")
    same, difference = True, 0.0
    for attempt in attempts:
        if attempt.global_batch != GLOBAL_BATCH:
            problems.append(f"a global batch of {attempt.global_batch}")
        if list(attempt.lines) != list(range(attempt.first_step + 1, attempt.first_step + 1 + len(attempt.lines))):
            problems.append(f"an attempt did the steps {list(attempt.lines)}")
        for step, line in attempt.lines.items():
            expected = reference.lines[step]
            same &= line["samples"] == expected["samples"]
            same &= attempt.seen.get(step) == reference.seen[step]
            difference = max(difference, abs(line["loss"] - expected["loss"]) / abs(expected["loss"]))
        same &= all(attempt.seen[step] == reference.seen[step] for step in attempt.seen if step <= attempt.last_step)
    if not same:
        problems.append("a step has other samples")
    if not difference <= LOSS_TOLERANCE:
        problems.append(f"a loss differs by {difference:.1%}")
    if {step for attempt in attempts for step in attempt.lines} != set(range(1, STEPS + 1)):
        problems.append("a step was skipped")
    repeated = []
    for before, after in itertools.pairwise(attempts):
        last = before.last_step
        repeated.append(last - after.first_step)
        allowed = EVERY * (1 + run.tears + before.unsaved)
        if not 0 <= repeated[-1] <= allowed:
            problems.append(f"step {last} was followed by {after.first_step + 1}")
    figures = {
        "attempts": len(attempts),
        "repeated": repeated,
        "same_samples": same,
        "loss_difference": difference,
    }
    return figures, problems


def suffer(
    number: int, name: str, place: Place, chance: random.Random, workload: tuple[str, ...], reference: Trained
) -> Row:
    """Make a run that meets the fault, to its end, and judge it."""
    fault, began = FAULTS[name], time.monotonic()
    run = Run(f"run{number}", place, chance, workload)
    run.out.mkdir()
    if fault.disk is not None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={fault.disk}", "none", str(run.out)], check=True)
    before, problems = place.look(), []
    try:
        run.start()
        fault.strike(run)
        if not run.codes:
            run.finish()
        while run.codes[-1] != 0 and len(run.codes) < CALLS:
            run.start()
            run.finish()
    except TimeoutError as error:
        problems.append(f"hung: {error}")
        kill(run.process.pid, signal.SIGKILL)
        run.finish()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        place.reap()
        time.sleep(0.05)
    left = {kind: items for kind, items in subtract(place.look(), before).items() if items}
    if left:
        problems.append("something is left")
    figures, more = judge(run, fault, reference)
    row = Row(
        run=number, fault=name, moment=run.moment, note=run.note, codes=run.codes, **figures, left=left,
        seconds=round(time.monotonic() - began, 1), problems=problems + more,
    )  # fmt: skip
    if not row.problems:
        if fault.disk is not None:
            subprocess.run(["umount", str(run.out)], check=True)
        shutil.rmtree(run.out)
    return row


# --------------------------------------------------------------------------------------------------------- the campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name has this word")
    parser.add_argument("--workload", choices=WORKLOADS, default="model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", action="store_true", help="print what the commands printed")
    options = parser.parse_args()
    if (code := run_in_namespaces(__file__, INSIDE)) is not None:
        return code
    table = sys.stderr if options.json else sys.stdout
    names = [name for name in FAULTS if options.only in name]
    place, rows = Place(), []
    workload = WORKLOADS[options.workload]
    reference, seconds = make_reference(place, workload)
    print(f"undisturbed: {seconds:.0f} s, loss {reference.lines[STEPS]['loss']:.5f}", file=table, flush=True)
    print(f"{'':3} {'fault':24} {'moment':>9}  {'exits':14} {'repeated':10} samples  loss  left   s", file=table)
    for number in range(1, options.runs + 1):
        name = names[(number - 1) % len(names)]
        chance = random.Random(f"{options.seed} {number} {name}")
        rows.append(row := suffer(number, name, place, chance, workload, reference))
        print_row(row, table, options.show)
    good = sum(not row.problems for row in rows)
    print(f"{good} of {len(rows)} runs ended at step {STEPS} as they should", file=table)
    if options.json:
        print(json.dumps({"seed": options.seed, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0 if good == len(rows) else 1


def make_reference(place: Place, workload: tuple[str, ...], *more: str) -> tuple[Trained, float]:
    """The fit of all runs, and what an undisturbed run did; its seconds after the fit."""
    CASE.mkdir()
    for file in FOLDER.glob("slow_*.py"):
        shutil.copy(file, CASE)
    for folder in (CASE / "fit", CASE / "reference"):
        folder.mkdir()
    run, began = Run("reference", place, random.Random(0), workload), time.monotonic()
    for _ in range(2):  # the first one makes the fit
        shutil.rmtree(run.out)
        began = time.monotonic()
        run.start(*more)
        run.finish()
        if run.codes[-1] != 0:
            raise SystemExit((CASE / "reference.txt").read_text()[-3000:])
    (attempt,) = read_attempts(run.out)
    return attempt, time.monotonic() - began


def print_row(row: Row, table: Any, show: bool) -> None:
    left = sum(len(items) for items in row.left.values())
    print(
        f"{row.run:3} {row.fault:24} {row.moment:>9}  {', '.join(map(str, row.codes)):14} "
        f"{', '.join(map(str, row.repeated)) or '-':10} {'same' if row.same_samples else 'OTHER':7} "
        f"{row.loss_difference:.0e} {left:4} {row.seconds:4.0f}  {row.note}",
        file=table,
        flush=True,
    )
    for problem in row.problems:
        print(f"      {problem}", file=table, flush=True)
    for kind, items in row.left.items():
        for item in items:
            print(f"      left, {kind}: {item}", file=table, flush=True)
    if show:
        text = (CASE / f"run{row.run}.txt").read_text(errors="replace")[-4000:]
        print("      | " + text.strip().replace("\n", "\n      | "), file=table, flush=True)


if __name__ == "__main__":
    sys.exit(main())
