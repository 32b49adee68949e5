"""How a command ends: its result or its error on the terminal, and its exit code."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import AutodsError, EnvironmentBroken, InputError, Interrupted
from ..report.fit_view import print_fit
from ..report.results import Report
from ..report.serialize import SO_FAR, to_dict

if TYPE_CHECKING:
    from ..api import UseCase
    from ..config.plan_settings import PlanSettings
    from ..config.settings import Settings
    from ..events import Event
    from ..forecast.values import ForecastEvent
    from ..prober.request import ProbeSettings
    from ..report.results import Forecast, ProbeReport
    from ..requests import FitRequest, PlanRequest, ProbeRequest

_MOST = 400  # characters of one line


def show_result(report: Report, *, as_json: bool) -> None:
    """Print the report, as tables or as JSON, to standard output."""
    print_result(lambda: print(json.dumps(to_dict(report), indent=2)) if as_json else print_fit(report, Console()))


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


def format_error(error: AutodsError) -> list[str]:
    """One or two lines: what is wrong and where, how to fix it."""
    if isinstance(error, InputError):
        line = f"{error.place}: {error.problem}" if error.place else error.problem
        parts = [line, error.hint or ""]
    else:
        first, _, rest = str(error).strip().partition("\n")
        parts = [first, rest]
    flat = [" ".join(part.split()) for part in parts]
    return [part if len(part) <= _MOST else part[: _MOST - 1] + "…" for part in flat if part]


def error_to_dict(error: BaseException) -> dict[str, Any]:
    """The object that `--json` prints instead of a report."""
    lines = format_error(error) if isinstance(error, AutodsError) else [f"{type(error).__name__}: {error}"]
    kinds = {InputError: "input", EnvironmentBroken: "environment", Interrupted: "interrupted"}
    kind = next((name for cls, name in kinds.items() if isinstance(error, cls)), "internal")
    if isinstance(error, KeyboardInterrupt):
        kind, lines = "interrupted", ["interrupted"]
    return {"status": "error", "error": {"kind": kind, "exit_code": exit_code(error), "message": "\n".join(lines)}}


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that this error ended: 2 input, 3 environment or a bug, 130 interrupted."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    return error.exit_code if isinstance(error, AutodsError) else EnvironmentBroken.exit_code


def print_error(error: BaseException, *, out: Path | None, argv: Sequence[str], resumes: bool = True) -> None:
    """Say on standard error what ended the command. `out` is the fit's folder, if it is known already.

    `resumes` tells whether the same command goes on where this one stopped.
    """
    match error:
        case KeyboardInterrupt() | Interrupted() if not resumes:
            _print_lines("interrupted: nothing is left running")
        case KeyboardInterrupt() | Interrupted():
            gone = "every rank is gone, " if isinstance(error, Interrupted) else ""
            kept = out is not None and _has_finished(out / "journal.jsonl")
            state = f"finished trials are kept in {out}" if kept else "no trial had finished yet"
            _print_lines(
                f"interrupted: {gone}{state}", *_name_best_config(out), f"go on with: {resuming_command(argv)}"
            )
        case AutodsError():
            first, *rest = format_error(error) or ["unknown"]
            _print_lines(f"error: {first}", *rest)
        case _:
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST]
            _print_lines(
                f"internal error: {cause}", f"the traceback is in {keep_traceback(error, out)}; please report it"
            )


def _has_finished(journal: Path) -> bool:
    """Whether the journal holds a trial that will not run again."""
    try:
        return b'"kind": "finished"' in journal.read_bytes()
    except OSError:
        return False


def _name_best_config(out: Path | None) -> list[str]:
    best = None if out is None else out / SO_FAR
    return [f"the best config so far, not certified: {best}"] if best is not None and best.exists() else []


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


def _print_lines(first: str, *rest: str) -> None:
    print("\n  ".join((first, *rest)), file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the program. `argv` begins with the program's name.

    Tests pass their own `fit`, `plan` and `probe`. Those of `api` stand in for None.
    """

    argv: Sequence[str]
    fit: UseCase[FitRequest, Settings, Event, Report] | None = None
    plan: UseCase[PlanRequest, PlanSettings, ForecastEvent, Forecast] | None = None
    probe: UseCase[ProbeRequest, ProbeSettings, Event, ProbeReport] | None = None


def arguments_before_script(argv: Sequence[str]) -> Sequence[str]:
    """The part of a command line that is not the script's: before `--`."""
    return argv[: argv.index("--")] if "--" in argv else argv


def end_with_error(
    error: BaseException, *, call: Call, out: Path | None = None, as_json: bool, resumes: bool = True
) -> int:
    """Say what ended the command and return its exit code. For the arguments see `print_error`."""
    print_error(error, out=out, argv=call.argv, resumes=resumes)
    if as_json:
        print_result(lambda: print(json.dumps(error_to_dict(error))))
    return exit_code(error)
