"""The options of a command, generated from the fields of its request."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from ..requests import Option, field_types, find_kind
from .ending import Call


def _flag(name: str, *spellings: str, help: str, panel: str = "Output", metavar: str = "") -> inspect.Parameter:
    """An option that belongs to the command line alone: a switch, or text where it has a metavar."""
    described = typer.Option(*spellings, metavar=metavar, help=help, rich_help_panel=panel)
    annotation, default = (Annotated[str | None, described], None) if metavar else (Annotated[bool, described], False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


AS_JSON = _flag("as_json", "--json", help="Print JSON instead of a table.")
QUIET = _flag("quiet", "--quiet", "-q", help="No progress, only the result.")
CSV = _flag("csv", "--csv", metavar="FILE", help="Write the table there as well; - prints it.")
MODULE = _flag(
    "module",
    "--module",
    "-m",
    help="WORKLOAD is a module, package.module, and is started as with python -m.",
    panel="Workload",
)


def make_command(request: type[Any], run: Callable[..., int], *flags: inspect.Parameter) -> Callable[..., int]:
    """A function for Typer with an option for each field of the request, and with these flags.

    It calls `run(call, request, **flags)`, and takes its help from the request's docstring. With --module the workload
    becomes 'module:NAME'.
    """

    def command(context: typer.Context, **given: Any) -> int:
        values = {name: given.pop(name) for name in names}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if given.pop("module", False):
            values["workload"] = f"module:{values['workload']}"
        call: Call = context.obj
        return run(call, request(**{name: value for name, value in values.items() if value is not None}), **given)

    types = field_types(request)
    parameters = [_parameter(each, types[each.name]) for each in fields(request) if each.metadata["option"].panel]
    names = [parameter.name for parameter in parameters]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    signature = inspect.Signature([context, *parameters, *flags], return_annotation=int)
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
    show_default: Any = True if option.default is None else option.default or False
    if option.positional:
        described: Any = typer.Argument(metavar=option.metavar, help=option.help)
    else:
        described = typer.Option(
            *(option.flags or (_spelling(field.name, default),)),
            metavar="" if cli is bool and not default else option.metavar,
            help=option.help,
            show_default=show_default,
            rich_help_panel=option.panel,
        )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=Annotated[cli if required or default is not None else cli | None, described],
    )


def _spelling(name: str, default: Any) -> str:
    """'--seq-len'; a switch that is on by default can be turned off: '--forecast/--no-forecast'."""
    word = name.replace("_", "-")
    return f"--{word}/--no-{word}" if default is True else f"--{word}"
