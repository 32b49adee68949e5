"""What surrounds the command does not decide how it ends: streams, signals, variables, folders and limits."""

from __future__ import annotations

from dataclasses import replace

from tests.support.hostile import Case, each

LOG = {"run.log": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"}
DIAGNOSED = "Out of device memory"
WRONG = "error: gone.log: no such file"
LOST = "error: standard output cannot be written: No space left on device"


def shell(line: str, code: int = 0, message: str = "", *, lines: int = 3, needs: str = "", **files: str) -> Case:
    return Case(line, code, message, "shell", files={**LOG, **files}, lines=lines, needs=needs)


STREAMS = {
    "a reader that leaves": shell("autods --help | head -1"),
    "a reader that reads nothing": shell("autods diagnose run.log | true"),
    "a reader that leaves wrong input": shell("autods diagnose gone.log 2>&1 | true", 2, lines=0),
    "standard output full": shell("autods diagnose run.log >/dev/full", 3, LOST, needs="full device"),
    "help to a full disk": shell("autods --help >/dev/full", 3, LOST, needs="full device"),
    "standard error full": shell("autods diagnose gone.log 2>/dev/full", 2, lines=0, needs="full device"),
    "both full": shell("autods diagnose run.log >/dev/full 2>&1", 3, lines=0, needs="full device"),
    "standard input closed": shell("autods diagnose run.log <&-", 0, DIAGNOSED),
    "a log from closed standard input": shell("autods diagnose - <&-", 2, "standard input is closed"),
    "standard output closed": shell("autods diagnose run.log >&-"),
    "standard error closed": shell("autods diagnose gone.log 2>&-", 2, lines=0),
    "all closed": shell("autods diagnose gone.log <&- >&- 2>&-", 2, lines=0),
}


@each(STREAMS)
def test_streams_do_not_decide_how_a_command_ends(meet, case):
    meet(case)


HIDING = "import sys\n"
MODULES = {
    "a module in the current folder": shell(
        "autods diagnose run.log", 0, DIAGNOSED, **{"typing_extensions.py": HIDING}
    ),
    "a package in the current folder": shell("autods diagnose run.log", 0, DIAGNOSED, **{"random/__init__.py": HIDING}),
    "a module that hides one at the start": shell(
        "PYTHONPATH=hide:$PYTHONPATH autods diagnose run.log",
        3,
        "hide/random.py)",
        **{"hide/random.py": HIDING},
    ),
    "a module that hides one later": shell(
        "PYTHONPATH=hide:$PYTHONPATH autods diagnose run.log",
        3,
        "hide/typing_extensions.py)",
        **{"hide/typing_extensions.py": HIDING},
    ),
}


@each(MODULES)
def test_a_file_that_hides_a_module_is_harmless_or_named(meet, case):
    meet(case)


BYTES = "PYTHONUTF8=0 LC_ALL=POSIX"
SETTINGS = {
    "POSIX and a path of other letters": shell(f"{BYTES} autods diagnose straße.log", 2, "straße.log: no such file"),
    "ASCII and a path of other letters": shell("PYTHONIOENCODING=ascii autods diagnose straße.log", 2, "stra?e.log"),
    "warnings that are errors": shell("PYTHONWARNINGS=error autods diagnose run.log", 0, DIAGNOSED),
    "Python without docstrings": shell("PYTHONOPTIMIZE=2 autods fit --help", 0, "Find the fastest DeepSpeed config"),
    "a current folder that is gone": shell(
        "mkdir gone && cd gone && rmdir ../gone && autods diagnose ../run.log", 2, "the current folder cannot be used"
    ),
}


@each(SETTINGS)
def test_settings_of_the_shell_do_not_decide(meet, case):
    meet(case)


MACHINE = "model.py --gpus 1 --gpu-memory 1GiB"
LIMITS = {
    "too few open files": replace(
        shell(
            f"ulimit -n 64; autods fit {MACHINE} --device cpu --quiet", 3, "`ulimit -n` is 64: Ray needs 256 open files"
        ),
        leaves=("autods-out",),
    ),
    "no file may be written": shell(
        f"ulimit -f 0; autods plan {MACHINE} --host-memory 4GiB --quiet",
        3,
        "no folder for temporary files can be written",
    ),
    "too little memory for torch": shell(
        f"ulimit -v 300000; autods plan {MACHINE} --host-memory 4GiB --quiet", 3, "raise `ulimit -v`"
    ),
    "a torch.py in PYTHONPATH": shell(
        f"PYTHONPATH=hide:$PYTHONPATH autods plan {MACHINE} --host-memory 4GiB --quiet",
        3,
        "torch.py: it hides the module torch",
        **{"hide/torch.py": HIDING},
    ),
}


@each(LIMITS)
def test_what_the_machine_refuses_is_named(meet, case):
    meet(case)
