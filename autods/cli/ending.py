"""How a command ends: its result or its error on the terminal, and its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..api import UseCase
from ..config.plan_settings import PlanSettings
from ..config.settings import Settings
from ..errors import AutodsError, InputError, Interrupted
from ..events import Event
from ..forecast.values import ForecastEvent
from ..prober.request import ProbeSettings
from ..report.results import Forecast, ProbeReport, Report
from ..report.serialize import SO_FAR
from ..requests import FitRequest, PlanRequest, ProbeRequest

_MOST = 400  # characters of one line


@dataclass(slots=True)
class Call:
    """One call of the program. `argv` begins with the program's name; `out` is the folder of results, once it is known.

    Tests pass their own `fit`, `plan` and `probe`. Those of `api` stand in for None.
    """

    argv: Sequence[str]
    out: Path | None = None
    fit: UseCase[FitRequest, Settings, Event, Report] | None = None
    plan: UseCase[PlanRequest, PlanSettings, ForecastEvent, Forecast] | None = None
    probe: UseCase[ProbeRequest, ProbeSettings, Event, ProbeReport] | None = None


def print_result(print_it: Callable[[], None]) -> None:
    """Call `print_it`, which prints to standard output. A reader that leaves early is no failure.

    Raises InputError where the output cannot be written, on a full disk say.
    """
    try:
        print_it()
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere
        if not isinstance(error, BrokenPipeError):  # `| head` has seen enough
            raise InputError(f"standard output cannot be written: {error.strerror}") from None


def end_with_error(error: BaseException, call: Call, *, as_json: bool, resumes: bool) -> int:
    """Say on standard error what ended the command, and return its exit code: 3 for a bug.

    `as_json` prints it as an object on standard output, too. `resumes` tells whether the same command goes on where
    this one stopped.
    """
    kind, code = "internal", 3
    if isinstance(error, KeyboardInterrupt | AutodsError):
        ended = Interrupted if isinstance(error, KeyboardInterrupt) else error
        kind, code = ended.kind, ended.exit_code
    message = _format_error(error)
    if code == Interrupted.exit_code:
        lines = _describe_interruption(error, call) if resumes else ["interrupted: nothing is left running"]
    elif isinstance(error, AutodsError):
        lines = [f"error: {message[0]}", *message[1:]]
    else:
        path = keep_traceback(error, call.out)
        lines = [f"internal error: {message[0]}", f"the traceback is in {path}; please report it"]
    print("\n  ".join(lines), file=sys.stderr, flush=True)
    if as_json:
        data = {"status": "error", "error": {"kind": kind, "exit_code": code, "message": "\n".join(message)}}
        print_result(lambda: print(json.dumps(data)))
    return code


def _format_error(error: BaseException) -> list[str]:
    """One or two lines: what is wrong and where, how to fix it."""
    match error:
        case KeyboardInterrupt():
            parts = ["interrupted"]
        case InputError(problem=problem, place=place, hint=hint):
            parts = [f"{place}: {problem}" if place else problem, hint or ""]
        case AutodsError():
            parts = str(error).strip().split("\n", 1)
        case _:
            parts = [f"{type(error).__name__}: {error}"]
    flat = [" ".join(part.split()) for part in parts]
    return [part if len(part) <= _MOST else part[: _MOST - 1] + "…" for part in flat if part] or ["unknown"]


def _describe_interruption(error: BaseException, call: Call) -> list[str]:
    """What is left of an interrupted command, and how to go on."""
    out, kept, best = call.out, False, []
    if out is not None:
        with contextlib.suppress(OSError):  # there is no journal yet
            kept = b'"kind": "finished"' in (out / "journal.jsonl").read_bytes()
        best = [f"the best config so far, not certified: {out / SO_FAR}"] if (out / SO_FAR).exists() else []
    gone = "every rank is gone, " if isinstance(error, Interrupted) else ""
    state = f"finished trials are kept in {out}" if kept else "no trial had finished yet"
    return [f"interrupted: {gone}{state}", *best, f"go on with: {resuming_command(call.argv)}"]


def resuming_command(argv: Sequence[str]) -> str:
    """The command that was typed, without `--fresh`, which would throw the journal away."""
    program, *rest = argv or ["autods"]
    name = ["python", "-m", "autods"] if Path(program).name == "__main__.py" else [Path(program).name]
    end = rest.index("--") if "--" in rest else len(rest)  # a script may have a --fresh as well
    return shlex.join([*name, *(part for part in rest[:end] if part != "--fresh"), *rest[end:]])


def keep_traceback(error: BaseException, out: Path | None) -> Path:
    """Write the traceback into the fit's logs, or into a new temporary file when that cannot be."""
    text = "".join(traceback.format_exception(error))
    if out is not None:
        path = out / "logs" / "internal-error.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return path
        except OSError:
            pass
    with tempfile.NamedTemporaryFile("w", prefix="autods-error-", suffix=".txt", delete=False) as file:
        file.write(text)
    return Path(file.name)
