"""What deciding costs as the world grows: 8 to 8,192 ranks, eight to a node, without one GPU.

python tests/benchmarks/scale.py [search failures plan] [--worlds 8,64,512,8192] [--seeds 3] [--json]

search: whole fits (the default config, tuning and certificate included) of made-up machines
(tests/support/surfaces.py) on a scripted cluster: every rank of every node reports each trial as a real one does, and
what a fit does with that is what is measured: processor seconds of deciding (search, forecasts' correction, Optuna,
journal), of joining all ranks' reports to one outcome, bytes of the journal, of report.json, and of the process at
its peak.

failures: one trial in which every rank runs out of memory within a second, and one in which a rank does and the others
notice: processor seconds until the first cause is found, bytes of its journal line.

plan: `autods plan` of an 8-billion-parameter Llama: processor seconds, peak bytes of its processes
together, and what the forecast says a rank of ZeRO-1 and of ZeRO-3 needs.

Each row is a process of its own. Results: results/scale.json. Exit code 1 when deciding grows with the world at all
(more than twice from the smallest to the largest), or anything grows faster than the world does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from autods.system.host import installed_versions
from autods.units import format_bytes

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "scale.json"
PER_NODE = 8
WORLDS = (8, 64, 512, 8192)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU {gpu} has a total capacity of 79.15 GiB of which 1.{gpu}2 GiB"
    " is free. Process {pid} has 77.80 GiB memory in use. Of the allocated memory 70.11 GiB is allocated by PyTorch,"
    " and 6.{gpu}0 GiB is reserved by PyTorch but unallocated."
)
NOTICED = "NCCL error: remote process exited or there was a network error; Connection closed by remote peer"
FRAME = '  File "/usr/lib/python3/site-packages/deepspeed/runtime/zero/stage3.py", line {line}, in step\n    work()\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="search, failures, plan; all by default")
    parser.add_argument("--worlds", type=lambda text: [int(one) for one in text.split(",")], default=list(WORLDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(PARTS[asked.parts[0]](asked.worlds[0], asked.seeds)))
        return 0
    said = {part: [row_of(part, world, asked.seeds) for world in asked.worlds] for part in asked.parts or PARTS}
    keep(said)
    print(json.dumps(said, indent=1) if asked.json else table(said))
    return 0 if all(map(flat_enough, said.values())) else 1


def row_of(part: str, world: int, seeds: int) -> dict[str, Any]:
    """In a process of its own, whose peak is then this row's alone."""
    command = [sys.executable, __file__, part, "--one", "--worlds", str(world), "--seeds", str(seeds)]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    row: dict[str, Any] = json.loads(said.splitlines()[-1])
    print(f"  {part}, {world} ranks: {row}", file=sys.stderr, flush=True)
    return {"world": world, **row}


# ---- a scripted cluster: nodes whose ranks report


@dataclass(slots=True)
class Cluster:
    """Answers trials as `RayRunner` does: from every rank's report. The seconds of making them up are left out."""

    surface: Any
    settings: Any
    scripted_s: float = 0.0
    joined_s: float = 0.0
    trials: int = 0

    def survey(self) -> Any:
        return self.surface.survey()

    def final_config(self, trial: Any) -> dict[str, Any]:
        return dict(self.surface.final_config(trial))

    def run(self, trial: Any, *, id: int) -> Any:
        from autods.runner.outcome import judge_trial
        from autods.types import Fit, Record

        began = time.process_time()
        outcome = self.surface.answer(trial)
        job = job_of(self.settings, trial)
        reports = reports_of_a_fit(outcome, job) if isinstance(outcome, Fit) else reports_of_out_of_memory(job)
        made = time.process_time()
        joined = judge_trial(reports, job, wall_s=8.0, tokens_per_sample=None, host_bytes=2**40)
        self.scripted_s += made - began
        self.joined_s += time.process_time() - made
        self.trials += 1
        if isinstance(joined, Fit):
            joined = replace(joined, losses=outcome.losses)
        return Record(id=id, trial=trial, outcome=joined, seconds=8.0)


def job_of(settings: Any, trial: Any) -> Any:
    from autods.rank.job import RankJob

    return RankJob(
        job="train", source=settings.source, device="cuda", folder="/tmp/none", scratch="/tmp/none/scratch",
        world_size=settings.gpus, local_ranks=tuple(range(PER_NODE)), micro_batch=trial.knobs.micro_batch,
        accumulation=trial.knobs.accumulation, steps=trial.steps, exam=trial.exam, limit_bytes=settings.device_bytes,
    )  # fmt: skip


