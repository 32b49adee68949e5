"""DeepSpeed Autotuning and `autods fit` on the same GPT-2 on one rank: time to the answer, and its throughput.

apt install pdsh; pip install --group bench -c constraints.txt
python tests/benchmarks/autotuner.py [--size gpt2_4x256|gpt2_8x384] [--profiles quick,default] [--memory 4GiB] [--json]
    [--defaults]             the autotuner without the limit of the micro batch that it is granted here otherwise
    [--device cuda]          one card in place of a CPU rank, without a limit of the micro batch or of the memory

Both look for the fastest config of one script's model, in fp32: the autotuner knows no bf16, and fp16 means little on a
CPU. The autotuner runs as documented: `deepspeed --autotuning tune --num_gpus 1 train.py …`, "fast" on (its default),
"train_micro_batch_size_per_gpu": "auto". autods: `autods fit … --device cpu --gpus 1`. The time is that of the whole
command; processor seconds are those of all its processes, looked up twice a second; a busy machine changes them less.
Then one plain loop that knows neither trains with all answers in turn (A B C A B C …): samples/s is the median of the
turns, "faster" the median of the ratios of turns that follow each other, "by CPU" the same by samples a processor
second. A config that was proven with recomputed activations is trained so, and once more without, to see the cost.

What DeepSpeed Autotuning 0.19.8 needs to run on CPU ranks, and what was done about it:
- DS_ACCELERATOR=cpu, so that a machine with GPUs tunes the same; without a GPU DeepSpeed takes the CPU by itself.
- `deepspeed` on the PATH: each experiment is a `deepspeed` command (scheduler.py, run_experiment).
- tabulate, else an assertion says so at the start (autotuner.py, Autotuner.__init__). It is in the group `bench`.
- pdsh, after each experiment, for `pdsh -w localhost pkill -f NAME` (scheduler.py, clean_up). Without
  an ssh server pdsh prints "Connection refused", and the search goes on: no server is needed where nothing has to be
  killed, and none was set up.
- a limit of the micro batch: it takes all of the machine's memory for the device's (cpu_accelerator.py, total_memory),
  divides it by the growth of one forward's resident memory, and begins near the quotient (here several hundred), which
  would fill the machine, since nothing bounds an experiment. "max_train_micro_batch_size_per_gpu" (--most-micro-batch;
  its default is 1024) spares it those experiments: it is many times sooner with what nobody knows beforehand. autods
  gets no such limit, only --memory. With --defaults it gets none either, and --memory holds its processes, too
  (`prlimit --data`, as autods holds its own): three quarters of what is free on this machine unless said.
- the shared-memory op is declared absent in train.py: each process would look for it, and the first compile it, 22 s.
- 2 ranks: a CPU "device" is a NUMA node, so `--num_gpus 2` on a machine with one node ends in an assertion; a hostfile
  with `localhost slots=2` wants ssh. LOCAL_SIZE=2 in the environment, a variable of the launcher's own that is not
  documented for this, does start it; --local-size shows how far that goes.

Its answer need not be its fastest experiment: after its last experiments (autotuner.py, run_tuning_micro_batch_sizes)
it reads `metric_file` of the loop before, not of the experiment that just ran, so that they are all recorded with an
older one's samples/s. The list of experiments shows what each really wrote.

The bar: an answer 15 times sooner, not slower than its. Exit code 1 when the first profile misses it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from autods.units import parse_bytes

HERE = Path(__file__).parent / "autotuner"
REPOSITORY = Path(__file__).parents[2]
BAR_SOONER, BAR_THROUGHPUT = 15.0, 1.0
THEIRS = "autotuner"
MOST_MICRO_BATCH = {"gpt2_4x256": 32, "gpt2_8x384": 8}  # so that its experiments end within minutes on two cores
LAUNCHED = re.compile(r"^.*?\[(\d{4}[-\d]+ [\d:,]+)\].*(Launching|Done running) exp_id = \d+, exp_name = (\S+),", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One experiment or trial. samples_per_second: as the tool itself measured it."""

    name: str
    state: str  # ok, or why not
    seconds: float
    samples_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tool found, and when. first_trial_s: until its first trial began. cpu_s: of all its processes."""

    name: str
    ranks: int
    seconds: float
    cpu_s: float
    tried: tuple[Tried, ...]
    first_trial_s: float | None = None
    ds_config: Mapping[str, Any] | None = None
    checkpointing: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A command that ended. lines: of standard error, each with the seconds since the start."""

    code: int | None  # None: cut off
    out: str
    lines: tuple[tuple[float, str], ...]
    seconds: float
    cpu_s: float


