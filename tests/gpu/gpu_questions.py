"""Questions that only a card answers, each by itself: what autods assumes about torch, the driver and DeepSpeed.

Those of trials run on the small GPT-2 through the ranks of a fit, the others in a process each (`gpu_probes.py`).
An answer is a dict of figures, and `holds`: whether autods' assumption is right, None where the figures are the answer.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_cells import Cell, Site, config_of, source
from gpu_constants import collectives, contexts, row_of
from gpu_ranks import Ranks
from gpu_results import find_answer

from autods.config.deepspeed import merge
from autods.forecast.predict.memory_model import read_overheads
from autods.types import Fit, OutOfMemory, Steps
from autods.units import parse_bytes

HERE = Path(__file__).resolve().parent
_PROBE_S = 180.0
_TIMED = Steps(warmup=2, timed=5, most_timed=20, spread=0.02, budget_s=10.0)
Answer = dict[str, Any]


class NotAsked(Exception):
    """The question cannot be asked here; the message says why."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """Ranks with a model on this machine's devices, and the results that are known so far."""

    ranks: Ranks
    site: Site
    model: str
    known: Mapping[str, Any]

    def run(self, rung: str, steps: Steps = _TIMED, limit: int | None = None, **config: Any) -> Answer:
        """Run a trial of micro batch 1 with these parts of the DeepSpeed config; return what it measured."""
        cell = Cell(
            model=self.model, precision=self.site.precision, rung=rung, world_size=self.site.ranks, card_bytes=limit,
            micro_batch=1,
        )  # fmt: skip
        assert self.ranks.facts is not None
        ds_config = merge(config_of(cell, self.ranks.facts, self.site), config)
        outcome, peaks, _ = self.ranks.run(
            ds_config=ds_config, steps=steps, limit_bytes=limit, checkpointing=self.ranks.facts.checkpointing
        )
        if isinstance(outcome, Fit):
            speed = {"samples_per_second": outcome.samples_per_second, "step_s": outcome.step_s}
            return {"kind": "fit", **speed, "device_in_use": peaks.get("device"), **peaks}  # a CPU rank has no cache
        if isinstance(outcome, OutOfMemory):
            return {"kind": "out_of_memory", "tier": outcome.tier, "evidence": outcome.evidence}
        raise NotAsked(outcome.evidence)


def ask_beside(bench: Bench) -> Answer:
    """Do context and NCCL take what the forecast's constants say?"""
    context = row_of("CUDA context", [bench.known])
    measured = {context: contexts(bench.known), "NCCL": collectives(bench.known)}
    rows = {row.name: list(map(parse_bytes, row.bytes)) for row in read_overheads().constant if row.name in measured}
    if not measured[context]:
        raise NotAsked("the part `context` has measured nothing")
    within = [rows[name][0] <= size <= rows[name][2] for name, sizes in measured.items() for size in sizes]
    return {"holds": all(within), "measured_bytes": measured, "forecast_bytes": rows}


def ask_limit(bench: Bench) -> Answer:
    """Does a trial on an emulated card stay within it, with all that it holds, and does a smaller one run out?"""
    whole = bench.run("ddp")
    limit = int(whole["device"] * 1.03)
    roomy, tight = bench.run("ddp", limit=limit), bench.run("ddp", limit=int(whole["device_in_use"] * 0.9))
    stays = roomy["kind"] == "fit" and roomy["device"] <= limit
    ran_out = tight["kind"] == "out_of_memory"
    return {"holds": stays and ran_out, "whole": whole, "limit_bytes": limit, "roomy": roomy, "tight": tight}


def ask_retries(bench: Bench) -> Answer:
    """Between what is in use and what is reserved: where does the allocator begin to retry, and at what speed?"""
    whole = bench.run("ddp")
    steps = [whole["device_in_use"] + (whole["device"] - whole["device_in_use"]) * part // 4 for part in range(5)]
    return {"holds": None, "whole": whole, "by_limit": {size: bench.run("ddp", limit=int(size)) for size in steps}}


def ask_adam(bench: Bench) -> Answer:
    """What do torch's AdamW with foreach and with fused, and DeepSpeed's own, take in time and memory?"""
    kinds = {
        "foreach": {"torch_adam": True, "foreach": True, "fused": False},
        "fused": {"torch_adam": True, "foreach": False, "fused": True},
    }
    if bench.site.device == "cuda" and bench.ranks.build("fused_adam", _PROBE_S):
        kinds["deepspeed"] = {"torch_adam": False}
    adams = {name: bench.run("ddp", optimizer={"type": "AdamW", "params": more}) for name, more in kinds.items()}
    fused, foreach = adams["fused"], adams["foreach"]
    faster = fused.get("samples_per_second", 0) >= foreach.get("samples_per_second", 0)
    return {"holds": faster and fused.get("device_in_use", 0) <= foreach.get("device_in_use", 0), **adams}


def ask_overlap(bench: Bench) -> Answer:
    """Is overlap_comm faster for ZeRO-1 and -2, and what memory does it take?"""
    if bench.site.ranks < 2:
        raise NotAsked("one rank sends nothing")
    answers = {
        rung: {str(on): bench.run(rung, zero_optimization={"overlap_comm": on}) for on in (False, True)}
        for rung in ("zero1", "zero2")
    }
    return {"holds": None, **answers}


def ask_warmup(bench: Bench) -> Answer:
    """After how many steps has ZeRO-3 its speed? Its first step records the trace that the later ones prefetch by."""
    run = bench.run("zero3", steps=Steps(warmup=0, timed=8, most_timed=8))
    times = run.get("step_s") or [0.0]
    settled = statistics.median(times[len(times) // 2 :])
    slow = [index for index, seconds in enumerate(times) if seconds > 1.1 * settled]
    return {"holds": max(slow, default=-1) < 1, "steps_until_settled": max(slow, default=-1) + 1, "step_s": times}


def ask_pinned(bench: Bench) -> Answer:
    """What do pinned offload buffers take, by torch's count and by the host's?"""
    return {"holds": None, "trial": bench.run("zero2-offload"), "probe": _probe("pinned", bench)}


def _ask_probe(name: str) -> Callable[[Bench], Answer]:
    return lambda bench: _probe(name, bench)


QUESTIONS: Mapping[str, Callable[[Bench], Answer]] = {
    "beside": ask_beside,
    "limit": ask_limit,
    "retries": ask_retries,
    "resets": _ask_probe("resets"),
    "pinned": ask_pinned,
    "landlock": _ask_probe("landlock"),
    "freed": _ask_probe("freed"),
    "compile": _ask_probe("compile"),
    "returned": _ask_probe("returned"),
    "adam": ask_adam,
    "overlap": ask_overlap,
    "warmup": ask_warmup,
}


def ask(name: str, bench: Bench) -> Answer:
    """Return the answer, or the reason that there is none; a question that fails ends no other."""
    try:
        return QUESTIONS[name](bench)
    except NotAsked as reason:
        return {"holds": None, "not_asked": str(reason)}
    except Exception as error:  # what a card does that none of us has seen
        return {"holds": None, "not_asked": f"{type(error).__name__}: {error}"[:500]}


def open_ranks(model: str, site: Site, folder: Path) -> Ranks:
    """Ranks with the model, to be entered."""
    return Ranks(source(model, folder), site.device, site.ranks, folder)


def _probe(name: str, bench: Bench) -> Answer:
    command = [sys.executable, str(HERE / "gpu_probes.py"), name, bench.site.device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    answer = find_answer(done.stdout)
    if answer is None:
        raise NotAsked((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return answer
