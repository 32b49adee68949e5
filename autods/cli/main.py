"""The command line: parse, hand over to a command, exit code. A command's options are the fields of its request."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Any

import typer

from ..arguments import Option, field_types, find_argument_type, find_by_other_name, list_options
from ..errors import (
    AutodsError,
    EnvironmentBroken,
    InputError,
    Interrupted,
    describe_broken_machine,
    describe_failed_import,
)
from ..requests import TrialRequest, WorkloadRequest
from .ending import Call, end_output, end_with_error
from .synopsis import COMMANDS, Module, Synopsis

# Typer names only BadParameter; its base is the error of every wrong command line.
UsageError: Any = typer.BadParameter.__base__
# A closed terminal sends SIGHUP, `ulimit -t` SIGXCPU, and a scheduler may send SIGUSR1 or 2 before the time is up.
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2)
_MOST_DIGITS = 1000  # Python itself converts some thousands
_HELP_OPTIONS = {"help_option_names": ["--help", "-h"]}
_DASHES = tuple("‐‑‒–—―−﹣－")  # that word processors and web pages write for a hyphen
app = typer.Typer(
    help="Finds the fastest DeepSpeed configuration that fits, by real trials.",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=_HELP_OPTIONS,
)


def main(argv: Sequence[str] | None = None, **use_cases: Any) -> int:
    """Run one command line (without the program's name) and return its exit code.

    `use_cases` replace those of `api`, by the names of their commands.
    """
    call = Call(sys.argv if argv is None else ["autods", *argv], use_cases=use_cases)
    with _signals_interrupt(call):
        code = parse_and_run(call, list(call.argv[1:]) or ["--help"])
    return end_output(call, code)


def parse_and_run(call: Call, args: list[str]) -> int:
    """Run the command that `args` name, and return its exit code. Wrong ones end like the errors of a command."""
    ours = args[: args.index("--")] if "--" in args else args  # the others are a script's
    try:
        for word in ours:
            if word.startswith(_DASHES):
                raise typer.BadParameter(f"{word} begins with the character {word[0]}, and an option with two hyphens")
        code = _parser().main(args=args, prog_name="autods", standalone_mode=False, obj=call)
        return call.interrupted_code if code == Interrupted.exit_code else int(code or 0)  # Typer's for a Ctrl-C
    except UsageError as error:
        command = f"{args[0]} " if args[0] in COMMANDS else ""
        # Click's error of an unknown option is the one that has `possibilities`.
        unknown = error.option_name if hasattr(error, "possibilities") and hasattr(error, "option_name") else None
        wrong = _explain_unknown(unknown, args[0]) if command and unknown else None
        wrong = wrong or InputError(error.format_message(), hint=f"see: autods {command}--help")
        return end_with_error(wrong, call, as_json="--json" in ours, resumes=False)
    except typer.Abort:  # a Ctrl-C before the command began
        return call.interrupted_code
    except Exception as error:  # Typer imports modules late
        return end_with_error(error, call, as_json=False, resumes=False)


def _explain_unknown(option: str, command: str) -> InputError | None:
    """The error of an option that the command lacks; None where neither other tools nor other commands have it."""
    if (field := find_by_other_name(option, COMMANDS[command].request)) is not None:
        meant: Option = field.metadata["option"]
        spelling = f"{meant.metavar}, without an option" if meant.positional else f"{_spell(field)[0]} {meant.metavar}"
        return InputError(f"No such option: {option}", hint=f"here it is {spelling}: {meant.help}")
    having: dict[str, list[str]] = {}
    for other, synopsis in COMMANDS.items():
        spelled = {_spell(each)[0]: each for each in list_options(synopsis.request)}
        if (same := spelled.get(option) or find_by_other_name(option, synopsis.request)) is not None:
            having.setdefault(_spell(same)[0], []).append(other)
    if not having:
        return None
    spelling, commands = next(iter(having.items()))
    hint = f"{spelling} is an option of {', '.join(commands)}; see: autods {command} --help"
    return InputError(f"No such option: {option}", hint=hint)


def _spell(field: Field[Any]) -> tuple[str, ...]:
    """The spellings of a field's option, the usual one first."""
    option: Option = field.metadata["option"]
    return option.flags or (f"--{field.name.replace('_', '-')}",)


@functools.cache
def _parser() -> Any:
    """All commands with their options."""
    return typer.main.get_command(app)


@contextlib.contextmanager
def _signals_interrupt(call: Call) -> Iterator[None]:
    """Let the signals that ask a process to end be a Ctrl-C, so that it leaves nothing behind.

    Those that the caller ignores stay ignored, as by nohup; SIGTERM is the one that every caller may rely on.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        call.end_signal = number
        signal.default_int_handler(number, frame)

    before = {number: signal.getsignal(number) for number in _END_SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN or number == signal.SIGTERM:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def make_command(name: str, synopsis: Synopsis) -> Callable[..., int]:
    """A function for Typer that calls `commands.run_NAME(call, request, **flags)` and shows how it ended.

    Its options are the fields of the request, --module where a workload is given, and the flags. Its help is the
    request's docstring.
    """
    request, keyword = synopsis.request, inspect.Parameter.KEYWORD_ONLY
    annotations = {"module": Module} if issubclass(request, WorkloadRequest) else {}
    flags = [
        inspect.Parameter(
            flag, keyword, default=False if annotation.__origin__ is bool else None, annotation=annotation
        )
        for flag, annotation in {**annotations, **synopsis.flags}.items()
    ]

    def command(context: typer.Context, **given: Any) -> int:
        call: Call = context.obj
        values = {name: given.pop(name) for name in options}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if given.pop("module", False):
            values["workload"] = f"module:{values['workload']}"
        call.out = Path(values["out"]) if values.get("out") else None
        try:
            _check_current_folder()
            run: Callable[..., int] = getattr(_load_commands(), f"run_{name}")
            return run(call, request(**{name: value for name, value in values.items() if value is not None}), **given)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, AutodsError):
                error.keep_options([spelling for option in context.command.params for spelling in option.opts])
            resumes = issubclass(request, TrialRequest)
            return end_with_error(error, call, as_json=given["as_json"], resumes=resumes)

    types = field_types(request)
    options = {each.name: _parameter(each, types[each.name]) for each in list_options(request)}
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    signature = inspect.Signature([context, *options.values(), *flags], return_annotation=int)
    command.__doc__ = request.__doc__
    command.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    command.__dict__["__signature__"] = signature
    return command


def _load_commands() -> ModuleType:
    """The module of the commands. Raises EnvironmentBroken where something that it imports is broken or hidden."""
    try:
        from . import commands
    except Exception as error:
        raise EnvironmentBroken(describe_broken_machine(error) or describe_failed_import(error)) from error
    return commands


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        problem = f"the current folder cannot be used: {error.strerror}"
        raise InputError(problem, hint="it was removed or moved: cd to another one") from None


def _parse_count(given: str | int) -> int:
    """Return the whole number that was typed, as Python writes one: 8, 1_000."""
    text = str(given)
    if len(text) > _MOST_DIGITS:
        raise typer.BadParameter(f"a number of {len(text)} digits is too large")
    try:
        return int(text.encode("ascii"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    """A field as a parameter that Typer understands."""
    option: Option = field.metadata["option"]
    kind = find_argument_type(hint)
    cli = str if kind is None else kind.cli
    required = field.default is MISSING
    default = None if required or field.default == () else field.default
    if option.positional:
        described: Any = typer.Argument(metavar=option.metavar, help=option.help)
    else:
        usual, *others = _spell(field)
        if default is True:  # a switch that is on can be turned off: '--forecast/--no-forecast'
            usual += f"/--no-{usual[2:]}"
        described = typer.Option(
            usual,
            *others,
            metavar="" if cli is bool and not default else option.metavar,
            help=option.help,
            show_default=True if option.shown_default is None else option.shown_default or False,
            rich_help_panel=option.panel,
            parser=_parse_count if cli is int else None,
        )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=Annotated[cli if required or default is not None else cli | None, described],
    )


for _name, _synopsis in COMMANDS.items():
    app.command(_name, epilog=_synopsis.epilog, context_settings=_HELP_OPTIONS)(make_command(_name, _synopsis))