@dataclass(slots=True)
class Side:
    """One size, side by side."""

    size: str
    device: str = "cpu"
    answers: list[Answer] = field(default_factory=list)
    turns: dict[str, list[float]] = field(default_factory=dict)  # samples/s
    cpu_turns: dict[str, list[float]] = field(default_factory=dict)  # samples a processor second
    failed_turns: list[str] = field(default_factory=list)
    two_ranks: list[Answer] = field(default_factory=list)


def main() -> int:
    asked = arguments()
    check_requirements()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what runs is ended
    side = Side(size=asked.size, device=asked.device)
    with tempfile.TemporaryDirectory(prefix="autods-autotuner-") as name:
        folder = Path(name)
        for profile in asked.profiles:
            side.answers.append(say(fitted(asked, profile, folder / profile, ranks=1)))
        side.answers.insert(0, say(autotuned(asked, folder / THEIRS, ranks=1)))
        race(asked, side)
        if not asked.one_rank:
            side.two_ranks.append(say(autotuned(asked, folder / "two", ranks=2)))
            if asked.local_size:
                side.two_ranks.append(say(autotuned(asked, folder / "local-size", ranks=2, local_size=True)))
            side.two_ranks.append(say(fitted(asked, "quick", folder / "two-quick", ranks=2)))
    rows = summary(side)
    print(json.dumps({**asdict(side), "summary": rows}, indent=2) if asked.json else shown(side, rows))
    return 0 if passes(rows) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(MOST_MICRO_BATCH), default="gpt2_4x256")
    parser.add_argument("--profiles", type=lambda text: text.split(","), default=["quick", "default"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory", help="the budget of a rank of autods's trials; 4GiB of a CPU rank, else the card's")
    granted = parser.add_mutually_exclusive_group()
    granted.add_argument("--most-micro-batch", type=int, help="the autotuner's limit; 32, for gpt2_8x384 8")
    granted.add_argument(
        "--defaults", action="store_true", help="no such limit; takes twenty minutes, give --limit 3600"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-seconds", type=float, default=6.0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one command; then it is cut off")
    parser.add_argument("--one-rank", action="store_true", help="leave out what happens on 2 ranks")
    parser.add_argument("--local-size", action="store_true", help="the autotuner on 2 ranks with LOCAL_SIZE=2, too")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.device == "cpu":
        if asked.defaults:
            asked.memory = asked.memory or f"{psutil.virtual_memory().available * 3 // 4 // 2**20}MiB"
        else:
            asked.most_micro_batch = asked.most_micro_batch or MOST_MICRO_BATCH[asked.size]
            asked.memory = asked.memory or "4GiB"
    return asked


def check_requirements() -> None:
    missing = []
    if shutil.which("pdsh") is None:
        missing.append("pdsh, which the autotuner calls after each experiment: apt install pdsh")
    if importlib.util.find_spec("tabulate") is None:
        missing.append("tabulate, without which it does not start: pip install --group bench -c constraints.txt")
    if not Path(sys.executable).with_name("deepspeed").exists():
        missing.append("the deepspeed command beside this Python: run it with the Python that has deepspeed installed")
    if missing:
        sys.exit("\n".join(f"autotuner.py: missing: {one}" for one in missing))


# ---- the two tools


def autotuned(asked: argparse.Namespace, folder: Path, *, ranks: int, local_size: bool = False) -> Answer:
    folder.mkdir()
    most = asked.most_micro_batch
    limit = {"max_train_micro_batch_size_per_gpu": most} if most else {}
    (folder / "ds_config.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
                "autotuning": {"enabled": True, "fast": True, **limit},
            }
        )
    )
    command = ["deepspeed", "--autotuning", "tune", "--num_gpus", str(ranks), str(HERE / "train.py")]
    command += ["--model", str(HERE / f"{asked.size}.py"), "--deepspeed", "--deepspeed_config", "ds_config.json"]
    if asked.device == "cpu" and asked.defaults:
        command = ["prlimit", f"--data={parse_bytes(asked.memory)}", *command]
    more = {"DS_ACCELERATOR": asked.device, **({"LOCAL_SIZE": str(ranks)} if local_size else {})}
    ran = run(command, cwd=folder, more=more, limit_s=asked.limit)
    log = "\n".join([ran.out, *(line for _, line in ran.lines)])
    tried = experiments(folder / "autotuning_results", log)
    best = folder / "autotuning_results" / "ds_config_optimal.json"
    found = json.loads(best.read_text()) if best.exists() else None
    errors = [line for line in log.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    why = None if found else errors[-1] if errors else "no answer" if ran.code is not None else "cut off"
    return Answer(
        name=THEIRS + (" with LOCAL_SIZE" if local_size else ""),
        ranks=ranks,
        seconds=ran.seconds,
        cpu_s=ran.cpu_s,
        tried=tried,
        ds_config=found,
        error=why,
    )


def experiments(results: Path, log: str) -> tuple[Tried, ...]:
    """Each folder of its results; a state as the autotuner itself judges: metrics, or the error it would print."""
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs there, and standard output is for our answer
        from deepspeed.autotuning.utils import search_error

    times: dict[str, dict[str, datetime]] = {}
    for when, what, name in LAUNCHED.findall(log):
        times.setdefault(name, {})[what] = datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f")
    tried = []
    for name, seen in times.items():
        seconds = (seen["Done running"] - seen["Launching"]).total_seconds() if len(seen) == 2 else 0.0
        metrics, error = results / name / "metrics.json", search_error(str(results / name / "stderr.log"))
        if metrics.exists():
            rate = float(json.loads(metrics.read_text())["throughput"])
            tried.append(Tried(name=name, state="ok", seconds=seconds, samples_per_second=rate))
            continue
        profiled = (results / name / "model_info.json").exists()
        state = "ok" if profiled else f"failed: {(error or 'no metrics').strip()}"
        tried.append(Tried(name=name, state=state if len(seen) == 2 else "did not end", seconds=seconds))
    return tuple(tried)


def fitted(asked: argparse.Namespace, profile: str, out: Path, *, ranks: int) -> Answer:
    command = [sys.executable, "-m", "autods", "fit", str(HERE / f"{asked.size}.py"), "--device", asked.device]
    command += ["--gpus", str(ranks), "--precision", "fp32", "--config", profile]
    command += ["--gpu-memory", asked.memory] if asked.memory else []
    ran = run([*command, "--fresh", "--json", "--out", str(out)], cwd=REPOSITORY, more={}, limit_s=asked.limit)
    report = json.loads(ran.out) if ran.out.strip() else {}
    trials = report.get("trials", [])
    fits = report.get("status") == "fit"
    said = report.get("error", {}).get("message") or (ran.lines[-1][1] if ran.lines else "")
    ends = [at for at, line in ran.lines if line.startswith("trial ")]
    return Answer(
        name=f"autods {profile}",
        ranks=ranks,
        seconds=ran.seconds,
        cpu_s=ran.cpu_s,
        tried=tuple(tried_of(trial) for trial in trials),
        first_trial_s=ends[0] - trials[0]["seconds"] if ends and trials else None,
        ds_config=report["ds_config"] if fits else None,
        checkpointing=fits and report["knobs"]["checkpointing"],
        error=None if fits else "cut off" if ran.code is None else said,
    )


def tried_of(trial: Mapping[str, Any]) -> Tried:
    outcome, knobs = trial["outcome"], trial["knobs"]
    fits = outcome["kind"] == "fit"
    return Tried(
        name=f"{trial['rung']}, micro batch {knobs['micro_batch']} × {knobs['accumulation']} ({trial['phase']})",
        state="ok" if fits else f"{outcome['kind']}: {outcome.get('evidence', '')}",
        seconds=trial["seconds"],
        samples_per_second=outcome["samples_per_second"] if fits else None,
    )


def run(command: Sequence[str], *, cwd: Path, more: Mapping[str, str], limit_s: float) -> Ran:
    """Run it in a session of its own; what is left of it when the time is up is killed."""
    scripts = str(Path(sys.executable).parent)
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "AUTODS_KEEP_SIMULATIONS": "0",  # a fit simulates by itself
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **more,
    }
    began, spent = time.monotonic(), Spent()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=err, start_new_session=True)
        try:
            lines, code = followed(process, err, began, limit_s, spent)
        except BaseException:  # Ctrl-C: it is in another session and would go on
            end(process)
            raise
        out.seek(0)
        said = out.read()
    return Ran(code=code, out=said, lines=lines, seconds=time.monotonic() - began, cpu_s=spent.total_s)


