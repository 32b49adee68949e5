"""What a process has after `prepare_process`, however it was started. Each is a Python that imports nothing heavy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = f"""
import json, os, signal, sys, warnings
sys.path.insert(1, {str(ROOT)!r})
from autods.cli.startup import prepare_process
prepare_process()
warnings.warn("nothing", UserWarning)
child = os.spawnv(os.P_NOWAIT, "/bin/sh", ["sh", "-c", "exit 7"])
json.dump({{
    "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "child": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
    "umask": os.umask(0),
    "encoding": sys.getfilesystemencoding(),
    "optimize": sys.flags.optimize,
    "warnings": os.environ.get("PYTHONWARNINGS"),
    "open": [os.fstat(number).st_mode > 0 for number in (0, 1, 2)],
    "path": sys.path,
}}, open(sys.argv[1], "w"))
"""


def start(folder: Path, prepare: Callable[[], object] | None = None, **env: str) -> dict[str, Any]:
    """What the program finds, when it starts as `prepare` and the variables leave it."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "found.json"]
    subprocess.run(command, cwd=folder, preexec_fn=prepare, env={**os.environ, **env}, check=True, timeout=60)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_signals_of_the_caller_are_reset(tmp_path: Path) -> None:
    def prepare() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])

    found = start(tmp_path, prepare)
    assert (found["blocked"], found["child"]) == ([], 7)


def test_closed_descriptors_are_open_afterwards(tmp_path: Path) -> None:
    found = start(tmp_path, lambda: [os.close(number) for number in (0, 1, 2)])
    assert found["open"] == [True, True, True]


@pytest.mark.parametrize(("given", "kept"), [(0o777, 0o077), (0o027, 0o027), (0, 0)])
def test_files_stay_readable_for_their_owner(tmp_path: Path, given: int, kept: int) -> None:
    assert start(tmp_path, lambda: os.umask(given))["umask"] == kept


def test_python_begins_again_where_text_would_not_survive(tmp_path: Path) -> None:
    found = start(tmp_path, LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONOPTIMIZE="2")
    assert (found["encoding"], found["optimize"]) == ("utf-8", 0)


def test_warnings_are_no_errors_here_or_in_children(tmp_path: Path) -> None:
    assert (
        start(tmp_path, PYTHONWARNINGS="error,ignore::DeprecationWarning")["warnings"] == "ignore::DeprecationWarning"
    )


def test_the_current_folder_is_no_place_for_imports(tmp_path: Path) -> None:
    assert str(tmp_path) not in start(tmp_path)["path"]
