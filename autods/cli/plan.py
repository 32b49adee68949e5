"""`autods plan`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ..requests import PlanRequest
from .ending import Call, end_with_error, print_result
from .options import AS_JSON, MODULE, QUIET, make_command

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


def run_plan(call: Call, request: PlanRequest, *, as_json: bool, quiet: bool) -> int:
    """Run the plan, show how it ended, and return the exit code."""
    try:
        from ..api import PLAN

        command = call.plan or PLAN
        settings = command.resolve(request)
        with _show_progress(quiet) as listen:
            forecast = command.run(settings, listen)
        print_result(lambda: _show(forecast, as_json=as_json))
        return 1 if forecast.status == "nothing_fits" else 0
    except (Exception, KeyboardInterrupt) as error:
        return end_with_error(error, call=call, as_json=as_json, resumes=False)


plan_command = make_command(PlanRequest, run_plan, MODULE, AS_JSON, QUIET)


def _show(forecast: Forecast, *, as_json: bool) -> None:
    if as_json:
        from ..report.serialize import plan_to_dict

        print(json.dumps(plan_to_dict(forecast), indent=2))
        return
    from rich.console import Console

    from ..report.plan_view import print_plan

    print_plan(forecast, Console())


def _show_progress(quiet: bool) -> AbstractContextManager[ForecastListener]:
    from ..report.live import PlanProgress

    return nullcontext(lambda event: None) if quiet else PlanProgress()
