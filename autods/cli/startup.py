"""What the command does before its imports: standard streams, signals, encoding, where modules come from.

A shell, a scheduler or a container may start the command with closed streams, ignored or blocked signals, an encoding
without most characters, or warnings that are errors. A reader of its output that leaves early, as `| head` does, is no
failure, and neither is progress that nobody can see. A result that could not be written, on a full disk say, is a
failure: see `find_loss`. Only the standard library is imported here.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

_CAN_PRINT_ALL = "utf-8"
_PLAIN = "autods.plain"  # how a stream treats what its encoding lacks; see `_replace_by_plain`
_PLAIN_SIGNS = {
    "✓": "+", "✗": "x", "×": "x", "–": "-", "−": "-", "·": "-", "…": "...", "→": "->", "≥": ">=", "≈": "~", "±": "+-",
}  # fmt: skip


def prepare_process() -> None:
    """Make this process fit for the command. Call it before anything else is imported."""
    open_standard_streams()
    _begin_again_in_usual_python()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # who blocks SIGTERM meant its own process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # with SIG_IGN the kernel keeps no exit codes of children
    os.umask(os.umask(0) & 0o077)  # our own files have to be ours to read
    _leave_the_current_folder()
    _print_warnings()


def _begin_again_in_usual_python() -> None:
    """Begin again where Python itself was started in a way that Ray or other text does not survive.

    In UTF-8 mode, where the locale has another encoding: paths and texts may have any letter. And with docstrings,
    which PYTHONOPTIMIZE=2 removes: Ray and the help need them.
    """
    options = []
    if sys.getfilesystemencoding() != "utf-8" and "utf8" not in sys._xoptions:
        options = ["-X", "utf8"]
        os.environ["PYTHONUTF8"] = "1"  # for the processes that it starts
    optimized = os.environ.pop("PYTHONOPTIMIZE", "") and sys.flags.optimize
    if (options or optimized) and sys.executable:
        os.execv(sys.executable, [sys.executable, *options, *sys.orig_argv[1:]])


def _leave_the_current_folder() -> None:
    """Import nothing from the current folder, which `python -m` puts first, unless the package lies there."""
    package = Path(__file__).parents[2]
    if not sys.flags.safe_path and sys.path and Path(sys.path[0]) != package:
        first = sys.path[0]
        if first in ("", os.curdir) or os.path.realpath(first) == os.path.realpath(os.curdir):
            del sys.path[0]


def _print_warnings() -> None:
    """Turn warnings that were made errors into warnings again: those of Ray, torch and DeepSpeed are not the user's."""
    if any(option.partition(":")[0] in ("error", "e", "er", "err", "erro") for option in sys.warnoptions):
        warnings.simplefilter("ignore")
        kept = [each for each in os.environ.get("PYTHONWARNINGS", "").split(",") if not each.startswith("e")]
        os.environ["PYTHONWARNINGS"] = ",".join(kept)


class Output(io.FileIO):
    """A descriptor whose `write` raises no OSError. What it cannot write goes nowhere; `failure` is the first error.

    A terminal that was closed is a reader that left, as the other end of a pipe: BrokenPipeError.
    """

    failure: OSError | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.was_terminal = self.isatty()

    def write(self, data: Any, /) -> int:
        """Write everything, waiting for the reader of a descriptor that another program made non-blocking."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and self.failure is None:
                count = super().write(rest)
                if count is None:
                    select.select([], [self], [])
                else:
                    rest = rest[count:]
        except OSError as error:
            self.failure = BrokenPipeError() if self.was_terminal and error.errno == errno.EIO else error
            with contextlib.suppress(OSError):  # libraries in C that print, and child processes, meet no error either
                _open_null(self.fileno())
        return size


def _replace_by_plain(error: UnicodeError) -> tuple[str, int]:
    """The handler of `_PLAIN`: autods's own signs become letters that say the same, and other characters ?."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN_SIGNS.get(sign, "?") for sign in lacking), error.end


codecs.register_error(_PLAIN, _replace_by_plain)


def open_standard_streams() -> None:
    """Make the descriptors 0 to 2 and `sys.stdout` and `sys.stderr` fit for use. Call it before any file is opened.

    A closed descriptor is opened on /dev/null: the next file or socket would take its number, and get what is printed.
    `sys.stdin` stays None where standard input was closed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            _open_null(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, _wrap(number, getattr(sys, name), name))


def find_loss(stream: TextIO | None) -> str | None:
    """Return why a part of what was printed to the stream is lost; None where it is not, or where its reader left."""
    try:
        if stream is not None:
            stream.flush()
    except OSError as error:
        failure: OSError | None = error
    else:
        failure = getattr(getattr(getattr(stream, "buffer", None), "raw", None), "failure", None)
    return None if failure is None or isinstance(failure, BrokenPipeError) else failure.strerror or str(failure)


def _wrap(number: int, stream: TextIO | None, name: str) -> io.TextIOWrapper:
    raw = Output(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None) or _CAN_PRINT_ALL,
        errors=_PLAIN,  # a terminal without × or ≥ is no reason to die
        line_buffering=name == "stderr" or raw.isatty(),
        write_through=name == "stderr",
    )


def _open_null(number: int) -> None:
    """Open /dev/null as the descriptor of this number."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
