"""What a simulated process says on its socket: an answer, or what went wrong in the user's terms."""

from __future__ import annotations

import contextlib
import json
import socket
import traceback
from collections.abc import Callable
from typing import Any

from ... import procs
from ...values import WorkloadSource


def answer(own: socket.socket, source: WorkloadSource, work: Callable[[], dict[str, Any]]) -> bool:
    """Do the work and say what comes of it; whether it went well."""
    try:
        with procs.ends_with(own):
            said = work()
    except BaseException as error:
        traceback.print_exc()
        said = {"failed": told(error, source.path)}
    say(own, said)
    return "failed" not in said


def told(error: BaseException, user_file: str) -> dict[str, Any]:
    """An exception as kind, what, where, mend."""
    from .library import NoLibrary
    from .refusals import Refused

    if isinstance(error, (NoLibrary, Refused)):
        return {"kind": error.kind, "what": error.what, "where": None, "mend": error.mend}
    from ...trial.describe import describe

    seen = describe(error, user_file)
    names, message = seen["types"], " ".join(str(seen["message"]).split())[:500]
    if seen["contract"]:
        return {"kind": "user_code", "what": seen["contract"], "where": seen["user_frame"], "mend": seen["mend"]}
    data = {"DataDependentOutputException", "DynamicOutputShapeException", "NoValues"} & set(names)
    if data:
        kind, mend = "data_dependent", "compute it without looking at values, or forecast with --no-forecast"
    elif "UnsupportedOperatorException" in names:
        kind, mend = "unsupported", "register a fake implementation with torch.library.register_fake"
    elif seen["user_frame"]:
        kind, mend = "user_code", None
    else:
        kind, mend = "engine", None
    return {"kind": kind, "what": f"{names[0]}: {message}", "where": seen["user_frame"], "mend": mend}


def say(connection: socket.socket, message: dict[str, Any]) -> None:
    """One line of JSON."""
    with contextlib.suppress(OSError):  # the client may be gone; the main loop sees it
        connection.sendall(json.dumps(message).encode() + b"\n")
