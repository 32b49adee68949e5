"""How a command ends: its result or its error on the terminal, and its exit code."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AutodsError, EnvironmentBroken, InputError, Interrupted, describe_broken_machine
from ..units import escape_controls
from .startup import find_loss

_MOST = 400  # characters of one line
_MOST_OF_PLACE = 250  # of them, for a path


@dataclass(slots=True)
class Call:
    """One call of the program. `argv` begins with the program's name; `out` is the folder of results, once it is known.

    `end_signal` is the signal that asked it to end, other than Ctrl-C's. Tests pass their own `use_cases`, instead of
    those of `api`.
    """

    argv: Sequence[str]
    out: Path | None = None
    use_cases: Mapping[str, Any] = field(default_factory=dict)
    end_signal: int | None = None

    @property
    def interrupted_code(self) -> int:
        """The exit code of an interruption. A run tells SIGTERM from Ctrl-C, as its scheduler expects."""
        if self.end_signal is not None and self.argv[1:2] == ["run"]:
            return 128 + self.end_signal
        return Interrupted.exit_code


def end_output(call: Call, code: int) -> int:
    """Return the exit code of a command that would end with `code`: 3 where its result could not be printed.

    A reader that leaves early is no failure.
    """
    reason = find_loss(sys.stdout)
    if reason is None:
        return code
    lines = [f"error: standard output cannot be written: {reason}"]
    if call.out is not None and code <= 1:
        lines.append(f"the results are in {call.out}")
    print("\n  ".join(lines), file=sys.stderr, flush=True)
    return code if code > 1 else EnvironmentBroken.exit_code


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
    if kind == Interrupted.kind:
        code = call.interrupted_code
        lines = _describe_interruption(error, call) if resumes else ["interrupted: nothing is left running"]
    elif isinstance(error, AutodsError):
        lines = [f"error: {message[0]}", *message[1:]]
    elif (described := describe_broken_machine(error)) is not None:
        kind, message = EnvironmentBroken.kind, described.split("\n  ")
        lines = [f"error: {message[0]}", *message[1:]]
    else:
        path = keep_traceback(error, call.out)
        place = f"the traceback is in {path}" if path else "no file can be written for the traceback"
        lines = [f"internal error: {message[0]}", f"{place}; please report it"]
    print("\n  ".join(lines), file=sys.stderr, flush=True)
    if as_json:
        data = {"status": "error", "error": {"kind": kind, "exit_code": code, "message": "\n".join(message)}}
        print(json.dumps(data))
    return code


def _format_error(error: BaseException) -> list[str]:
    """One or two lines: what is wrong and where, how to fix it."""
    match error:
        case KeyboardInterrupt():
            parts = ["interrupted"]
        case InputError(problem=problem, place=place, hint=hint):
            if place is not None and len(place) > _MOST_OF_PLACE:  # the problem comes after it
                place = f"…{place[1 - _MOST_OF_PLACE :]}"
            parts = [f"{place}: {problem}" if place else problem, hint or ""]
        case AutodsError():
            parts = str(error).strip().split("\n", 1)
        case _:
            parts = [f"{type(error).__name__}: {error}"]
    flat = [escape_controls(" ".join(part.split())) for part in parts]
    return [part if len(part) <= _MOST else part[: _MOST - 1] + "…" for part in flat if part] or ["unknown"]


def _describe_interruption(error: BaseException, call: Call) -> list[str]:
    """What is left of an interrupted command, and how to go on."""
    from ..report.serialize import SO_FAR

    out, kept, best = call.out, False, []
    if out is not None:
        with contextlib.suppress(OSError):  # there is no journal yet
            kept = b'"kind": "finished"' in (out / "journal.jsonl").read_bytes()
        best = [f"the best config so far, not certified: {out / SO_FAR}"] if (out / SO_FAR).exists() else []
    gone = "every rank is gone, " if isinstance(error, Interrupted) else ""
    state = f"finished trials are kept in {out}" if kept else "no trial had finished yet"
    return [f"interrupted: {gone}{state}", *best, f"go on with: {resuming_command(call.argv)}"]


def resuming_command(argv: Sequence[str], *options: str) -> str:
    """The command that was typed with further `options`, and without `--fresh`, which would throw the journal away."""
    program, *rest = argv or ["autods"]
    name = ["python", "-m", "autods"] if Path(program).name == "__main__.py" else [Path(program).name]
    end = rest.index("--") if "--" in rest else len(rest)  # a script may have a --fresh as well
    return shlex.join([*name, *(part for part in rest[:end] if part != "--fresh"), *options, *rest[end:]])


def keep_traceback(error: BaseException, out: Path | None) -> Path | None:
    """Write the traceback into the fit's logs, or else into a new temporary file. None where no file can be written."""
    text = escape_controls("".join(traceback.format_exception(error)))  # halves of characters cannot be written
    with contextlib.suppress(OSError):
        if out is not None:
            path = out / "logs" / "internal-error.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return path
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile("w", prefix="autods-error-", suffix=".txt", delete=False) as file:
            file.write(text)
        return Path(file.name)
    return None
