"""The four commands. Each shows its result and returns its exit code. `ending` shows their errors.

A command of the command line is made of each function: `main` adds an option for every field of the request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from ..api import FIT, PLAN, PROBE
from ..diagnosis.diagnose import diagnose
from ..diagnosis.values import Diagnosis
from ..errors import InputError
from ..events import Listener, Note
from ..forecast.values import ForecastListener
from ..prober.grid import format_trial_label
from ..report.diagnosis_view import print_diagnosis
from ..report.fit_view import print_fit
from ..report.live import PlanProgress, Progress
from ..report.plan_view import print_plan
from ..report.probe_view import print_probe
from ..report.serialize import check_writable, plan_to_dict, probe_to_dict, to_csv, to_dict, write_csv
from ..report.text import format_ranks
from ..requests import DiagnoseRequest, FitRequest, PlanRequest, ProbeRequest
from ..tuner.candidates import unusual_knobs
from ..types import Trial
from ..units import format_bytes
from .ending import Call, print_result

Result = TypeVar("Result")


def _flag(*spellings: str, help: str, metavar: str = "", panel: str = "Output") -> Any:
    return typer.Option(*spellings, help=help, metavar=metavar, rich_help_panel=panel)


_MODULE_HELP = "WORKLOAD is a module, package.module, and is started as with python -m."
Module = Annotated[
    bool, _flag("--module", "-m", help=_MODULE_HELP, panel="Workload")
]  # of each command with a workload
AsJson = Annotated[bool, _flag("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, _flag("--quiet", "-q", help="No progress, only the result.")]
Csv = Annotated[str | None, _flag("--csv", metavar="FILE", help="Write the table there as well; - prints it.")]


def run_fit(call: Call, request: FitRequest, *, as_json: AsJson = False, quiet: Quiet = False) -> int:
    """Find the fastest config."""
    command = call.fit or FIT
    settings = command.resolve(request)
    call.out = settings.out
    machine = f"{format_ranks(settings.gpus, settings.device)} × {format_bytes(settings.device_bytes)}"
    if settings.nodes > 1:
        machine += f" on {settings.nodes} nodes"
    progress: AbstractContextManager[Listener] = _SILENT if quiet else Progress(label=DifferenceFromFirst())
    with progress as listen:
        listen(Note(text=f"{settings.source.name} on {machine}, {settings.profile.name} config → {settings.out}"))
        report = command.run(settings, listen)
    _show(report, as_json, to_dict, print_fit)
    return 0 if report.status == "fit" else 1


def run_plan(call: Call, request: PlanRequest, *, as_json: AsJson = False, quiet: Quiet = False) -> int:
    """Forecast every rung."""
    command = call.plan or PLAN
    settings = command.resolve(request)
    progress: AbstractContextManager[ForecastListener] = _SILENT if quiet else PlanProgress()
    with progress as listen:
        forecast = command.run(settings, listen)
    _show(forecast, as_json, plan_to_dict, print_plan)
    return 1 if forecast.status == "nothing_fits" else 0


def run_probe(
    call: Call, request: ProbeRequest, *, csv: Csv = None, as_json: AsJson = False, quiet: Quiet = False
) -> int:
    """Measure every cell. The table is also written to the file `csv`."""
    table = None if csv in (None, "-") else Path(str(csv))
    if table is not None:
        check_writable(table)
    command = call.probe or PROBE
    probe = command.resolve(request)
    settings = probe.settings
    call.out = settings.out
    subject = f"{'the largest micro batch of ' if probe.capacity else ''}{sum(1 for _ in probe.cells())} cells"
    manner = f"each {probe.repeats} times, in turns" if probe.repeats > 1 else "each once"
    if probe.capacity:
        manner = "by the forecast" if probe.machine is not None else "by the forecast and by trials"
    progress: AbstractContextManager[Listener] = (
        _SILENT if quiet else Progress(label=lambda trial: format_trial_label(probe, trial))
    )
    with progress as listen:
        listen(Note(text=f"{settings.source.name}: {subject}, {manner} → {settings.out}"))
        report = command.run(probe, listen)
    if table is not None:
        write_csv(report, table)
    view = print_probe if csv != "-" else lambda report, console: print(to_csv(report), end="")
    _show(report, as_json, probe_to_dict, view)
    return 0 if report.status == "done" else 1


def run_diagnose(call: Call, request: DiagnoseRequest, *, as_json: AsJson = False) -> int:
    """Say why a run died."""
    logs = [Path(log) for log in request.logs]
    if not logs and request.exit_code is None:
        raise InputError("neither a log nor an exit code is given", hint="give one: autods diagnose train.log")
    from_pipe = Path("-") in logs
    diagnosis = diagnose(sys.stdin.buffer.read().decode(errors="replace") if from_pipe else logs, request.exit_code)
    if not from_pipe and diagnosis.kind == "unknown" and diagnosis.confidence <= 0.1:
        place = ", ".join(map(str, logs))
        raise InputError("is not a text log", place=place, hint="give the log itself (gzip is fine)")
    # Lines of a log stay whole, so that they can be searched for.
    _show(diagnosis, as_json, Diagnosis.to_dict, lambda shown, _: print_diagnosis(shown, Console(soft_wrap=True)))
    return 0


_SILENT = nullcontext(lambda event: None)


def _show(
    result: Result,
    as_json: bool,
    to_json: Callable[[Result], Mapping[str, Any]],
    view: Callable[[Result, Console], None],
) -> None:
    """Print a result to standard output, as JSON or as tables."""
    print_result(lambda: print(json.dumps(to_json(result), indent=2)) if as_json else view(result, Console()))


class DifferenceFromFirst:
    """Labels a trial by its differences from the first: 'without checkpointing', 'recomputing', 'in fp16'.

    The walk comes first, and recomputes activations where the model can, so most labels are empty.
    """

    recomputes: bool | None = None

    def __call__(self, trial: Trial) -> str:
        if self.recomputes is None:
            self.recomputes = trial.knobs.checkpointing
        return unusual_knobs(trial.knobs, recomputes=self.recomputes)


EPILOGS = {
    "fit": """
