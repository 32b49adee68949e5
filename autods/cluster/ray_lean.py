"""What Ray's head starts and a fit does not use."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

_UNUSED = {"no_monitor": True, "include_log_monitor": False}  # as `ray start` has them


@contextlib.contextmanager
def without_monitors() -> Iterator[None]:
    """ray.init inside starts no autoscaler, log monitor or dashboard server, and the small one of its two agents.

    Each is a Python that imports Ray, together some 2 s of processors while torch is being loaded. `ray start` has
    switches for the first two, ray.init for none. The node's agent has a small form, for a Ray that was installed
    without its dashboard: the other one listens on a fixed port, and where another Ray of this machine has that, tries
    for 3.4 s to get it while the raylet waits. Where a release of Ray has other names, they are started as usual.
    """
    with contextlib.ExitStack() as stack:
        for arrange in (_no_monitors, _small_agent):
            with contextlib.suppress(ImportError, AttributeError, TypeError, ValueError):
                arrange(stack)
        yield


def _small_agent(stack: contextlib.ExitStack) -> None:
    from ray._private import utils

    lacks = utils.get_dashboard_dependency_error
    utils.get_dashboard_dependency_error = lambda: ImportError("nobody looks at a dashboard of ours")
    stack.callback(setattr, utils, "get_dashboard_dependency_error", lacks)


def _no_monitors(stack: contextlib.ExitStack) -> None:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    init, serve = RayParams.__init__, Node.start_api_server
    known = inspect.signature(init).parameters
    unused = {name: value for name, value in _UNUSED.items() if name in known}

    def without(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **{**named, **unused})

    def serve_nothing(self: Any, **named: Any) -> None:
        if named.get("include_dashboard") is not False:
            serve(self, **named)
        else:
            self._webui_url = None

    RayParams.__init__ = without
    stack.callback(setattr, RayParams, "__init__", init)
    Node.start_api_server = serve_nothing
    stack.callback(setattr, Node, "start_api_server", serve)
