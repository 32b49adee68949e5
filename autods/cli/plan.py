"""`autods plan`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import typer

from . import options
from .ending import Call, ended_by, named

if TYPE_CHECKING:
    from ..forecast.values import ForecastListener
    from ..report.results import Forecast

EPILOG = """
Examples:

autods plan model.py --gpus 8 --gpu-memory 80GiB --host-memory 1TiB

autods plan Llama-2-7b/config.json --gpus 8 --on a100-80gb --seq-len 4096

autods plan t5-3b --task seq2seq --gpus 1 --gpu-memory 16GiB --host-memory 64GiB --nvme 1TiB

autods plan train.py --gpus 8 --on a100-80gb -- --deepspeed_config {ds_config} --micro-batch {micro_batch_size}

autods plan model.py --gpus 8 --on all      which machine do I need?

Exit codes: 0 something fits or may (tight, not forecast), 1 nothing fits, 2 wrong input, 3 broken environment,
130 interrupted.
"""


def plan_command(
    context: typer.Context,
    workload: options.AnyWorkload,
    script_args: options.ScriptArgs = None,
    gpus: options.ForecastGpus = None,
    nodes: options.Nodes = None,
    on: options.On = None,
    gpu_memory: options.ForecastMemory = None,
    host_memory: options.HostMemory = None,
    nvme: options.Nvme = None,
    nvme_path: options.ForecastNvmePath = None,
    device: options.Device = "cuda",
    task: options.Task = None,
    seq_len: options.SeqLen = None,
    target_len: options.TargetLen = None,
    kind: options.Kind = None,
    module: options.Module = False,
    micro_batch: options.MicroBatch = None,
    global_batch: options.GlobalBatch = None,
    precision: options.Precision = "auto",
    checkpointing: options.Checkpointing = None,
    zero_init: options.ZeroInit = False,
    as_written: options.AsWritten = False,
    base_config: options.BaseConfig = None,
    ladder: options.Ladder = None,
    strategies: options.Strategies = None,
    largest: options.Largest = True,
    as_json: options.PlanJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Forecast what every rung of the ladder needs for WORKLOAD, on every tier. No GPU, no trial.

    DeepSpeed's own engine runs on a simulated GPU. A number is what a rank, or a node, must hold, with its interval.
    """
    asked = {
        "gpus": gpus, "nodes": nodes, "on": on, "gpu_memory": gpu_memory, "host_memory": host_memory, "nvme": nvme,
        "nvme_path": nvme_path, "device": device, "task": task, "seq_len": seq_len, "target_len": target_len,
        "micro_batch": micro_batch, "global_batch": global_batch, "precision": precision,
        "checkpointing": checkpointing, "zero_init": zero_init, "as_written": as_written, "base_config": base_config,
        "kind": kind, "script_args": tuple(script_args or ()),
        "ladder": () if ladder is None else ladder, "strategies": tuple(strategies or ()), "largest": largest,
    }  # fmt: skip
    return _plan(context.obj, named(workload, module=module), asked, as_json=as_json, quiet=quiet)


def _plan(call: Call, workload: str, asked: dict[str, Any], *, as_json: bool, quiet: bool) -> int:
    """Run the plan and show how it ended, whatever that is."""
    from .. import api
    from . import ending

    try:
        question = (call.uses.ask or api.ask)(workload, **asked)
        with _progress(quiet) as listen:
            forecast = (call.uses.run_plan or api.run_plan)(question, listen)
        ending.printed(lambda: _show(forecast, as_json=as_json))
        return 1 if forecast.status == "nothing_fits" else 0
    except (Exception, KeyboardInterrupt) as error:
        return ended_by(error, call=call, as_json=as_json, resumes=False)


def _show(forecast: Forecast, *, as_json: bool) -> None:
    if as_json:
        from ..report.serialize import plan_to_dict as to_dict

        print(json.dumps(to_dict(forecast), indent=2))
        return
    from rich.console import Console

    from ..report.plan_view import print_plan

    print_plan(forecast, Console())


def _progress(quiet: bool) -> AbstractContextManager[ForecastListener]:
    from ..report.live import PlanProgress

    return nullcontext(lambda event: None) if quiet else PlanProgress()
