"""Ends of a process that raise no exception: the user's code calls `os._exit`, sends itself a signal, or forks.

While `watching`, such a call is reported with its line before the process ends. A process that the user's code forks
may do what it likes, as long as it does not come back and go on as a second rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from ..units import format_signal
from ..workload.protocol import WorkloadError
from .patching import Patch, declare, declare_all
from .user_frames import Place, find_caller, is_users

_ENDS = "a workload that ends its process is reported with its line"
_EXITS = declare_all("os", ("_exit", "execv", "execve"), _ENDS)
_KILL = declare("os.kill", _ENDS)
_KILLPG = declare("os.killpg", _ENDS)
_RAISE = declare("signal.raise_signal", _ENDS)
_CLOSERANGE = declare("os.closerange", "a workload that closes all descriptors is reported with its line")
_FORK = declare("os.fork", "a process that the workload forks must not go on as a second rank")
_DISABLE = declare("faulthandler.disable", "the stack of a process that crashes is read from its log")
_EXIT_NOW, _KILL_NOW = os._exit, os.kill  # the real ones
_IGNORED = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}  # by default
_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
_LEAVES = "a workload must not leave the process"
_COMES_BACK_S = 1.0  # a forked process that comes back does so about when its parent does
_POLL_S = 0.01


@dataclass(slots=True)
class Watch:
    """What happened while the user's code was watched in the process `pid`.

    `leave` gets the error of an abrupt end; the process is ended after it. `descriptors` are those that were open
    before. `forked` are the processes that the user's own code forked, with the line, since the last `check`.
    """

    leave: Callable[[BaseException], object]
    pid: int = field(default_factory=os.getpid)
    descriptors: frozenset[int] = field(default_factory=lambda: _list_descriptors())
    forked: list[tuple[int, Place]] = field(default_factory=list)
    fork_place: Place | None = None  # in the forked process

    def end(self, problem: str, hint: str = _LEAVES, *, at: Place | None = None) -> None:
        """Report the end of this process at a line of the user's code, and end it.

        An exception that is being handled is its cause, and is reported instead. Returns if no code of the user's
        calls: then a library knows what it does.
        """
        place = at or find_caller()
        if place is None or _watch is not self:
            return
        _stop_watching()
        handled = sys.exception()
        error = handled if isinstance(handled, Exception) else WorkloadError(problem, place=str(place), hint=hint)
        try:
            self.leave(error)
        finally:
            _EXIT_NOW(1)

    def check(self) -> None:
        """The user's code has returned. In a process that it forked, report that and end both processes.

        The process itself waits a moment for those that were forked.
        """
        if os.getpid() != self.pid:
            hint = "let it end with os._exit(0), or start a program with subprocess"
            problem = "os.fork() was called, and the new process goes on as a second rank"
            place = None if self.fork_place is None else str(self.fork_place)
            try:
                self.leave(WorkloadError(problem, place=place, hint=hint))
            finally:
                if os.getppid() == self.pid:  # else it has ended by itself
                    _KILL_NOW(self.pid, signal.SIGKILL)
                _EXIT_NOW(1)
        until = monotonic() + _COMES_BACK_S
        for pid, _ in self.forked:
            while _is_running(pid) and monotonic() < until:
                sleep(_POLL_S)
        self.forked.clear()


_watch: Watch | None = None
_installed: list[Patch] = []  # for the rest of this process


@contextlib.contextmanager
def watching(leave: Callable[[BaseException], object]) -> Iterator[Watch]:
    """Report abrupt ends of this process to `leave` until the block ends. See `Watch`."""
    global _watch
    if not _installed:
        _install()
    former, _watch = _watch, Watch(leave)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, _end_by_timer) for number in _TIMERS if in_main_thread}
    try:
        yield _watch
    finally:
        _watch = former
        for number, handler in handlers.items():
            if signal.getsignal(number) is _end_by_timer:
                signal.signal(number, handler)


@contextlib.contextmanager
def ending_forked_children() -> Iterator[None]:
    """A process that the block forks ends where it raises; it does not go on as this one."""
    pid = os.getpid()
    try:
        yield
    except BaseException:
        if os.getpid() != pid:
            traceback.print_exc()
            os._exit(1)
        raise


def current_watch() -> Watch | None:
    """The watch of this process, None where the user's code is not watched."""
    return _watch if _watch is not None and _watch.pid == os.getpid() else None


