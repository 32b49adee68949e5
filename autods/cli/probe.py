"""`autods probe`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..requests import ProbeRequest
from .ending import Call, end_with_error, print_result
from .options import AS_JSON, CSV, MODULE, QUIET, make_command

if TYPE_CHECKING:
    from ..events import Listener
    from ..prober.request import ProbeSettings
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


def run_probe(call: Call, request: ProbeRequest, *, csv: str | None, as_json: bool, quiet: bool) -> int:
    """Run the probe, show how it ended, and return the exit code. The table is also written to the file `csv`."""
    out = Path(request.out) if request.out else None
    table = None if csv in (None, "-") else Path(str(csv))
    try:
        from ..api import PROBE
        from ..events import Note
        from ..report.serialize import check_writable, write_csv

        command = call.probe or PROBE
        if table is not None:
            check_writable(table)
        question = command.resolve(request)
        out = question.settings.out
        with _show_progress(question, quiet) as listen:
            listen(Note(text=_describe(question)))
            report = command.run(question, listen)
        if table is not None:
            write_csv(report, table)
        print_result(lambda: _show(report, as_json=as_json, as_csv=csv == "-"))
        return 0 if report.status == "done" else 1
    except (Exception, KeyboardInterrupt) as error:
        return end_with_error(error, call=call, out=out, as_json=as_json)


probe_command = make_command(ProbeRequest, run_probe, MODULE, CSV, AS_JSON, QUIET)


def _show(report: ProbeReport, *, as_json: bool, as_csv: bool) -> None:
    from ..report.serialize import probe_to_dict, to_csv

    if as_json:
        print(json.dumps(probe_to_dict(report), indent=2))
    elif as_csv:
        print(to_csv(report), end="")
    else:
        from rich.console import Console

        from ..report.probe_view import print_probe

        print_probe(report, Console())


def _show_progress(question: ProbeSettings, quiet: bool) -> AbstractContextManager[Listener]:
    from ..prober.grid import format_trial_label
    from ..report.live import Progress

    return (
        nullcontext(lambda event: None) if quiet else Progress(label=lambda trial: format_trial_label(question, trial))
    )


def _describe(question: ProbeSettings) -> str:
    """The question and the folder of the answer, shown before anything slow begins."""
    cells = sum(1 for _ in question.cells())
    repeats = f", each {question.repeats} times, in turns" if question.repeats > 1 else ", each once"
    if question.capacity:
        repeats = ", by the forecast" if question.forecast_only else ", by the forecast and by trials"
    subject = "the largest micro batch of " if question.capacity else ""
    return f"{question.settings.source.name}: {subject}{cells} cells{repeats} → {question.settings.out}"
