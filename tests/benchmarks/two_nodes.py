"""Fits on several nodes of a Ray cluster, all of them raylets of this machine, and what is left when one goes.

python tests/benchmarks/two_nodes.py [ladder] [ranks] [kill] [head] [concurrent] [beside] [cut] [--json FILE]

ladder: examples/gpt.py on 4 CPU ranks of one node, and on 2 × 2 of two raylets: are the outcomes of the rungs the same?
ranks: the last rank of the second node dies, runs out of memory or raises, or the driver is killed.
kill: the raylet of a node is killed (SIGKILL) in mid-trial, with a spare node and without one.
head: the process that keeps the cluster together (Ray's GCS) is killed in mid-trial; the fit goes on in another one.
beside: the largest micro batch of four rungs, one after the other and two at a time; then Ctrl-C in the middle of two.
concurrent: two fits at once on a cluster that has room for both, and on one that has room for one at a time.
cut: three nodes in network namespaces with addresses of their own; the link of one goes down in mid-trial. They lie
inside a namespace of our own, nothing outside sees them; where none can be made, that is said.

"gone" runs from the kill, or the cut, to the end of the last rank on that side. Prints a table; writes
tests/benchmarks/results/two_nodes.json, parts that were not run keep their figures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from autods.runner.runner import RayRunner
from tests.support.clusters import begin_fit, cluster, find_raylet, read_records, short_config
from tests.support.fits import ignore, question
from tests.support.namespaces import HEAD, Lab, in_new_namespace, why_no_namespaces
from tests.support.watching import Scene, a_trial, find_pids, read_command, wait_for, wait_until_gone

REPOSITORY = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "two_nodes.json"
BATCHES = REPOSITORY / "tests" / "integration" / "workloads" / "batches.py"
DEMO = REPOSITORY / "examples" / "gpt.py"
TWO = ("--gpus", "4", "--nodes", "2")
TINY = ("--gpu-memory", "1GiB", "--ladder", "zero1")
LONG_S = 900

Row = dict[str, Any]


def ladder() -> Iterator[Row]:
    """The same question on one node and on two. It is the walk that is compared: nothing is tuned or certified."""
    for memory in ("416MiB", "288MiB"):
        asked = ("--gpu-memory", memory, "--config")
        with folder() as out:
            one = ended(begin_fit(DEMO, out, "--gpus", "4", *asked, short_config(out.parent)), out)
        with folder() as out, cluster(2, 2) as address:
            two = ended(begin_fit(DEMO, out, *TWO, "--address", address, *asked, short_config(out.parent)), out)
        not_tried = {"rung": "-", "kind": "", "said": "not tried"}
        for first, second in zip_longest(walked(one), walked(two), fillvalue=not_tried):
            yield {
                "limit": memory,
                "rung": first["rung"],
                "one node": first["said"],
                "two nodes": second["said"],
                "same": (first["rung"], first["kind"]) == (second["rung"], second["kind"]),
            }
        yield {
            "limit": memory, "rung": "the fit", "one node": f"exit {one['code']}, {one['seconds']:.0f} s",
            "two nodes": f"exit {two['code']}, {two['seconds']:.0f} s", "same": one["code"] == two["code"],
        }  # fmt: skip


def walked(fit: Row) -> list[Row]:
    return [rung_of(record) for record in fit["records"] if record["trial"]["purpose"] == "walk"]


def rung_of(record: Row) -> Row:
    outcome = record["outcome"]
    said = outcome["kind"].replace("_", " ")
    if outcome["kind"] == "fit":
        said += f", peak {outcome['memory']['device']['peak_bytes'] / 2**20:.0f} MiB"
    elif outcome["kind"] == "out_of_memory":
        said += f" ({outcome['tier']}, rank {outcome['rank']}, {outcome['phase']})"
    else:
        said += f": {outcome['failure']}"
    return {"rung": record["trial"]["rung"], "kind": outcome["kind"], "said": said}


def ranks() -> Iterator[Row]:
    """A rank of the second node fails: how soon are those of both gone?"""
    with scene() as one, cluster(2, 2) as address:
        asked = question(str(one.path), one.out, gpus=4, nodes=2, address=address)
        with RayRunner(asked, ignore) as runner:
            runner.survey()
            for fault in ("SIGKILL", "exception", "out of memory"):
                for phase in ("build", "forward", "step"):
                    one.choose_fault(fault, phase)
                    outcome = runner.run(a_trial(), id=1).outcome
                    gone = [result.gone_at_s - one.wait_for_fault()["at_s"] for result in runner.results]
                    said = rung_of({"trial": {"rung": "zero1"}, "outcome": asdict(outcome)})["said"]
                    yield {"event": f"{fault} in {phase}", "reported": said, "gone s": [round(s, 2) for s in gone]}
        one.choose_fault("hang", "forward")
        fit = begin(one, address)
        one.wait_for_fault()
        family = one.family()
        began = time.monotonic()
        fit.kill()
        yield {"event": "driver killed in forward", "gone s": [round(wait_until_gone(family, 60) - began, 2)]}
        fit.wait()


def kill() -> Iterator[Row]:
    """A raylet goes in mid-trial."""
    for phase in ("forward", "step"):
        for spare in (True, False):
            with scene() as one, cluster(0, *[2] * (3 if spare else 2)) as address:
                one.choose_fault("hang", phase)
                fit = begin(one, address)
                yield lost(one, fit, phase, lambda pid: find_raylet(pid).kill(), "killed", spare)


def begin(one: Scene, address: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    asked = (*TWO, "--address", address, *TINY, "--config", short_config(one.out.parent))
    return begin_fit(one.path, one.out, *asked, inside=inside)


def lost(
    one: Scene, fit: subprocess.Popen[bytes], phase: str, strike: Callable[[int], None], how: str, spare: bool
) -> Row:
    """Strike the node of the last rank in mid-trial, and see what becomes of both nodes' ranks and of the fit."""
    note = one.wait_for_fault()
    time.sleep(0.5)
    (one.out / "fault.json").unlink()
    family = one.family()
    zygotes = [process for pid in family if (process := psutil.Process(pid)).ppid() not in family]
    nodes = [{child.pid for child in zygote.children()} for zygote in zygotes]
    own = next(ranks for ranks in nodes if note["pid"] in ranks)
    other = next(ranks for ranks in nodes if note["pid"] not in ranks)
    strike(note["pid"])
    began = time.monotonic()
    other_s = wait_until_gone(other, 120) - began
    own_s = wait_until_gone(own, 120) - began
    code = fit.wait(LONG_S)
    first, *after = read_records(one.out)
    outcome = first["outcome"]
    return {
        "event": f"node {how} in {phase}, {'a spare node' if spare else 'no spare node'}",
        "reported": f"{outcome['failure']}: {outcome['evidence']}",
        "other node's ranks gone s": round(other_s, 2),
        "own ranks gone s": round(own_s, 2),
        "then": f"exit {code}: {', '.join(rung_of(record)['said'] for record in after) or last_error(one.out)}",
        "whole s": round(time.monotonic() - began, 1),
    }