def reports_of_a_fit(fit: Any, job: Any) -> list[Any]:
    """Every rank a little different, the slowest and fullest of them as the surface says."""
    examined = asdict(fit.examined) if fit.examined else None

    def result(rank: int) -> dict[str, Any]:
        slower = 1 - 0.01 * (rank % 7) / 7
        return {
            "kind": "trial",
            "step_s": [time * slower for time in fit.step_s],
            "steps_s": sum(fit.step_s),
            "losses": [8.0 - 0.1 * index for index in range(len(fit.step_s))],
            "examined": examined,
            "communication": {"ops": {"all_reduce": {"calls": 4, "bytes": 2**30, "sent_bytes": 2**31, "seconds": 0.1}},
                              "step_s": 0.5},
            "build_s": 1.0,
            "init_s": 2.0,
            "peaks": {"device": int(fit.device_peak_bytes * slower), "host": 2**30, "pinned": None, "alloc_retries": 0},
        }  # fmt: skip

    return [node([end(rank, {"result": result(rank)}) for rank in ranks]) for ranks in nodes(job)]


def reports_of_out_of_memory(job: Any, *, all_at_once: bool = True) -> list[Any]:
    """Every rank runs out, the last one first; or that alone does, and half of the others notice before it says so."""
    culprit = job.world_size - 1

    def failed(rank: int) -> dict[str, Any]:
        own = all_at_once or rank == culprit
        message = OUT_OF_MEMORY.format(gpu=rank % PER_NODE, pid=1000 + rank) if own else NOTICED
        types = ["OutOfMemoryError", "RuntimeError", "Exception"] if own else ["DistBackendError", "RuntimeError"]
        frames = "".join(FRAME.format(line=1000 + 7 * depth) for depth in range(40))
        error = {
            "types": types, "message": message, "causes": [], "user_frame": None, "contract": None, "hint": None,
            "traceback": f"Traceback (most recent call last):\n{frames}{types[0]}: {message}\n",
        }  # fmt: skip
        at_s = 1000.0 - 1e-4 * (rank if all_at_once or rank != culprit else culprit / 2)
        return end(rank, {"error": error, "free_bytes": 2**30, "idle_bytes": 2**30}, exit=1, at_s=at_s)

    return [node([failed(rank) for rank in ranks]) for ranks in nodes(job)]


def nodes(job: Any) -> Iterator[range]:
    return (range(first, first + PER_NODE) for first in range(0, job.world_size, PER_NODE))


def end(rank: int, record: dict[str, Any], *, exit: int = 0, at_s: float = 1000.0) -> dict[str, Any]:
    """As `runner.monitor` notes it, in JSON."""
    where = {"phase": "forward" if exit else "done", "step": 1, "at_s": at_s}
    return {"rank": rank, "exit_code": exit, **record, **where}


def node(ends: list[dict[str, Any]]) -> Any:
    """A node's report, as it comes out of the wire: no two ranks' texts are one object."""
    from autods.runner.node_messages import decode

    host = {
        "group_kills": 0, "machine_kills": 0, "limit_bytes": 2**41, "least_free_bytes": 2**40,
        "peak_rss_bytes": {str(one["rank"]): 2**30 for one in ends},
    }  # fmt: skip
    return decode(json.dumps({"kind": "report", "ranks": ends, "gone_at_s": 1001.0, "host": host}).encode())


# ---- the parts, each in a process of its own


def search(world: int, seeds: int) -> dict[str, Any]:
    """Whole fits of the same made-up models on this many ranks."""
    from autods.config.profiles import read_profile
    from autods.tuner.fit import fit
    from tests.support.surfaces import Surface, SurfaceForecaster, searching

    rows: list[dict[str, float]] = []
    before = 0
    for seed in range(-1, seeds):  # the first one pays for imports (Optuna's sampler loads torch)
        surface = Surface(max(0, seed), world_size=world)
        with searching(surface, profile=read_profile("default")) as made:
            settings = replace(made.settings, out=made.settings.out / "fit")
        cluster = Cluster(surface, settings)
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            settings = replace(settings, out=Path(folder))
            fit(
                settings, listen=lambda event: None,
                start=lambda _, __, cluster=cluster: contextlib.nullcontext(cluster),
                forecaster=lambda *_, surface=surface: contextlib.nullcontext(SurfaceForecaster(surface)),
            )  # fmt: skip
            spent = time.process_time() - began - cluster.scripted_s
            sizes = {name: (Path(folder) / name).stat().st_size for name in ("journal.jsonl", "report.json")}
        if seed < 0:
            before = peak_rss()
            continue
        rows.append(
            {
                "trials": cluster.trials,
                "deciding_s": spent - cluster.joined_s,
                "joining_s": cluster.joined_s,
                "journal_bytes": sizes["journal.jsonl"],
                "report_bytes": sizes["report.json"],
            }
        )
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    each = {name: total[name] / total["trials"] for name in total if name != "trials"}
    return {
        "trials": total["trials"],
        "deciding_ms_a_trial": round(each["deciding_s"] * 1000, 2),
        "joining_ms_a_trial": round(each["joining_s"] * 1000, 2),
        "journal_bytes_a_trial": round(each["journal_bytes"]),
        "report_bytes_a_trial": round(each["report_bytes"]),
        "peak_bytes": peak_rss(),
        "after_imports_bytes": before,
    }


