"""Measures autods on the CUDA machine it finds: the ladder, emulated cards, forecasts, speed, DeepSpeed Autotuning.

python tests/gpu/measure.py [PART…]      all parts in this order, as far as --seconds reach; the same command goes on

  context     what a card holds besides tensors: CUDA context, kernels, cuBLAS, NCCL                  under a minute
  questions   what autods assumes and only a card can tell, each question by itself (below)            some minutes
  rates       kernels, link, host and launches, one by one (gpu_rates.py): what a step's time is made of   a minute
  gpt2        GPT-2 124M and 774M: each rung on the card and on emulated 16, 24, 40, 80 GiB cards     slices
  t5          T5-3B (2.9B) on an emulated 16 GiB card                                                 slices
  qwen2       Qwen2-1.5B                                                                              slices
  gpt2-more   GPT-2 355M and 1.5B                                                                     slices
  autotuner   `autods fit` beside DeepSpeed Autotuning on one card (tests/benchmarks/autotuner.py)    9 minutes
  forecast    the forecast of every cell that has none; with --out FILE it needs no card              slices
  tiny        a GPT-2 of 4 layers, only when asked for: the same path in seconds, for `--device cpu`

A slice ends after --seconds (500). Weights are random, models come from configs: nothing is downloaded. Every finished
cell is written at once into tests/benchmarks/results/<device>.json (--out) and not measured again (--again does). Exit
code 0: all of it is there; 4: time is up and some is left; 3: this machine cannot.

Measured per trial: allocated and reserved by torch's allocator, the card by NVML (less what was on it before). A
smaller card is emulated as `--gpu-memory` does: the limit is the whole process's, context and NCCL included.

What `questions` settles; each answer has its figures and `holds`, whether the assumption is right (gpu_questions.py):
  beside      context and NCCL lie within the forecast's constants (needs the part `context`)
  limit       an emulated card holds the whole process: just enough fits and stays within it, 10% less runs out
  retries     from which limit on the allocator retries, from what is in use to what is reserved, and the speed there
  resets      peaks outlive resets of torch's counters, as by see_memory_usage(force=True)
  pinned      page-locked pages are no private memory, so that the host's peak adds them; their rounding
  landlock    CUDA starts and computes where the kernel refuses writes outside a trial's folders
  freed       the driver gives a killed process's memory back within the 3 s that a trial waits for it
  compile     the first step under torch.compile: seconds, and the processor time of its child processes
  returned    what torch's allocator takes to give a piece of the card back and take it again, as where it runs full
  adam        torch's AdamW with fused beside foreach, and DeepSpeed's FusedAdam: time and memory
  overlap     overlap_comm for ZeRO-1 and -2: time and memory (two cards)
  warmup      after how many steps ZeRO-3 has its speed; a quick trial warms up with one
Not settled here: several nodes, NVMe, fp16 overflow, kinds of scripts. On simulated cards `make test` walks the path.

Without a network: `tests/gpu/kit.py pack` on a machine with package registries, and `kit.py run` beside the card, or
after `kit.py install` this command with `.venv-kit/bin/python`. A machine's kernel may be a sandbox's: without pidfd or
the finer lines of /proc the same is measured, host memory more coarsely.
Needed besides: g++ (the simulated GPU is compiled once, some seconds; DeepSpeed's cpu_adam, where nvcc is there, too:
without it torch's AdamW stands in, and the row says so by "torch_adam"). Where Ray is not installed trials run all the
same, in ranks forked by this command; only `autotuner` is left out, which needs `autods fit`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_questions
import gpu_results as results
from gpu_cells import PARTS, Cell, Site, cells, rungs_for, source, too_large, tried
from gpu_ranks import NoRanks, Ranks

from autods.devices import describe_shared_cards
from autods.system.host import Hardware, installed_versions, read_hardware
from autods.units import format_bytes, parse_bytes

HERE = Path(__file__).resolve().parent
ALL = ("context", "questions", "rates", "gpt2", "t5", "qwen2", "gpt2-more", "autotuner", "forecast")
LEFT, CANNOT = 4, 3
_OPS_S = 200.0
_TRIAL_S = 150.0
_RATES_S = 240.0
_ENOUGH_S = 20.0  # less is not worth beginning a trial


@dataclass(slots=True)
class Session:
    """One run of this command. said: the results so far, on disk as well; left: whether time cut something off."""

    asked: argparse.Namespace
    path: Path
    here: Hardware
    said: dict[str, Any]
    ends_s: float
    left: bool = False

    @property
    def seconds(self) -> float:
        """What is left of this slice."""
        return self.ends_s - time.monotonic()

    def keep(self, said: dict[str, Any]) -> None:
        """What is known from here on."""
        self.said = said
        results.write(self.path, said)

    def leave_out(self, what: str, why: str) -> None:
        """Say it, and keep it said."""
        print(f"left out: {what}: {why}", flush=True)
        self.keep({**self.said, "left_out": {**self.said["left_out"], what: why}})


def main(argv: Sequence[str] | None = None) -> int:
    asked = arguments(argv)
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # of the processes that we start
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if os.environ.pop(name, None):
            print(f"measured without {name}: the allocator as torch ships it", flush=True)
    here = read_hardware()
    elsewhere = asked.parts == ["forecast"] and asked.out is not None and asked.out.exists()
    if asked.device == "cuda" and not elsewhere and (why := unusable(here)) is not None:
        print(f"measure.py: {why}", file=sys.stderr)
        return CANNOT
    for sentence in describe_shared_cards(here.cards) if asked.device == "cuda" else ():
        print(sentence, flush=True)
    path = asked.out or results.path_of(here.cards[0].name if asked.device == "cuda" else f"cpu ranks {here.cpu}")
    session = Session(asked, path, here, results.read(path), time.monotonic() + asked.seconds)
    if not elsewhere:
        device = {**session.said["device"], **device_of(session)}
        session.keep({**session.said, "device": device, "versions": installed_versions()})
    for part in asked.parts:
        if session.seconds < _ENOUGH_S and part != "context":
            session.left = True
            break
        run_part(session, part)
    print(f"\n{results.table(session.said)}\n{path}", flush=True)
    if session.left:
        print("time is up; the same command goes on", flush=True)
    return LEFT if session.left else 0


def run_part(session: Session, part: str) -> None:
    """One part, as far as there is time."""
    if part in PARTS:
        trials(session, part)
    else:
        others = (context, questions, rates, autotuner, forecast)
        {each.__name__: each for each in others}[part](session)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join((*ALL, "tiny")))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, help="ranks; all cards, or 2 CPU ranks")
    parser.add_argument("--cards", default="16,24,40,80", help="GiB of the emulated cards")
    parser.add_argument("--gpu-memory", default="4GiB", help="of a CPU rank, which has no card of its own")
    parser.add_argument("--rungs", help="names, by commas; all without one")
    parser.add_argument("--nvme", type=Path, help="a folder for zero3-nvme, which is left out without one")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp16", "fp32"), default="auto")
    parser.add_argument("--seconds", type=float, default=500.0, help="of this slice")
    parser.add_argument("--again", action="store_true", help="measure what is known once more")
    parser.add_argument("--no-build", action="store_true", help="torch's AdamW in place of DeepSpeed's ops")
    parser.add_argument("--out", type=Path, help="the results file")
    asked = parser.parse_args(argv)
    asked.parts = asked.parts or list(ALL)
    unknown = [part for part in asked.parts if part not in (*ALL, *PARTS)]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join((*ALL, 'tiny'))}")
    return asked


def unusable(here: Hardware) -> str | None:
    """Why there is nothing to measure."""
    if here.unusable is not None:
        return here.unusable
    return None if here.cards else "NVML shows no CUDA GPU here; --device cpu tiny runs the same path on CPU ranks"


def device_of(session: Session) -> dict[str, Any]:
    """The machine, as the file has it."""
    asked, here = session.asked, session.here
    if asked.device == "cpu":
        return {
            "kind": "cpu",
            "name": here.cpu,
            "usable_bytes": parse_bytes(asked.gpu_memory),
            "ranks": asked.gpus or 2,
        }
    cards = here.cards[: asked.gpus]
    return {
        "kind": "cuda", "name": cards[0].name, "usable_bytes": min(card.usable_bytes for card in cards),
        "ranks": len(cards), "cards": [asdict(card) for card in cards], "driver": here.driver, "cuda": here.cuda,
        "cores": here.cores, "host_bytes": here.host_bytes,
    }  # fmt: skip


# ---- the parts


def context(session: Session) -> None:
    """One rank, and all of them where there are several."""
    device = session.said["device"]
    for ranks in sorted({1, device["ranks"]}):
        if not session.asked.again and any(one["world_size"] == ranks for one in session.said["context"]):
            continue
        command = [sys.executable, str(HERE / "gpu_context.py"), device["kind"], str(ranks)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=max(60.0, session.seconds), check=False)
        read = results.find_answer(ran.stdout)
        if ran.returncode or read is None:
            session.leave_out(f"context, {ranks} ranks", (ran.stderr.strip().splitlines() or ["no answer"])[-1])
            continue
        others = [one for one in session.said["context"] if one["world_size"] != ranks]
        session.keep({**session.said, "context": [*others, read]})
        told = ", ".join(f"{one['step']} {_shown(one['held_bytes'])}" for one in read["steps"])
        print(f"context, {ranks} ranks: {told}", flush=True)


def questions(session: Session) -> None:
    """Every question that has no answer yet."""
    known = session.said.get("questions", {})
    open_questions = [
        name
        for name in gpu_questions.QUESTIONS
        if session.asked.again or name not in known or "not_asked" in known[name]
    ]
    site, model = site_of(session), "gpt2-small" if session.asked.device == "cuda" else "tiny"
    with tempfile.TemporaryDirectory(prefix="autods-gpu-") as folder:
        try:
            with gpu_questions.open_ranks(model, site, Path(folder)) as ranks:
                ranks.survey()
                site = replace(site, native=native_ops(session, ranks))
                for name in open_questions:
                    if session.seconds < _ENOUGH_S:
                        session.left = True
                        return
                    bench = gpu_questions.Bench(ranks=ranks, site=site, model=model, known=session.said)
                    answer = gpu_questions.ask(name, bench)
                    session.keep({**session.said, "questions": {**session.said.get("questions", {}), name: answer}})
                    print(f"{name}: {results.shown_answer(answer)}", flush=True)
        except NoRanks as problem:
            session.leave_out("questions", str(problem))


def rates(session: Session) -> None:
    """What a step's time is made of, one by one."""
    if "rates" in session.said and not session.asked.again:
        return
    command = [sys.executable, str(HERE / "gpu_rates.py"), session.said["device"]["kind"]]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_RATES_S, check=False)
    answer = results.find_answer(ran.stdout)
    if ran.returncode or answer is None:
        session.leave_out("rates", f"exit code {ran.returncode}")
        return
    session.keep({**session.said, "rates": answer})