def last_error(out: Path) -> str:
    lines = (out / "said.txt").read_text().splitlines()
    return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "nothing said")


def head() -> Iterator[Row]:
    """The head goes in mid-trial: what the fit says, what is left, and what the same command does with another head."""
    with scene() as one:
        one.choose_fault("hang", "forward")
        with cluster(0, 2, 2) as address:
            fit = begin(one, address)
            one.wait_for_fault()
            family = one.family()
            gcs = next(each for each in psutil.Process().children(recursive=True) if each.name() == "gcs_server")
            gcs.kill()
            began = time.monotonic()
            gone_s = wait_until_gone(family, 60) - began
            code = fit.wait(LONG_S)
            yield {
                "event": "head killed in forward",
                "reported": last_error(one.out),
                "ranks and zygotes gone s": round(gone_s, 2),
                "then": f"exit {code} after {time.monotonic() - began:.1f} s",
            }
        (one.out / "fault.json").unlink()
        with cluster(0, 2, 2) as address:
            code = begin(one, address).wait(LONG_S)
            said = [rung_of(record)["said"] for record in read_records(one.out)]
            yield {"event": "the same command, another head", "then": f"exit {code}: {', '.join(said)}"}


def beside() -> Iterator[Row]:
    """Capacity on two raylets: the same sizes, one search at a time and two; both end with Ctrl-C."""
    with cluster(0, 2, 2) as address:
        for trials in (1, 2):
            with folder() as out:
                began = time.monotonic()
                begin_capacity(address, out, trials).wait(LONG_S)
                cells = json.loads((out / "probe.json").read_text())["cells"]
                yield {
                    "trials at a time": trials,
                    "largest micro batches": {cell["values"]["rung"]: cell["micro_batch"] for cell in cells},
                    "trials": sum(len(cell["trials"]) for cell in cells),
                    "seconds": round(time.monotonic() - began, 1),
                }
        with folder() as out:
            probe = begin_capacity(address, out, 2)
            wait_for(lambda: len(journaled(out, "started")) > 1 + len(journaled(out, "finished")), LONG_S)
            family = {pid for pid in find_pids("autods.runner.zygote") if str(BATCHES) in read_command(pid)}
            probe.send_signal(signal.SIGINT)
            began = time.monotonic()
            yield {
                "event": "Ctrl-C while two trials run",
                "processes gone s": round(wait_until_gone(family, 60) - began, 2),
                "then": f"exit {probe.wait(LONG_S)}, {len(journaled(out, 'interrupted'))} trials are asked again",
            }