def failures(world: int, seeds: int) -> dict[str, Any]:
    """The first cause among as many ends as there are ranks."""
    from autods.journal import Journal
    from autods.runner.outcome import find_failure
    from autods.types import Knobs, OutOfMemory, Record, Trial
    from tests.support.surfaces import Surface, searching

    with searching(Surface(0, world_size=world)) as made:
        settings = made.settings
    trial = Trial(rung="zero3", knobs=Knobs(), purpose="walk")
    job, row = job_of(settings, trial), {}
    before = peak_rss()
    for name, all_at_once in (("all", True), ("one", False)):
        reports = reports_of_out_of_memory(job, all_at_once=all_at_once)
        began = time.process_time()
        outcome = find_failure(reports, job)
        row[f"{name}_ms"] = round((time.process_time() - began) * 1000, 1)
        assert isinstance(outcome, OutOfMemory), outcome
        assert outcome.rank == world - 1, outcome
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(Path(folder) / "journal.jsonl")
            journal.write_record(Record(id=1, trial=trial, outcome=outcome, seconds=1.0))
            row[f"{name}_journal_bytes"] = journal.path.stat().st_size
        row[f"{name}_reports_bytes"] = sum(len(json.dumps(asdict(report))) for report in reports)
    return {**row, "peak_bytes": peak_rss(), "before_bytes": before}


def plan(world: int, seeds: int) -> dict[str, Any]:
    """One plan, with its processes."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "llama-8b" / "config.json"
        config.parent.mkdir()
        config.write_text(json.dumps(LLAMA))
        command = [sys.executable, "-m", "autods", "plan", str(config), "--gpus", str(world), "--fresh"]
        command += ["--nodes", str(-(-world // PER_NODE)), "--gpu-memory", "80GiB", "--host-memory", "2TiB"]
        command += ["--seq-len", "4096", "--ladder", "zero1,zero3", "--no-largest", "--json", "--quiet"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        family = Family(process.pid)
        out, _ = process.communicate()
        family.stop()
    said = {row["rung"]: row for row in json.loads(out)["rungs"]}
    times = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_s": round(max(family.cpu_s, times.ru_utime + times.ru_stime), 1),
        "peak_bytes": family.peak_bytes,
        "json_bytes": len(out),
        **{f"{rung}_rank_bytes": said[rung]["device"]["peak_bytes"] for rung in ("zero1", "zero3")},
    }


@dataclass(slots=True)
class Family:
    """Looks at a process and its descendants ten times a second until it is stopped."""

    pid: int
    peak_bytes: int = 0
    _cpu: dict[int, float] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu.values())

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            held = 0
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(self.pid)
                for one in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        held += one.memory_info().rss
                        times = one.cpu_times()
                        self._cpu[one.pid] = times.user + times.system
            self.peak_bytes = max(self.peak_bytes, held)


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


PARTS = {"search": search, "failures": failures, "plan": plan}


# ---- what is said of it

_FLAT = {
    "search": ("deciding_ms_a_trial", "journal_bytes_a_trial", "report_bytes_a_trial"),
    "failures": ("all_journal_bytes", "one_journal_bytes"),
    "plan": ("cpu_s", "peak_bytes", "json_bytes"),
}
_LINEAR = {"search": ("joining_ms_a_trial",), "failures": ("all_ms", "one_ms", "all_reports_bytes"), "plan": ()}


def flat_enough(rows: Sequence[Mapping[str, Any]]) -> bool:
    """What should not grow did not double; what may grow with the world grew no faster."""
    part = next(part for part, names in _FLAT.items() if all(name in rows[0] for name in names))
    first, last = rows[0], rows[-1]
    ratio = last["world"] / first["world"]
    return all(last[name] <= 2 * first[name] for name in _FLAT[part]) and all(
        last[name] <= 2 * ratio * max(first[name], 1.0) for name in _LINEAR[part]
    )


def table(said: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """For people."""
    lines = []
    for part, rows in said.items():
        names = [name for name in rows[0] if name != "world"]
        shown = [[cell(name, row[name]) for row in rows] for name in names]
        lines.append(f"{part + ', ranks':28}" + "".join(f"{row['world']:>14,}" for row in rows))
        lines += [
            f"  {name.replace('_', ' '):26}" + "".join(f"{one:>14}" for one in each)
            for name, each in zip(names, shown, strict=True)
        ]
        lines.append("  as it should be" if flat_enough(rows) else "  GROWS TOO FAST")
    return "\n".join(lines)


def cell(name: str, value: Any) -> str:
    return format_bytes(value) if "bytes" in name and isinstance(value, int) else f"{value:,}"


def keep(said: Mapping[str, Any]) -> None:
    """Into the result file, beside what other commands found."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part, rows in said.items():
        by_world = {row["world"]: row for row in (*known.get(part, ()), *rows)}
        known[part] = [by_world[world] for world in sorted(by_world)]
    RESULTS.write_text(json.dumps({**known, "versions": installed_versions()}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
