"""`autods fit`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from . import options
from .ending import Call, ended_by, named

if TYPE_CHECKING:
    from ..events import Event, Listener
    from ..requests import Settings
    from ..types import Trial

EPILOG = """
Examples:

autods fit model.py --gpus 8

autods fit model.py --gpus 8 --gpu-memory 16GiB --global-batch 64 --config quick

autods fit model.py --gpus 8 --stop first-fit      the first rung that fits is enough

autods fit examples/gpt.py --device cpu --gpus 2 --gpu-memory 416MiB      without a GPU

autods fit model.py --gpus 8 --nodes 2 --address auto      on two nodes of a Ray cluster

autods fit train.py --gpus 8 -- --deepspeed_config {ds_config} --micro-batch {micro_batch_size}      your own script

Exit codes: 0 done, 1 nothing fits, 2 wrong input, 3 broken environment, 130 interrupted (the same command goes on).
"""


def fit_command(
    context: typer.Context,
    workload: options.Workload,
    script_args: options.ScriptArgs = None,
    gpus: options.Gpus = None,
    nodes: options.FitNodes = None,
    address: options.Address = None,
    device: options.Device = "cuda",
    gpu_memory: options.GpuMemory = None,
    global_batch: options.GlobalBatch = None,
    precision: options.Precision = "auto",
    base_config: options.BaseConfig = None,
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
    objective: options.Objective = "samples",
    stop: options.Stop = None,
    max_trials: options.MaxTrials = None,
    max_time: options.MaxTime = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Find the fastest DeepSpeed config that fits WORKLOAD, and write it to ds_config.json.

    Finished trials are journaled: the same command goes on where a stopped one ended.
    """
    asked = {
        "gpus": gpus, "nodes": nodes, "address": address, "device": device, "gpu_memory": gpu_memory,
        "global_batch": global_batch,
        "precision": precision, "base_config": base_config, "config": config,
        "ladder": () if ladder is None else ladder, "strategies": tuple(strategies or ()),
        "nvme_path": nvme_path, "task": task, "seq_len": seq_len, "target_len": target_len, "out": out, "seed": seed,
        "forecast": not no_forecast, "objective": objective, "stop": stop, "max_trials": max_trials,
        "max_time": max_time, "zero_init": zero_init, "kind": kind, "script_args": tuple(script_args or ()),
    }  # fmt: skip
    return _fit(context.obj, named(workload, module=module), asked, fresh=fresh, as_json=as_json, quiet=quiet)


def _fit(call: Call, workload: str, asked: dict[str, Any], *, fresh: bool, as_json: bool, quiet: bool) -> int:
    """Run the fit and show how it ended, whatever that is."""
    from .. import api
    from . import ending

    out = Path(asked["out"]) if asked["out"] else None
    try:
        settings = (call.uses.settle or api.settle)(workload, **asked)
        out = settings.out
        with _progress(quiet) as listen:
            listen(_question(settings))
            report = (call.uses.run_fit or api.run_fit)(settings, listen, fresh)
        ending.show_result(report, as_json=as_json)
        return 0 if report.status == "fit" else 1
    except (Exception, KeyboardInterrupt) as error:
        return ended_by(error, call=call, out=out, as_json=as_json)


def _progress(quiet: bool) -> AbstractContextManager[Listener]:
    from ..report.live import Progress

    return nullcontext(lambda event: None) if quiet else Progress(label=Unusual())


class Unusual:
    """What a trial does that the first one did not: 'without checkpointing', 'recomputing', 'in fp16'; mostly ''.

    The walk comes first, and recomputes where the model can. Not every trial's line says so, only the others'.
    """

    def __init__(self) -> None:
        self._recomputes: bool | None = None

    def __call__(self, trial: Trial) -> str:
        from ..tuner.candidates import unusual_knobs

        if self._recomputes is None:
            self._recomputes = trial.knobs.checkpointing
        return unusual_knobs(trial.knobs, recomputes=self._recomputes)


def _question(settings: Settings) -> Event:
    """What is asked and where the answer goes, said before anything slow begins."""
    from ..events import Note
    from ..report.text import format_ranks
    from ..units import format_bytes

    what = f"{format_ranks(settings.gpus, settings.device)} × {format_bytes(settings.device_bytes)}"
    if settings.nodes > 1:
        what += f" on {settings.nodes} nodes"
    return Note(text=f"{settings.source.name} on {what}, {settings.profile.name} config → {settings.out}")