Examples:

autods fit model.py --gpus 8

autods fit model.py --gpus 8 --gpu-memory 16GiB --global-batch 64 --config quick

autods fit model.py --gpus 8 --stop first-fit      the first rung that fits is enough

autods fit examples/gpt.py --device cpu --gpus 2 --gpu-memory 416MiB      without a GPU

autods fit model.py --gpus 8 --nodes 2 --address auto      on two nodes of a Ray cluster

autods fit train.py --gpus 8 -- --deepspeed_config {ds_config} --micro-batch {micro_batch_size}      your own script

Exit codes: 0 done, 1 nothing fits, 2 wrong input, 3 broken environment, 130 interrupted (the same command goes on).
""",
    "plan": """
Examples:

autods plan model.py --gpus 8 --gpu-memory 80GiB --host-memory 1TiB

autods plan Llama-2-7b/config.json --gpus 8 --on a100-80gb --seq-len 4096

autods plan t5-3b --task seq2seq --gpus 1 --gpu-memory 16GiB --host-memory 64GiB --nvme 1TiB

autods plan train.py --gpus 8 --on a100-80gb -- --deepspeed_config {ds_config} --micro-batch {micro_batch_size}

autods plan model.py --gpus 8 --on all      which machine do I need?

Exit codes: 0 something fits or may (tight, not forecast), 1 nothing fits, 2 wrong input, 3 broken environment,
130 interrupted.
""",
    "probe": """
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
""",
    "diagnose": """
Examples:

autods diagnose train.log

autods diagnose slurm-1234.out --exit-code 137

autods diagnose rank_0.log rank_1.log        one file a rank; a folder of logs works too

dmesg -T | cat train.log - | autods diagnose -

Exit codes: 0 diagnosed, 2 wrong input.
""",
}