def _stop_watching() -> None:
    global _watch
    _watch = None


def _install() -> None:
    for name, patch in _EXITS.items():
        patch.wrap(_before_exit, name)
    _KILL.wrap(_before_kill)
    _KILLPG.wrap(_before_killpg)
    _RAISE.wrap(_before_raise)
    _CLOSERANGE.wrap(_before_closerange)
    _FORK.wrap(_note_fork)
    _DISABLE.wrap(_keep_faulthandler)
    _installed.extend((*_EXITS.values(), _KILL, _KILLPG, _RAISE, _CLOSERANGE, _FORK, _DISABLE))


def _before_exit(name: str, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    if (watch := current_watch()) is not None:
        argument = repr(args[0]) if args and isinstance(args[0], int | str) else "…"
        watch.end(f"os.{name}({argument}) was called")
    return original(*args, **kwargs)


def _before_kill(original: Any, /, pid: int, number: int) -> Any:
    if (watch := current_watch()) is not None and (name := _name(number)):
        if pid in (0, watch.pid, -os.getpgrp()) and _ends_us(number):
            watch.end(f"os.kill({'0' if pid == 0 else 'os.getpid()'}, {name}) was called")
        elif pid == -1 or abs(pid) in _list_ancestors() or -pid in map(_group_of, _list_ancestors()):
            watch.end(f"os.kill({pid}, {name}) was called", "a workload must not end the processes that started it")
    return original(pid, number)


def _before_killpg(original: Any, /, group: int, number: int) -> Any:
    if (watch := current_watch()) is not None and (name := _name(number)):
        is_ours = group in (0, os.getpgrp()) and _ends_us(number)
        if is_ours or group in map(_group_of, _list_ancestors()):
            watch.end(f"os.killpg({group}, {name}) was called")
    return original(group, number)


def _before_raise(original: Any, /, number: int) -> Any:
    if (watch := current_watch()) is not None and (name := _name(number)) and _ends_us(number):
        watch.end(f"signal.raise_signal({name}) was called")
    return original(number)


def _before_closerange(original: Any, /, low: int, high: int) -> Any:
    if (watch := current_watch()) is not None and any(low <= number < high for number in watch.descriptors):
        watch.end(f"os.closerange({low}, {high}) was called", "it closes descriptors of torch and of autods")
    return original(low, high)


def _note_fork(original: Any, /) -> int:
    watch = current_watch()
    caller = sys._getframe(2)  # the line that calls os.fork; multiprocessing forks as well
    place = find_caller(caller) if watch is not None and is_users(caller.f_code.co_filename) else None
    pid: int = original()
    if watch is not None and place is not None:
        if pid:
            watch.forked.append((pid, place))
        else:
            watch.fork_place = place
    return pid


def _keep_faulthandler(original: Any, /) -> bool:
    return bool(original()) if current_watch() is None else True


def _end_by_timer(number: int, frame: Any) -> None:
    """The handler of a timer's signal, whose default would end the process without a word."""
    if (watch := current_watch()) is not None:
        at = find_caller(frame)
        if at is not None:
            watch.end(f"a timer ended the process here ({format_signal(number)})", at=at, hint=_LEAVES)
    signal.signal(number, signal.SIG_DFL)
    _KILL_NOW(os.getpid(), number)


def _name(number: object) -> str:
    """The name of a signal; '' for what is none, such as 0, which only asks whether a process exists."""
    return format_signal(number) if isinstance(number, int) and number in signal.valid_signals() else ""


def _ends_us(number: int) -> bool:
    """Whether the signal ends or stops this process."""
    if number in (signal.SIGKILL, signal.SIGSTOP):
        return True
    return number not in _IGNORED and signal.getsignal(number) in (signal.SIG_DFL, _end_by_timer)


def _list_descriptors() -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir("/proc/self/fd"))


def _list_ancestors() -> list[int]:
    """The pids of the processes that started this one, the nearest first."""
    pids, pid = [], os.getppid()
    while pid > 0 and pid not in pids:
        pids.append(pid)
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(") ")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return pids


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def _is_running(pid: int) -> bool:
    """Whether our child has not ended. It is not reaped: its parent's code may wait for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except OSError:  # it was waited for
        return False
