"""What the command does before its imports, and how it names a file of the user's that hides a module.

A shell, a scheduler or a container may start the command with closed streams, ignored or blocked signals, an encoding
without most characters, or warnings that are errors. Only the standard library is imported here.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

from .streams import open_standard_streams


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