def site_of(session: Session) -> Site:
    """Where it is measured."""
    asked, device = session.asked, session.said["device"]
    return Site(
        device=device["kind"], ranks=device["ranks"], usable_bytes=device["usable_bytes"],
        precision=precision_of(session), rungs=rungs_for(asked.rungs, asked.nvme), nvme=asked.nvme,
    )  # fmt: skip


def trials(session: Session, part: str) -> None:
    """Every cell of the part's models that is not known yet."""
    asked = session.asked
    cards = tuple(int(float(size) * 2**30) for size in asked.cards.split(",") if size)
    site = site_of(session)
    for size in too_large(cards, site):
        if part != "t5":
            session.leave_out(f"a card of {format_bytes(size)}", f"this one has {format_bytes(site.usable_bytes)}")
    for model in PARTS[part]:
        wanted = [
            cell
            for cell in cells(model, site, cards)
            if asked.again or not results.answered(session.said, cell.as_row())
        ]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="autods-gpu-") as folder:
            try:
                with Ranks(source(model, Path(folder)), site.device, site.ranks, Path(folder)) as ranks:
                    ranks.survey()
                    site = replace(site, native=native_ops(session, ranks))
                    run_cells(session, without_unbuilt(session, wanted, ranks), ranks, site)
            except NoRanks as problem:
                session.leave_out(model, str(problem))


