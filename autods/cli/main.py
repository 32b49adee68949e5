"""The command line: parse, hand over to a command, exit code. A command's options are the fields of its request."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..errors import InputError
from ..requests import Option, TrialRequest, WorkloadRequest, field_types, find_kind
from .commands import EPILOGS, Module, run_diagnose, run_fit, run_plan, run_probe
from .ending import Call, end_with_error

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
        command = f"{args[0]} " if args[0] in EPILOGS else ""
        wrong = InputError(error.format_message(), hint=f"see: autods {command}--help")
        ours = args[: args.index("--")] if "--" in args else args  # the others are a script's
        return end_with_error(wrong, call, as_json="--json" in ours, resumes=False)
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


def make_command(run: Callable[..., int]) -> Callable[..., int]:
    """A function for Typer that calls `run(call, request, **flags)` and shows how it ended.

    Its options are the fields of the request, --module where a workload is given, and the flags: the keyword arguments
    of `run`. Its help is the request's docstring.
    """
    request = get_type_hints(run)["request"]
    flags = [
        each for each in inspect.signature(run, eval_str=True).parameters.values() if each.kind == each.KEYWORD_ONLY
    ]
    if issubclass(request, WorkloadRequest):
        flags.insert(0, inspect.Parameter("module", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Module))

    def command(context: typer.Context, **given: Any) -> int:
        call: Call = context.obj
        values = {name: given.pop(name) for name in options}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if given.pop("module", False):
            values["workload"] = f"module:{values['workload']}"
        call.out = Path(values["out"]) if values.get("out") else None
        try:
            return run(call, request(**{name: value for name, value in values.items() if value is not None}), **given)
        except (Exception, KeyboardInterrupt) as error:
            resumes = issubclass(request, TrialRequest)
            return end_with_error(error, call, as_json=given["as_json"], resumes=resumes)

    types = field_types(request)
    options = {
        each.name: _parameter(each, types[each.name]) for each in fields(request) if each.metadata["option"].panel
    }
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    signature = inspect.Signature([context, *options.values(), *flags], return_annotation=int)
    command.__doc__ = request.__doc__
    command.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    command.__dict__["__signature__"] = signature
    return command


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    """A field as a parameter that Typer understands."""
    option: Option = field.metadata["option"]
    kind = find_kind(hint)
    cli = str if kind is None else kind.cli
    required = field.default is MISSING
    default = None if required or field.default == () else field.default
    if option.positional:
        described: Any = typer.Argument(metavar=option.metavar, help=option.help)
    else:
        spelling = f"--{field.name.replace('_', '-')}"
        if default is True:  # a switch that is on can be turned off: '--forecast/--no-forecast'
            spelling += f"/--no-{spelling[2:]}"
        described = typer.Option(
            *(option.flags or (spelling,)),
            metavar="" if cli is bool and not default else option.metavar,
            help=option.help,
            show_default=True if option.default is None else option.default or False,
            rich_help_panel=option.panel,
        )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=Annotated[cli if required or default is not None else cli | None, described],
    )


for _run in (run_fit, run_plan, run_probe, run_diagnose):
    _name = _run.__name__.removeprefix("run_")
    app.command(_name, epilog=EPILOGS[_name])(make_command(_run))
