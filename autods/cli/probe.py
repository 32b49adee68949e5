"""`autods probe`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from . import options
from .ending import Call, ended_by, named

if TYPE_CHECKING:
    from ..events import Event, Listener
    from ..prober.request import Question
    from ..report.results import ProbeReport

EPILOG = """
Examples:

autods probe model.py --gpus 8 --vary rung=zero1,zero2,zero3 --vary micro_batch=1,2,4

autods probe model.py --gpus 8 --vary rung=zero3-offload --vary pin_memory=true,false --vary env.NCCL_P2P_DISABLE=0,1

autods probe model.py --gpus 1,2,4,8 --vary seq_len=1024,2048 --capacity      the largest micro batch of each

autods probe model.py --gpus 2 --vary rung=ddp,zero2,zero3 --capacity --parallel-trials 4      8 cards: four at a time

autods probe model.py --gpus 4,8 --nodes 2 --address auto --vary rung=zero2,zero3      one node, and two

autods probe model.py --gpus 8 --on a100-80gb --forecast-only      the same for a machine that is not here

autods probe train.py --gpus 8 --vary args.length=128,256 -- --deepspeed {ds_config} --max_length {length}

autods probe model.py --gpus 2 --device cpu --gpu-memory 1GiB --experiment stages      see configs/experiments

Exit codes: 0 done, 1 no cell fits, 2 wrong input, 3 broken environment, 130 interrupted (the same command goes on).
"""


def probe_command(
    context: typer.Context,
    workload: options.Workload,
    script_args: options.ScriptArgs = None,
    vary: options.Vary = None,
    experiment: options.Experiment = None,
    gpus: options.SeveralGpus = None,
    nodes: options.FitNodes = None,
    address: options.Address = None,
    device: options.Device = "cuda",
    gpu_memory: options.GpuMemory = None,
    capacity: options.Capacity = False,
    parallel_trials: options.ParallelTrials = 1,
    forecast_only: options.ForecastOnly = False,
    on: options.OnOne = None,
    host_memory: options.HostMemory = None,
    repeats: options.Repeats = None,
    steps: options.TimedSteps = None,
    global_batch: options.GlobalBatch = None,
    precision: options.Precision = "auto",
    base_config: options.BaseConfig = None,
    as_written: options.AsWritten = False,
    config: options.Config = "default",
    ladder: options.Ladder = None,
    strategies: options.Strategies = None,
    nvme_path: options.NvmePath = None,
    task: options.Task = None,
    seq_len: options.SeqLen = None,
    target_len: options.TargetLen = None,
    zero_init: options.ZeroInit = False,
    kind: options.Kind = None,
    module: options.Module = False,
    out: options.Out = None,
    no_forecast: options.NoForecast = False,
    fresh: options.Fresh = False,
    seed: options.Seed = 0,
    csv: options.Csv = None,
    as_json: options.PlanJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Measure WORKLOAD under every combination of what is varied: throughput, memory on each tier, what runs out.

    Each cell is a real short trial, repeated in turns, so that noise is told from difference. Finished trials are
    journaled: the same command goes on where a stopped one ended.
    """
    asked = {
        "vary": tuple(vary or ()), "experiment": experiment, "gpus": gpus, "nodes": nodes, "address": address,
        "device": device, "gpu_memory": gpu_memory,
        "capacity": capacity, "parallel_trials": parallel_trials, "forecast_only": forecast_only, "on": on,
        "host_memory": host_memory,
        "repeats": repeats, "steps": steps, "global_batch": global_batch, "precision": precision,
        "base_config": base_config, "as_written": as_written, "config": config,
        "ladder": () if ladder is None else ladder, "strategies": tuple(strategies or ()), "nvme_path": nvme_path,
        "task": task, "seq_len": seq_len, "target_len": target_len, "zero_init": zero_init, "kind": kind,
        "script_args": tuple(script_args or ()), "out": out, "forecast": not no_forecast, "seed": seed,
    }  # fmt: skip
    return _probe(
        context.obj,
        named(workload, module=module),
        asked,
        fresh=fresh,
        csv=csv,
        as_json=as_json,
        quiet=quiet,
    )


def _probe(
    call: Call, workload: str, asked: dict[str, Any], *, fresh: bool, csv: str | None, as_json: bool, quiet: bool
) -> int:
    """Run the probe and show how it ended, whatever that is."""
    from .. import api
    from ..report.serialize import check_writable, write_csv
    from . import ending

    out = Path(asked["out"]) if asked["out"] else None
    table = None if csv in (None, "-") else Path(str(csv))
    try:
        if table is not None:
            check_writable(table)
        question = (call.uses.ask_probe or api.ask_probe)(workload, **asked)
        out = question.settings.out
        with _progress(question, quiet) as listen:
            listen(_said(question))
            report = (call.uses.run_probe or api.run_probe)(question, listen, fresh)
        if table is not None:
            write_csv(report, table)
        ending.printed(lambda: _show(report, as_json=as_json, as_csv=csv == "-"))
        return 0 if report.status == "done" else 1
    except (Exception, KeyboardInterrupt) as error:
        return ended_by(error, call=call, out=out, as_json=as_json)


def _show(report: ProbeReport, *, as_json: bool, as_csv: bool) -> None:
    from ..report.serialize import probe_to_dict as to_dict
    from ..report.serialize import to_csv

    if as_json:
        print(json.dumps(to_dict(report), indent=2))
    elif as_csv:
        print(to_csv(report), end="")
    else:
        from rich.console import Console

        from ..report.probe_view import print_probe

        print_probe(report, Console())


def _progress(question: Question, quiet: bool) -> AbstractContextManager[Listener]:
    from ..prober.grid import label_of
    from ..report.live import Progress

    return nullcontext(lambda event: None) if quiet else Progress(label=lambda trial: label_of(question, trial))


def _said(question: Question) -> Event:
    """What is asked and where the answer goes, said before anything slow begins."""
    from ..events import Note

    cells = sum(1 for _ in question.cells())
    how = f", each {question.repeats} times, in turns" if question.repeats > 1 else ", each once"
    if question.capacity:
        how = ", by the forecast" if question.forecast_only else ", by the forecast and by trials"
    what = "the largest micro batch of " if question.capacity else ""
    return Note(text=f"{question.settings.source.name}: {what}{cells} cells{how} → {question.settings.out}")
