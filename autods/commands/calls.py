"""What every command needs: the use cases, and how an error ends a command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..events import Listener
    from ..forecast.events import ForecastListener
    from ..probing.question import Question as ProbeQuestion
    from ..question import Question
    from ..report import Report
    from ..report.plan_result import Forecast
    from ..report.probe_result import ProbeReport
    from ..settings import Settings


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
    """The workload as `workload.modules` reads it: with -m it is a module."""
    return f"module:{workload}" if module else workload


def own_part(argv: Sequence[str]) -> Sequence[str]:
    """What is autods' own of a command line: what stands before `--`."""
    return argv[: argv.index("--")] if "--" in argv else argv


def ended_by(error: BaseException, *, call: Call, out: Path | None = None, as_json: bool, resumes: bool = True) -> int:
    """Say what ended the command and return its exit code. resumes: the same command goes on where this one stopped."""
    from ..report import endings

    endings.tell(error, out=out, argv=call.argv, resumes=resumes)
    if as_json:
        endings.printed(lambda: print(json.dumps(endings.as_json(error))))
    return endings.exit_code(error)
