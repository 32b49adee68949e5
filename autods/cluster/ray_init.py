"""What holds of every start of Ray and every join, whatever it is told; and its errors in one line."""

from __future__ import annotations

import contextlib
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


def first_line(error: BaseException) -> str:
    """What an error of Ray's says, without the stacks that follow; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