def run_cells(session: Session, wanted: Sequence[Cell], ranks: Ranks, site: Site) -> None:
    """In turn, as long as there is time; a rung that ran out at a micro batch is not asked for a larger one."""
    full: set[tuple[Any, ...]] = set()
    for cell in wanted:
        place = (cell.rung, cell.card_bytes)
        if place in full:
            continue
        if session.seconds < _ENOUGH_S:
            session.left = True
            return
        row = tried(cell, ranks, site, wall_s=min(_TRIAL_S, session.seconds + _ENOUGH_S))
        if results.ran_out(row):
            full.add(place)
        session.keep(results.merged(session.said, row))
        print(results.line_of(row), flush=True)


def native_ops(session: Session, ranks: Ranks) -> tuple[str, ...]:
    """What there is of DeepSpeed's optimizers, built once and before any trial's clock runs; the file keeps which."""
    known = session.said["device"].get("native_ops")
    if known is not None and not session.asked.again:
        return tuple(known)
    native: tuple[str, ...] = ()
    if not session.asked.no_build and ranks.build("cpu_adam", _OPS_S):
        native = ("cpu_adam",)
    elif not session.asked.no_build:
        session.leave_out("DeepSpeed's cpu_adam", "it could not be built; torch's AdamW stands in")
    session.keep({**session.said, "device": {**session.said["device"], "native_ops": list(native)}})
    return native


