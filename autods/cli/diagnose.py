"""`autods diagnose`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import options
from .ending import ended_by

if TYPE_CHECKING:
    from ..diagnosis.values import Diagnosis

EPILOG = """
Examples:

autods diagnose train.log

autods diagnose slurm-1234.out --exit-code 137

autods diagnose rank_0.log rank_1.log        one file a rank; a folder of logs works too

dmesg -T | cat train.log - | autods diagnose -

Exit codes: 0 answered, whatever the answer; 2 wrong input.
"""


def diagnose_command(
    context: typer.Context,
    logs: options.Logs = None,
    exit_code: options.ExitCode = None,
    as_json: options.Json = False,
) -> int:
    """Say why a run died: from its LOGs (files, folders, - for standard input) and exit code."""
    try:
        from . import ending

        said = _diagnosed(logs or [], exit_code)
        ending.printed(lambda: _show(said, as_json=as_json))
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return ended_by(error, call=context.obj, as_json=as_json, resumes=False)


def _show(said: Diagnosis, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(said.to_dict(), indent=2))
        return
    from rich.console import Console

    from ..report.diagnosis_view import print_diagnosis

    print_diagnosis(said, Console(soft_wrap=True))


def _diagnosed(logs: Sequence[Path], exit_code: int | None) -> Diagnosis:
    from ..diagnosis.diagnose import diagnose
    from ..errors import InputError

    if not logs and exit_code is None:
        raise InputError("there is nothing to go by", hint="give a log, or --exit-code: autods diagnose train.log")
    if Path("-") in logs:
        return diagnose(sys.stdin.buffer.read().decode(errors="replace"), exit_code)
    said = diagnose(logs, exit_code)
    if said.kind == "unknown" and said.confidence <= 0.1:
        raise InputError(
            "is not a text log", where=", ".join(map(str, logs)), hint="give the log itself (gzip is fine)"
        )
    return said
