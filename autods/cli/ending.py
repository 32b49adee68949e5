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
    from ..events import Listener
    from ..forecast.values import ForecastListener
    from ..prober.request import Question as ProbeQuestion
    from ..report.results import Forecast, ProbeReport
    from ..requests import Question, Settings

_MOST = 400  # characters of one line


def show_result(report: Report, *, as_json: bool) -> None:
    """Print the report, as tables or as JSON, to standard output."""
    printed(lambda: print(json.dumps(to_dict(report), indent=2)) if as_json else print_fit(report, Console()))


def printed(say: Callable[[], None]) -> None:
    """Let `say` print the result. A reader that leaves early is no failure. Raises InputError where the output cannot
    be written, on a full disk."""
    try:
        say()
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere
        if not isinstance(error, BrokenPipeError):  # `| head`: whoever reads has seen enough
            raise InputError(f"standard output cannot be written: {error.strerror}") from None


def lines_of(error: AutodsError) -> list[str]:
    """One or two lines: what is wrong and where, how to fix it."""
    if isinstance(error, InputError):
        what = f"{error.where}: {error.what}" if error.where else error.what
        parts = [what, error.hint or ""]
    else:
        first, _, rest = str(error).strip().partition("\n")
        parts = [first, rest]
    flat = [" ".join(part.split()) for part in parts]
    return [part if len(part) <= _MOST else part[: _MOST - 1] + "…" for part in flat if part]


def error_to_dict(error: BaseException) -> dict[str, Any]:
    """What `--json` prints instead of a report."""
    lines = lines_of(error) if isinstance(error, AutodsError) else [f"{type(error).__name__}: {error}"]
    kinds = {InputError: "input", EnvironmentBroken: "environment", Interrupted: "interrupted"}
    kind = next((name for cls, name in kinds.items() if isinstance(error, cls)), "internal")
    if isinstance(error, KeyboardInterrupt):
        kind, lines = "interrupted", ["interrupted"]
    return {"status": "error", "error": {"kind": kind, "exit_code": exit_code(error), "message": "\n".join(lines)}}


def exit_code(error: BaseException) -> int:
    """1 nothing fits, 2 input, 3 environment and whatever is our own fault, 130 interrupted."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    return error.exit_code if isinstance(error, AutodsError) else EnvironmentBroken.exit_code


def tell(error: BaseException, *, out: Path | None, argv: Sequence[str], resumes: bool = True) -> None:
    """Say on standard error what ended the command. `out` is the fit's folder, where it is known already.

    resumes: the same command goes on where this one stopped.
    """
    match error:
        case KeyboardInterrupt() | Interrupted() if not resumes:
            _say("interrupted: nothing is left running")
        case KeyboardInterrupt() | Interrupted():
            gone = "every rank is gone, " if isinstance(error, Interrupted) else ""
            kept = out is not None and _has_finished(out / "journal.jsonl")
            state = f"finished trials are kept in {out}" if kept else "no trial had finished yet"
            _say(f"interrupted: {gone}{state}", *_so_far(out), f"go on with: {resuming_command(argv)}")
        case AutodsError():
            first, *rest = lines_of(error) or ["unknown"]
            _say(f"error: {first}", *rest)
        case _:
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST]
            _say(f"internal error: {cause}", f"the traceback is in {keep_traceback(error, out)}; please report it")


def _has_finished(journal: Path) -> bool:
    """Whether a trial is in it that will not be run again."""
    try:
        return b'"kind": "finished"' in journal.read_bytes()
    except OSError:
        return False


def _so_far(out: Path | None) -> list[str]:
    best = None if out is None else out / SO_FAR
    return [f"the best config so far, not certified: {best}"] if best is not None and best.exists() else []


def resuming_command(argv: Sequence[str]) -> str:
    """The command that was typed, without `--fresh`, which would throw the journal away."""
    program, *rest = argv or ["autods"]
    name = ["python", "-m", "autods"] if Path(program).name == "__main__.py" else [Path(program).name]
    own = rest.index("--") if "--" in rest else len(rest)  # a script's arguments are its own
    return shlex.join([*name, *(part for part in rest[:own] if part != "--fresh"), *rest[own:]])


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


def _say(first: str, *rest: str) -> None:
    print("\n  ".join((first, *rest)), file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class UseCases:
    """What the commands call: `api.settle` and `api.run_fit`, `api.ask` and `api.run_plan`, `api.ask_probe` and
    `api.run_probe`; tests hand in their own.

    Those that are None are the real ones.
    """

    settle: Callable[..., Settings] | None = None
    run_fit: Callable[[Settings, Listener, bool], Report] | None = None
    ask: Callable[..., Question] | None = None
    run_plan: Callable[[Question, ForecastListener], Forecast] | None = None
    ask_probe: Callable[..., ProbeQuestion] | None = None
    run_probe: Callable[[ProbeQuestion, Listener, bool], ProbeReport] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the program; `argv` with the program's name, to say how to resume."""

    uses: UseCases
    argv: Sequence[str]


def named(workload: str, *, module: bool) -> str:
    """The workload as `workload.script_source` reads it: with -m it is a module."""
    return f"module:{workload}" if module else workload


def own_part(argv: Sequence[str]) -> Sequence[str]:
    """What is autods' own of a command line: what stands before `--`."""
    return argv[: argv.index("--")] if "--" in argv else argv


def ended_by(error: BaseException, *, call: Call, out: Path | None = None, as_json: bool, resumes: bool = True) -> int:
    """Say what ended the command and return its exit code. resumes: the same command goes on where this one stopped."""
    tell(error, out=out, argv=call.argv, resumes=resumes)
    if as_json:
        printed(lambda: print(json.dumps(error_to_dict(error))))
    return exit_code(error)