def without_unbuilt(session: Session, wanted: Sequence[Cell], ranks: Ranks) -> Sequence[Cell]:
    """The cells without those on NVMe where DeepSpeed's async_io cannot be built."""
    if session.asked.nvme is None or ranks.build("async_io", 1.5 * _OPS_S):
        return wanted
    session.leave_out("zero3-nvme", "DeepSpeed's async_io could not be built")
    return [cell for cell in wanted if cell.rung != "zero3-nvme"]


def precision_of(session: Session) -> str:
    """bf16, but fp16 on cards before Ampere, which have none."""
    if session.asked.precision != "auto":
        return str(session.asked.precision)
    known = next((one["capability"] for one in session.said["context"] if "capability" in one), None)
    return "fp16" if known is not None and known[0] < 8 else "bf16"


def forecast(session: Session) -> None:
    """Of cells that have none, cheap ones first."""
    from gpu_forecasts import foreseen, line_of, machine_of

    device = session.said["device"]
    for cell in foreseen(_unforeseen(session), device["kind"], device["usable_bytes"], machine_of(device)):
        session.keep(results.merged(session.said, cell))
        print(line_of(cell), flush=True)
        if session.seconds < _ENOUGH_S / 2:
            session.left = bool(list(_unforeseen(session)))
            return


def _unforeseen(session: Session) -> list[dict[str, Any]]:
    return [
        cell
        for cell in session.said["cells"]
        if cell["outcome"]["kind"] != "failed" and (session.asked.again or "forecast" not in cell)
    ]


def autotuner(session: Session) -> None:
    """`autods fit` beside DeepSpeed Autotuning, on one card, as tests/benchmarks/autotuner.py does it."""
    if "autotuner" in session.said and not session.asked.again:
        return
    if importlib.util.find_spec("ray") is None:
        session.leave_out("autotuner", "Ray is not installed, and `autods fit` needs it")
        return
    limit = max(60.0, (session.seconds - 60) / 2)
    command = [sys.executable, str(HERE.parent / "benchmarks" / "autotuner.py"), "--device", session.asked.device]
    command += ["--size", "gpt2_8x384", "--profiles", "quick", "--one-rank", "--json", "--limit", str(int(limit))]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
    if not ran.stdout.strip().startswith("{"):
        session.leave_out("autotuner", " ".join(ran.stderr.split())[-300:] or f"exit code {ran.returncode}")
        return
    session.keep({**session.said, "autotuner": json.loads(ran.stdout)})
    for row in session.said["autotuner"]["summary"]:
        print(f"autotuner: {row['name']}: {row['seconds']:.0f} s, {row['config']}", flush=True)


def _shown(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


if __name__ == "__main__":
    sys.exit(main())
