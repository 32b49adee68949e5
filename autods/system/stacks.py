"""The user's line: in the stack that a process writes into its log when it is asked to, and on this process's own."""

from __future__ import annotations

import ctypes
import faulthandler
import linecache
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from . import processes

# No other program uses it: schedulers send SIGUSR1 and SIGUSR2, and trainers save checkpoints then.
_ASK = signal.SIGRTMIN + 9
_LIBC = ctypes.CDLL(None)
_LOOK_EVERY_S, _ANSWER_S = 0.02, 2.0
_MOST_BYTES = 2**16
_FRAME = re.compile(r'^  File "([^"\n]*)", line (\d+) in ([^\n]*)$')
ANSWER = "Stack (most recent call first):"  # the heading of an answer to `ask`: one thread
_HEADINGS = ("Current thread 0x", ANSWER)  # with the other threads, and without them
_THREAD = re.compile(r"^(?=Thread 0x)", re.MULTILINE)
# Installed packages, the standard library, modules without a file, and our own.
_NOT_THE_USERS = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<|/autods/(?:rank|runner|workload|forecast|system)/"
)
_STDLIB = re.compile(r"/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)|^<frozen ")
# What libraries call, and what calls them.
_BELOW_LIBRARIES = re.compile(r"/torch/|/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)|^<|/autods/")
# They may be installed from a checkout, which lies where the user's own code may lie.
_LIBRARIES = {"torch", "deepspeed", "transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "trl"}
_AUTODS = str(Path(__file__).parents[1]) + os.sep
# Who is in there waits for another rank. With NCCL the host goes on, and waits for the card in `synchronize`.
_AWAITS = re.compile(r"/torch/distributed/|/deepspeed/(?:comm|runtime)/|/autods/rank/training_run/consensus\.py$")
_DEVICES = re.compile(r"/torch/(?:cuda|accelerator)/")
_NETWORK = re.compile(r"/lib(?:64)?/python3[^/]*/(?:ssl|socket)\.py$")
_GENERATES = "/transformers/generation/"
_AUTOGRAD = "/torch/autograd/"  # the main thread waits there while others run the backward pass


class Frame(NamedTuple):
    """A line of a stack; on this process's own with its source text."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_users(self) -> bool:
        """Whether it is neither in an installed package nor in autods."""
        return _NOT_THE_USERS.search(self.file) is None and not self.file.startswith(_AUTODS)


def is_frame(line: str) -> bool:
    """Whether a line is one below such a heading: a frame, or the dots where faulthandler ends a deep stack."""
    return line == "  ..." or _FRAME.match(line) is not None


def answer_requests() -> None:
    """Let this process, and those that it forks, write the main thread's stack to descriptor 2 when asked to."""
    faulthandler.register(_ASK, file=sys.__stderr__ or 2, all_threads=False)


def ask(pid: int) -> bool:
    """Ask a process for its stack; False where it cannot answer."""
    status = processes.read_status(pid)
    caught = int(status.get("SigCgt", "0"), 16) >> (_ASK - 1) & 1  # else the signal would end it
    if not caught or status.get("State", "Z")[0] in "TZX":
        return False
    # The kernel may give the signal of a process to any of its threads, and the one that gets it writes its own stack.
    return int(_LIBC.tgkill(pid, pid, _ASK)) == 0


def read_stack(pid: int, log: int) -> tuple[Frame, ...]:
    """Return the main thread's stack of a process that logs into the open file `log`; () if it does not answer.

    The innermost frame comes first.
    """
    before = os.fstat(log).st_size
    if not ask(pid):
        return ()
    stack: tuple[Frame, ...] = ()
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
        text = os.pread(log, _MOST_BYTES, before).decode(errors="replace")
        stack = parse_stack(text)
        if stack and text.endswith("\n") and not processes.is_handling_signal(pid, _ASK):
            break
    return stack


def parse_stack(text: str) -> tuple[Frame, ...]:
    """The last stack of the main thread that `faulthandler` wrote into this text; () where there is none."""
    begin = max(text.rfind(heading) for heading in _HEADINGS)
    return tuple(_frames(text[begin:])) if begin >= 0 else ()


def _frames(text: str) -> Iterator[Frame]:
    """The frames of the first stack in this text, whose first line is a heading."""
    for line in text.splitlines()[1:]:
        if (match := _FRAME.match(line)) is None:
            return
        yield Frame(match[1], int(match[2]), match[3])


def find_user_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost line of the user's code."""
    return next((frame for frame in stack if frame.is_users), None)


def describe_place(pid: int, stack: tuple[Frame, ...]) -> str:
    """'in load_data, /x/model.py:7': the user's line in a stack, else the line of the library that works for it.

    Without such a line the innermost one, and without a stack the process's state.
    """
    library = next((frame for frame in stack if _BELOW_LIBRARIES.search(frame.file) is None), None)
    frame = find_user_frame(stack) or library or next(iter(stack), None)
    if frame is None:
        return processes.describe_process(pid)
    generates = any(_GENERATES in frame.file for frame in stack)
    return f"in {frame.function}, {frame}{', which generates text token by token' if generates else ''}"


def find_crash(log: str) -> Frame | None:
    """The line of the user's code in which a process crashed, or called the standard library that crashed.

    None without a stack, and where the process was in an installed package or in autods.
    """
    for frame in parse_stack(log):
        if frame.is_users:
            return frame
        if _STDLIB.search(frame.file) is None:
            return None
    return None


def find_hang(log: str) -> Frame | None:
    """The line of the user's code in which a rank hangs by itself, by the stacks at the end of its log.

    None where there is no such line, and where the rank waits for another one, in a collective or in DeepSpeed.
    """
    frame = _find_deciding_frame(log)
    return frame if frame is not None and frame.is_users else None


def awaits_ranks(log: str) -> bool:
    """Whether a rank waits for another one, in a collective or in DeepSpeed, by the stacks at the end of its log."""
    frame = _find_deciding_frame(log)
    return frame is not None and not frame.is_users


def is_in_wait(log: str) -> bool:
    """Whether the main thread's innermost frame waits for another rank, by the last stack in this text."""
    stack = parse_stack(log)
    return bool(stack) and _awaits(stack[0])


def awaits_network(log: str) -> bool:
    """Whether the main thread waits at a socket, by the last stack in this text."""
    stack = parse_stack(log)
    return bool(stack) and _NETWORK.search(stack[0].file) is not None


def _find_deciding_frame(log: str) -> Frame | None:
    """The innermost frame that is in the user's code, or that waits for another rank."""
    stack = parse_stack(log)
    if stack and _AUTOGRAD in stack[0].file:
        threads = [tuple(_frames(part)) for part in _THREAD.split(log)[1:]]
        stack = next((thread for thread in reversed(threads) if find_user_frame(thread) is not None), stack)
    return next((frame for frame in stack if frame.is_users or _awaits(frame)), None)


def _awaits(frame: Frame) -> bool:
    """Whether who is in this frame waits for another rank, or for a device that may wait for another one's."""
    is_on_device = frame.function == "synchronize" and _DEVICES.search(frame.file) is not None
    return is_on_device or _AWAITS.search(frame.file) is not None


# In this process.


def find_caller() -> Frame | None:
    """The innermost line of the user's files on the current stack; None if there is none.

    Where `python -m` runs an installed package, such as a trainer's command line, its lines stand in for them.
    """
    return _first_of_user(list(traceback.walk_stack(sys._getframe(1))))


def find_raiser(error: BaseException) -> Frame | None:
    """The innermost line of the user's files in the traceback, found as `find_caller` does; None if there is none."""
    return _first_of_user(list(traceback.walk_tb(error.__traceback__))[::-1])


def find_library_raiser(error: BaseException) -> Frame | None:
    """The innermost line of the traceback below which only torch and the standard library are; None for autods' own."""
    places = (_locate(frame, line) for frame, line in list(traceback.walk_tb(error.__traceback__))[::-1])
    return next((place for place in places if _BELOW_LIBRARIES.search(place.file) is None), None)


def _locate(frame: FrameType, line: int) -> Frame:
    return Frame(frame.f_code.co_filename, line, frame.f_code.co_name)


def _first_of_user(frames: Sequence[tuple[FrameType, int]]) -> Frame | None:
    """The first line of the user's files among frames that begin with the innermost; None if there is none."""
    package = _find_main_package(frames)
    places = [(_locate(frame, line), frame) for frame, line in frames]
    users = next((place for place, frame in places if place.is_users and not _is_of(frame, _LIBRARIES)), None)
    users = users or next((place for place, frame in places if package and _is_of(frame, {package})), None)
    return None if users is None else users._replace(code=linecache.getline(users.file, users.line).strip())


def _find_main_package(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """The top package of the module that runs as the program; None for a file, and for autods."""
    for frame, _ in frames:
        package = frame.f_globals.get("__package__")
        if frame.f_globals.get("__name__") == "__main__" and package:
            top = str(package).partition(".")[0]
            return None if frame.f_code.co_filename.startswith(_AUTODS) else top
    return None


def _is_of(frame: FrameType, packages: Set[str]) -> bool:
    names = {str(frame.f_globals.get(name)).partition(".")[0] for name in ("__name__", "__package__")}
    return not names.isdisjoint(packages)