def followed(
    process: subprocess.Popen[bytes], err: Any, began: float, limit_s: float, spent: Spent
) -> tuple[tuple[tuple[float, str], ...], int | None]:
    """The lines of standard error with their time, until the process ends or is ended."""
    lines: list[tuple[float, str]] = []
    while True:
        spent.look(process.pid)
        code = process.poll()
        at = time.monotonic() - began
        err.seek(sum(len(line.encode()) + 1 for _, line in lines))
        *whole, rest = err.read().split("\n")
        lines += [(at, line) for line in whole]
        if code is not None:
            return (*lines, *([(at, rest)] if rest else [])), code
        if at > limit_s:
            end(process)
            return tuple(lines), None
        time.sleep(0.05)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first, then what is left of its descendants."""
    family = [*psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


class Spent:
    """Processor seconds of a process and its descendants, looked up twice a second.

    What the kernel adds up leaves out descendants that nobody waited for: most of Ray's.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], float] = {}
        self._next = 0.0

    @property
    def total_s(self) -> float:
        return sum(self._seen.values())

    def look(self, pid: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 0.5
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for one in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    used = one.cpu_times()
                    self._seen[one.pid, one.create_time()] = used.user + used.system


# ---- the same plain loop


def race(asked: argparse.Namespace, side: Side) -> None:
    entries = []
    for answer in side.answers:
        if answer.ds_config is None:
            continue
        entry = {"name": answer.name, "ds_config": answer.ds_config, "checkpointing": answer.checkpointing}
        entries.append(entry)
        if answer.checkpointing:
            entries.append({**entry, "name": f"{answer.name}, not recomputing", "checkpointing": False})
    if not entries:
        return
    command = [sys.executable, str(HERE / "loop.py"), "--model", str(HERE / f"{asked.size}.py")]
    command += ["--turns", str(asked.turns), "--seconds", str(asked.turn_seconds)]
    # The loop forks its turns: looking whether there is a card must not initialise CUDA before.
    environment = {**os.environ, "DS_ACCELERATOR": asked.device, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with tempfile.TemporaryFile("w+") as said:
        said.write(json.dumps(entries))
        said.seek(0)
        with subprocess.Popen(
            command, stdin=said, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as loop:
            assert loop.stdout is not None
            for line in loop.stdout:
                turn = json.loads(line)
                if "error" in turn:
                    side.failed_turns.append(f"{turn['name']}: {turn['error']}")
                else:
                    side.turns.setdefault(turn["name"], []).append(turn["samples_per_second"])
                    side.cpu_turns.setdefault(turn["name"], []).append(turn["samples_per_cpu_second"])
                print(f"turn: {line.strip()}", file=sys.stderr, flush=True)


def summary(side: Side) -> list[dict[str, Any]]:
    """A row an answer: how much sooner than the autotuner, and how much faster in the same loop."""
    theirs = next(answer for answer in side.answers if answer.name == THEIRS)
    rows = []
    for answer in side.answers:
        for name in (answer.name, f"{answer.name}, not recomputing"):
            if name != answer.name and name not in side.turns:
                continue
            turns = side.turns.get(name, [])
            rows.append(
                {
                    "name": name,
                    "seconds": answer.seconds,
                    "sooner": theirs.seconds / answer.seconds,
                    "cpu_s": answer.cpu_s,
                    "less_cpu": theirs.cpu_s / answer.cpu_s if answer.cpu_s else None,
                    "trials": len(answer.tried),
                    "failed": sum(one.state != "ok" for one in answer.tried),
                    "config": config_of(answer),
                    "samples_per_second": statistics.median(turns) if turns else None,
                    "faster": ratio(turns, side.turns.get(THEIRS, [])),
                    "faster_by_cpu": ratio(side.cpu_turns.get(name, []), side.cpu_turns.get(THEIRS, [])),
                }
            )
    return rows


def ratio(mine: Sequence[float], its: Sequence[float]) -> float | None:
    """The median of the ratios of turns that ran one after the other."""
    pairs = [one / other for one, other in zip(mine, its, strict=False)]
    return statistics.median(pairs) if pairs else None


def config_of(answer: Answer) -> str:
    if answer.ds_config is None:
        return answer.error or "none"
    config = answer.ds_config
    batch = f"{config['train_micro_batch_size_per_gpu']} × {config.get('gradient_accumulation_steps', 1)}"
    return f"stage {config.get('zero_optimization', {}).get('stage', 0)}, micro batch {batch}"


def passes(rows: Sequence[Mapping[str, Any]]) -> bool:
    """The first profile's answer as it is."""
    ours = next((row for row in rows if row["name"] != THEIRS), None)
    if ours is None or ours["faster"] is None:
        return False
    return bool(ours["sooner"] >= BAR_SOONER and ours["faster"] >= BAR_THROUGHPUT)


# ---- what is printed


def say(answer: Answer) -> Answer:
    """A partial result, as soon as there is one."""
    print(text_of(answer), file=sys.stderr, flush=True)
    return answer


def text_of(answer: Answer) -> str:
    ranks = f"{answer.ranks} rank{'s' if answer.ranks > 1 else ''}"
    head = f"{answer.name}, {ranks}: {config_of(answer)}; {answer.seconds:.1f} s, {answer.cpu_s:.1f} s of processors"
    if answer.first_trial_s is not None:
        trials = sum(one.seconds for one in answer.tried)
        after = answer.seconds - answer.first_trial_s - trials
        head += f" ({answer.first_trial_s:.1f} s before the first trial, {trials:.1f} s in trials, {after:.1f} s else)"
    lines = [head]
    for one in answer.tried:
        rate = f", {one.samples_per_second:.2f} samples/s" if one.samples_per_second else ""
        lines.append(f"  {one.name}: {one.state}{rate} [{one.seconds:.1f} s]")
    return "\n".join(lines)


def shown(side: Side, rows: Sequence[Mapping[str, Any]]) -> str:
    table = Table(
        title=f"{side.size}, one {side.device} rank, fp32", box=None, title_justify="left", header_style="bold"
    )
    for name in ("", "s", "sooner", "CPU s", "less", "trials", "failed", "answer", "samples/s", "faster", "by CPU"):
        table.add_column(name, justify="left" if name in ("", "answer") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['seconds']:.1f}",
            f"{row['sooner']:.1f}×",
            f"{row['cpu_s']:.1f}",
            f"{row['less_cpu']:.1f}×" if row["less_cpu"] else "",
            str(row["trials"]),
            str(row["failed"]),
            row["config"],
            f"{row['samples_per_second']:.2f}" if row["samples_per_second"] else "",
            f"{row['faster']:.2f}×" if row["faster"] else "",
            f"{row['faster_by_cpu']:.2f}×" if row["faster_by_cpu"] else "",
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    with console.capture() as captured:
        console.print(table)
    parts = [captured.get(), *(text_of(answer) for answer in (*side.answers, *side.two_ranks))]
    parts += [f"a turn failed: {one}" for one in side.failed_turns]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
