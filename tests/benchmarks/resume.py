"""Kill the driver of a fit at random moments and start it again: is anything run twice, is the answer the same?

python tests/benchmarks/resume.py [--kills 10] [--seed 0] [--workload model.py] [--gpu-memory 276MiB]

One fit runs undisturbed. The same fit runs again, its driver is killed with SIGKILL at a random moment after its start,
and the same command goes on; a fit that ends before its kill comes makes room for another, until all kills have come.
The finished journal alone must then give the same answer once more. Exit code 1 when a finished trial was run again, a
rank survived, or an answer differs; timings are noisy, so one that differs is printed with the timings that decided it.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


def main() -> int:
    asked = arguments()
    with tempfile.TemporaryDirectory(prefix="autods-resume-") as folder:
        undisturbed = Path(folder) / "undisturbed"
        began = time.monotonic()
        run(asked, undisturbed).wait()
        whole_s = time.monotonic() - began
        print(f"undisturbed: {whole_s:.1f} s, {show(answer(undisturbed))}", flush=True)
        fits, survivors = kill_often(asked, Path(folder), whole_s)
        told = [judge(asked, out, undisturbed) for out in fits]
    twice, cut_short = sum(one.twice for one in told), sum(one.cut_short for one in told)
    print(f"{asked.kills} kills in {len(fits)} fits")
    print(f"finished trials run again:        {twice}")
    print(f"trials cut short and tried again: {cut_short}")
    print(f"ranks alive 2 s after a kill:     {survivors}")
    print(f"the journal gives its answer again, without a trial: {sum(one.replays for one in told)} of {len(told)}")
    print(f"the answer of the undisturbed fit: {sum(one.same for one in told)} of {len(told)}")
    return 0 if not twice and not survivors and all(one.replays and one.same for one in told) else 1


@dataclass(frozen=True)
class Judged:
    """What a finished fit that was killed shows."""

    twice: int
    cut_short: int
    replays: bool
    same: bool


def judge(asked: argparse.Namespace, out: Path, undisturbed: Path) -> Judged:
    first, before = answer(out), (out / "journal.jsonl").read_bytes()
    same = answer(undisturbed) == first
    if not same:
        print(f"another answer: {show(first)}")
        for one in (undisturbed, out):
            print(f"  {one.name}: {timings(one)}; {json.dumps(read(one)['reasons'], ensure_ascii=False)}")
    (out / "report.json").unlink()
    run(asked, out).wait()
    replays = answer(out) == first and (out / "journal.jsonl").read_bytes() == before
    twice, cut_short = run_again(out)
    return Judged(twice, cut_short, replays, same)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", type=Path, default=HERE / "workloads" / "metronome.py")
    parser.add_argument("--gpu-memory", default="276MiB")
    parser.add_argument("--config", default=str(HERE / "resume.toml"))
    return parser.parse_args()


def run(asked: argparse.Namespace, out: Path) -> subprocess.Popen[bytes]:
    """The fit, always by the same command."""
    command = [sys.executable, "-m", "autods", "fit", asked.workload, "--gpus", "2", "--device", "cpu"]
    command += ["--gpu-memory", asked.gpu_memory, "--config", asked.config, "--out", out, "--quiet"]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)


def kill_often(asked: argparse.Namespace, folder: Path, whole_s: float) -> tuple[list[Path], int]:
    """Kill a driver `asked.kills` times: the fits, all finished, and how many ranks were there 2 s after a kill."""
    chance = random.Random(asked.seed)
    fits, survivors, kills = [folder / "killed 1"], 0, 0
    while kills < asked.kills:
        wait_s = chance.uniform(0.5, whole_s)
        driver = run(asked, fits[-1])
        try:
            driver.wait(wait_s)
        except subprocess.TimeoutExpired:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            kills += 1
            time.sleep(2)
            left = of_a_fit(asked.workload)
            survivors += len(left)
            print(
                f"kill {kills:2}: {wait_s:4.1f} s after the start, {state(fits[-1])}, ranks left: {len(left)}",
                flush=True,
            )
        else:
            print(f"{fits[-1].name}: finished", flush=True)
            fits.append(folder / f"killed {len(fits) + 1}")
    run(asked, fits[-1]).wait()
    return fits, survivors


def of_a_fit(workload: Path) -> list[int]:
    """Zygotes and ranks (they keep the zygote's command line)."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "autods.runner.zygote" in words and any(str(workload) in word for word in words):
            found.append(process.pid)
    return found


def rows(out: Path) -> list[dict[str, Any]]:
    path = out / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def state(out: Path) -> str:
    kinds = Counter(row["kind"] for row in rows(out))
    return f"{kinds['finished']} trials finished, {kinds['started']} starts"


def run_again(out: Path) -> tuple[int, int]:
    """Starts of trials that had been finished, and starts that were never finished."""
    finished: set[str] = set()
    twice = starts = 0
    for row in rows(out):
        if row["kind"] == "started":
            starts += 1
            twice += row["key"] in finished
        elif row["kind"] == "finished":
            finished.add(row["key"])
    return twice, starts - len(finished)


def read(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def answer(out: Path) -> dict[str, Any]:
    """What a fit is for."""
    report = read(out)
    return {key: report[key] for key in ("status", "rung", "knobs", "ds_config")}


def timings(out: Path) -> str:
    """samples/s of the trials that fitted."""
    told = []
    for trial in read(out)["trials"]:
        if trial["outcome"]["kind"] == "fit":
            rate = trial["outcome"]["samples_per_second"]
            told.append(f"{trial['phase']} {trial['knobs']['micro_batch']}: {rate:.2f}/s")
    return ", ".join(told)


def show(found: dict[str, Any]) -> str:
    knobs = found["knobs"]
    return f"{found['rung']}, micro batch {knobs['micro_batch']}, {json.dumps(knobs['settings'])}"


if __name__ == "__main__":
    sys.exit(main())
