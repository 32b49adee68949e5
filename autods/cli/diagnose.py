"""`autods diagnose`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..requests import DiagnoseRequest
from .ending import Call, end_with_error, print_result
from .options import AS_JSON, make_command

if TYPE_CHECKING:
    from ..diagnosis.values import Diagnosis

EPILOG = """
Examples:

autods diagnose train.log

autods diagnose slurm-1234.out --exit-code 137

autods diagnose rank_0.log rank_1.log        one file a rank; a folder of logs works too

dmesg -T | cat train.log - | autods diagnose -

Exit codes: 0 diagnosed, 2 wrong input.
"""


def run_diagnose(call: Call, request: DiagnoseRequest, *, as_json: bool) -> int:
    """Show why the run died, and return the exit code."""
    try:
        diagnosis = _diagnose(request)
        print_result(lambda: _show(diagnosis, as_json=as_json))
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return end_with_error(error, call=call, as_json=as_json, resumes=False)


diagnose_command = make_command(DiagnoseRequest, run_diagnose, AS_JSON)


def _show(diagnosis: Diagnosis, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
        return
    from rich.console import Console

    from ..report.diagnosis_view import print_diagnosis

    print_diagnosis(diagnosis, Console(soft_wrap=True))


def _diagnose(request: DiagnoseRequest) -> Diagnosis:
    from ..diagnosis.diagnose import diagnose
    from ..errors import InputError

    logs = [Path(log) for log in request.logs]
    if not logs and request.exit_code is None:
        raise InputError("neither a log nor an exit code is given", hint="give one: autods diagnose train.log")
    if Path("-") in logs:
        return diagnose(sys.stdin.buffer.read().decode(errors="replace"), request.exit_code)
    diagnosis = diagnose(logs, request.exit_code)
    if diagnosis.kind == "unknown" and diagnosis.confidence <= 0.1:
        raise InputError(
            "is not a text log", place=", ".join(map(str, logs)), hint="give the log itself (gzip is fine)"
        )
    return diagnosis