def begin_capacity(address: str, out: Path, trials: int) -> subprocess.Popen[bytes]:
    out.mkdir(parents=True)
    asked = ("--gpus", "2", "--gpu-memory", "192MiB", "--vary", "rung=ddp,zero1,zero2,zero3", "--precision", "fp32")
    common = ("--device", "cpu", "--no-forecast", "--config", "quick", "--capacity", "--address", address)
    command = [sys.executable, "-m", "autods", "probe", str(BATCHES), *asked, *common, "--out", str(out)]
    with open(out / "said.txt", "wb") as file:
        return subprocess.Popen(
            [*command, "--parallel-trials", str(trials)], stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


def journaled(out: Path, kind: str) -> list[Row]:
    if not (out / "journal.jsonl").exists():
        return []
    lines = (out / "journal.jsonl").read_text().splitlines()
    return [row for line in lines if line.endswith("}") and (row := json.loads(line))["kind"] == kind]


def concurrent() -> Iterator[Row]:
    """Two fits at once: side by side where there is room, one after the other where there is none."""
    for cpus in (4, 2):
        with scene() as one, scene() as two, cluster(0, cpus, cpus) as address:
            began = time.monotonic()
            fits = [(each, begin(each, address)) for each in (one, two)]
            ends: dict[int, float] = {}
            while len(ends) < 2:
                for each, fit in fits:
                    if fit.poll() is not None:
                        ends.setdefault(id(each), time.monotonic() - began)
                time.sleep(0.05)
            waited = [line for each in (one, two) for line in (each.out / "said.txt").read_text().splitlines()]
            yield {
                "cluster": f"2 nodes × {cpus} CPUs, two fits of 2 × 2 ranks",
                "exit codes": [fit.returncode for _, fit in fits],
                "outcomes": [
                    sorted({rung_of(record)["kind"] for record in read_records(each.out)}) for each in (one, two)
                ],
                "ended s": [round(ends[id(each)], 1) for each in (one, two)],
                "said": next((line for line in waited if "waiting for" in line), "nobody had to wait"),
            }


def cut() -> Iterator[Row]:
    """The link of a node goes down in mid-trial."""
    why = why_no_namespaces()
    if why is not None:
        yield {"event": "link cut", "reported": f"not measured: {why}"}
        return
    said = subprocess.run(in_new_namespace([sys.executable, __file__, "--inside"]), stdout=subprocess.PIPE, check=True)
    yield json.loads(said.stdout.splitlines()[-1])


def cut_inside() -> Row:
    """In a network namespace of our own."""
    with scene() as one, Lab(3, cpus=2) as lab:
        one.choose_fault("hang", "forward")
        fit = begin(one, lab.address, inside=lab.at(HEAD))
        try:
            return lost(one, fit, "forward", lambda pid: lab.cut(lab.node_of(pid)), "cut off", True)
        finally:
            fit.kill()


def ended(fit: subprocess.Popen[bytes], out: Path) -> Row:
    began = time.monotonic()
    try:
        code = fit.wait(LONG_S)
    finally:
        if fit.poll() is None:
            fit.send_signal(signal.SIGINT)
            fit.wait(30)
    return {"code": code, "seconds": time.monotonic() - began, "records": read_records(out)}


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="two_nodes_", ignore_cleanup_errors=True) as name:
        yield Path(name) / "out"


@contextmanager
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="two_nodes_", ignore_cleanup_errors=True) as name:
        yield Scene.at(Path(name))


PARTS = {
    "ladder": ladder,
    "ranks": ranks,
    "kill": kill,
    "head": head,
    "concurrent": concurrent,
    "beside": beside,
    "cut": cut,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all, if none is named")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(cut_inside()))
        return
    results: dict[str, Any] = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    results["machine"] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    for name in asked.parts or PARTS:
        results[name] = []
        print(f"\n{name}")
        for row in PARTS[name]():
            results[name].append(row)
            print("  " + "\n    ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
        asked.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
