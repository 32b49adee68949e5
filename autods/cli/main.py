"""The command line: parse, hand over to a command, exit code. Nothing heavy is imported before a use case starts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ..errors import InputError
from . import diagnose, fit, plan, probe
from .ending import Call, arguments_before_script, end_with_error

# Typer names only BadParameter; its base is the error of every wrong command line.
UsageError: Any = typer.BadParameter.__base__
app = typer.Typer(
    help="Finds the fastest DeepSpeed configuration that fits, by real trials.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main(argv: Sequence[str] | None = None, **commands: Any) -> int:
    """Run one command line (without the program's name) and return its exit code.

    `commands` replace the use cases of `api`, see `Call`.
    """
    call = Call(sys.argv if argv is None else ["autods", *argv], **commands)
    args = list(call.argv[1:]) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without × or ≥ is no reason to die
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM is a Ctrl-C
    try:
        code = typer.main.get_command(app).main(args=args, prog_name="autods", standalone_mode=False, obj=call)
        return int(code or 0)
    except UsageError as error:
        command = f"{args[0]} " if args[0] in _COMMANDS else ""
        wrong = InputError(error.format_message(), hint=f"see: autods {command}--help")
        return end_with_error(wrong, call=call, as_json="--json" in arguments_before_script(args), resumes=False)
    finally:
        signal.signal(signal.SIGTERM, before)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"autods {version('autods')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


_COMMANDS: dict[str, Callable[..., int]] = {
    "fit": fit.fit_command,
    "plan": plan.plan_command,
    "probe": probe.probe_command,
    "diagnose": diagnose.diagnose_command,
}
_EPILOGS = {"fit": fit.EPILOG, "plan": plan.EPILOG, "probe": probe.EPILOG, "diagnose": diagnose.EPILOG}
for _name, _command in _COMMANDS.items():
    app.command(_name, epilog=_EPILOGS[_name])(_command)
