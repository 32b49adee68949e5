"""Write docs/cli.md: every command with its options and examples, from the requests that define them.

python docs/reference.py            write it
python docs/reference.py --check    exit with 1 where it is not current
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from autods.arguments import Option, list_options
from autods.cli.synopsis import COMMANDS, Module
from autods.requests import WorkloadRequest

PAGE = Path(__file__).with_name("cli.md")
INTRODUCTION = """# Command line

<!-- Written by docs/reference.py: change the requests in autods/requests.py instead. -->

`autods COMMAND --help` shows the same. From Python each command but `report` is a [function](api.md).
Its names are the same: `--gpu-memory 16GiB` is `gpu_memory="16GiB"`. Two differ: `fit` is `find_best_config`, and
`--with` is `with_rungs`.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(line for name in COMMANDS for line in _render_command(name))]).rstrip() + "\n"


def _render_command(name: str) -> Iterator[str]:
    synopsis = COMMANDS[name]
    request = synopsis.request
    options = [(each, each.metadata["option"]) for each in list_options(request)]
    positional = [
        option.metavar if each.default is MISSING else f"[{option.metavar}]"
        for each, option in options
        if option.positional
    ]
    usage = sorted([*positional, "[OPTIONS]"], key=lambda word: word.startswith("[--"))
    yield f"## autods {name}\n"
    yield f"```\n{' '.join(['autods', name, *usage])}\n```\n"
    yield f"{inspect.getdoc(request)}\n"
    panels: dict[str, list[str]] = {}
    for each, option in options:
        panels.setdefault(option.panel, []).append(_render_row(each, option))
    flags = [Module] if issubclass(request, WorkloadRequest) else []
    for annotation in [*flags, *synopsis.flags.values()]:
        flag = annotation.__metadata__[0]
        spelling = ", ".join(f"`{text} {flag.metavar}".rstrip() + "`" for text in (flag.default, *flag.param_decls))
        panels.setdefault(flag.rich_help_panel, []).append(f"| {spelling} | {flag.help} | |")
    for panel, rows in panels.items():
        yield f"**{panel}**\n\n| option | meaning | default |\n|---|---|---|"
        yield "\n".join(rows) + "\n"
    examples = [line.split("      ")[0] for line in synopsis.examples.splitlines()]
    yield "```\n" + "\n".join(examples) + "\n```\n"
    yield f"Exit codes: {synopsis.exit_codes}\n"


def _render_row(field: Field[Any], option: Option) -> str:
    if option.positional:
        name = f"`{option.metavar}`"
    else:
        spelling = f"--{field.name.replace('_', '-')}"
        spellings = option.flags or ((spelling, f"--no-{spelling[2:]}") if field.default is True else (spelling,))
        metavar = f" {option.metavar}" if option.metavar else ""
        name = ", ".join(f"`{spelling}{metavar}`" for spelling in spellings)
    default = option.shown_default
    if default is None:
        usual = field.default
        default = "" if usual in (MISSING, None, (), False) else "on" if usual is True else str(usual)
    text = option.help.replace("|", "\\|")
    return f"| {name.replace('|', chr(92) + '|')} | {text} | {default} |"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == render() else "docs/cli.md is not current: python docs/reference.py")
    PAGE.write_text(render())
