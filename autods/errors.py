"""The errors that end a command. A trial that runs out of memory is a value instead (`types.OutOfMemory`)."""

from __future__ import annotations


class AutodsError(Exception):
    """Base of all errors that autods raises on purpose. The message is one or two lines for a person."""

    exit_code = 1
    kind = "internal"  # what the object of --json says


class InputError(AutodsError):
    """The user's input is wrong. `problem` is what is wrong, `place` a file and line, and `hint` the fix."""

    exit_code = 2
    kind = "input"

    def __init__(self, problem: str, *, place: str | None = None, hint: str | None = None) -> None:
        self.problem, self.place, self.hint = problem, place, hint
        line = f"{place}: {problem}" if place else problem
        super().__init__(f"{line}\n  {hint}" if hint else line)


class EnvironmentBroken(AutodsError):
    """The machine or the installation lacks something; the message names the command that fixes it."""

    exit_code = 3
    kind = "environment"


class Interrupted(AutodsError):
    """Ctrl-C or SIGTERM stopped the command. All ranks are gone and the journal is kept."""

    exit_code = 130
    kind = "interrupted"
