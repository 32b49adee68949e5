"""A terminal of a changing size: a pty, and what its screen shows, as a terminal that breaks long lines anew has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Sequence

_SEQUENCE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


class Screen:
    """Rows of text and a cursor. It knows the sequences that rich sends; colours are left out."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[str] = [""]  # unbroken
        self.row = self.column = 0  # of the broken ones

    def rows(self) -> list[str]:
        """The rows, those that were scrolled away as well."""
        return [line[at : at + self.width] for line in self.lines for at in range(0, max(1, len(line)), self.width)]

    def resize(self, width: int) -> None:
        """Break the lines anew; the cursor stays at the end of its line, where rich leaves it."""
        line, _ = self._find()
        self.width = width
        self.row = sum(max(1, -(-len(each) // width)) for each in self.lines[: line + 1]) - 1

    def _find(self) -> tuple[int, int]:
        """The unbroken line that the cursor's row belongs to, and the row's place in it."""
        row = self.row
        for number, line in enumerate(self.lines):
            count = max(1, -(-len(line) // self.width))
            if row < count:
                return number, row
            row -= count
        raise AssertionError("the cursor is below the screen")

    def write(self, text: str) -> None:
        """What a program prints."""
        at = 0
        while at < len(text):
            if match := _SEQUENCE.match(text, at):
                self._control(*match.groups())
                at = match.end()
                continue
            at += 1
            match text[at - 1]:
                case "\n":
                    line, place = self._find()
                    self.row += max(1, -(-len(self.lines[line]) // self.width)) - place
                    if line + 1 == len(self.lines):
                        self.lines.append("")
                case "\r":
                    self.column = 0
                case letter:
                    self._put(letter)

    def _put(self, letter: str) -> None:
        line, place = self._find()
        at = place * self.width + self.column
        self.lines[line] = self.lines[line][:at].ljust(at) + letter + self.lines[line][at + 1 :]
        self.column += 1
        if self.column > self.width:
            self.row, self.column = self.row + 1, 1

    def _control(self, numbers: str, kind: str) -> None:
        match kind:
            case "A":
                self.row = max(0, self.row - int(numbers or 1))
            case "K":
                line, place = self._find()
                text, start = self.lines[line], place * self.width
                self.lines[line] = (text[:start] + text[start + self.width :]).rstrip()
            case "J" if numbers == "2":
                self.lines, self.row, self.column = [""], 0, 0
            case _:
                pass


def run_on_terminal(command: Sequence[str], widths: Sequence[int], until: Sequence[str]) -> list[list[str]]:
    """Run a command on a terminal of the first width, and make it the next one when the screen shows a text of `until`.

    Returns the rows of the screen at each of these texts. The command is ended after the last one.
    """
    terminal, inside = pty.openpty()
    decoder = getincrementaldecoder("utf-8")()
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "CI", "NO_COLOR")}
    _resize(terminal, widths[0])
    process = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env=environment | {"TERM": "xterm-256color"}
    )
    os.close(inside)
    screens, screen, ends = list[list[str]](), Screen(widths[0]), time.monotonic() + 60
    try:
        for number, text in enumerate(until):
            while text not in "\n".join(screen.rows()):
                assert time.monotonic() < ends, screen.rows()
                if select.select([terminal], [], [], 0.1)[0]:
                    try:
                        printed = os.read(terminal, 1 << 16)
                    except OSError:  # nobody has the other side
                        raise AssertionError(f"it ended before {text!r}: {screen.rows()}") from None
                    screen.write(decoder.decode(printed))
            screens.append(screen.rows())
            if number + 1 < len(widths):
                screen.resize(widths[number + 1])
                _resize(terminal, widths[number + 1])
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return screens


def _resize(terminal: int, width: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
