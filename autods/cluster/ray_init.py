"""What holds of every start of Ray and every join, whatever it is told; and its errors in one line."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """`ray.init` puts sys.exit there; afterwards it is as it was."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Ray's processes begin in sessions of their own: a signal for our whole process group (of `timeout`, scancel, a
    terminal that closes) is ours to take, and Ray has to be there until the ranks are gone. They end with us all the
    same, since Ray binds their lives to ours. Where a release of Ray has another name for it, they begin as usual."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):
            from ray._private import services

            usual = services.ConsolePopen
            services.ConsolePopen = functools.partial(usual, start_new_session=True)
            stack.callback(setattr, services, "ConsolePopen", usual)
        yield


def said_by(error: BaseException) -> str:
    """What an error of Ray's says, without the stacks that follow; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
