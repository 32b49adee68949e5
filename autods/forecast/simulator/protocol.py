"""Messages between the simulator's client and worker, and what the simulator refuses."""

from __future__ import annotations

import contextlib
import json
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...system import processes
from ...types import WorkloadSource


class Refused(Exception):
    """As `SimulationFailed` of the asking side: kind, what, hint."""

    def __init__(self, kind: str, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.kind, self.what, self.hint = kind, what, hint


def unsupported(what: str, hint: str | None = None) -> Refused:
    """Something whose memory nobody knows here: better no forecast than a wrong one."""
    return Refused("unsupported", what, hint or "forecast with --no-forecast, or measure by a trial (autods fit)")


@contextlib.contextmanager
def of_the_optimizer(config: Mapping[str, Any]) -> Iterator[None]:
    """What `deepspeed.initialize` or a step says of an optimizer, in the words of its config."""
    try:
        yield
    except Exception as error:
        said = str(error)
        name = (config.get("optimizer") or {}).get("type")
        whose = f"the optimizer {name}" if name else "the optimizer of build_optimizer"
        if isinstance(error, AssertionError) and "untested ZeRO Optimizer" in said:
            raise Refused(
                "engine",
                f"DeepSpeed has not tested ZeRO with {whose}, and refuses it",
                'add "zero_allow_untested_optimizer": true to the config, or use Adam, AdamW, Adagrad or Lion',
            ) from error
        if "cget_managed_ptr" in said:
            raise unsupported(
                f"{whose} is a paged one of bitsandbytes: its states move between the GPU and the host, which is not"
                " simulated",
                "use the optimizer of the same name without Paged, or measure by a trial (autods fit)",
            ) from error
        if isinstance(error, ValueError) and "had not been implemented on CPU backend" in said:
            raise Refused(
                "engine", f"DeepSpeed's kernel of {whose} runs on GPUs only", "use AdamW on CPU ranks"
            ) from error
        if name and isinstance(error, AttributeError) and f"has no attribute '{name.lower()}'" in said.lower():
            raise Refused(
                "engine",
                f"optimizer.type {name!r} is neither an optimizer of DeepSpeed nor of torch.optim",
                "mind the case: torch's are written as in torch.optim (SGD, Adafactor)",
            ) from error
        raise


def answer(own: socket.socket, source: WorkloadSource, work: Callable[[], dict[str, Any]]) -> bool:
    """Do the work and say what comes of it; whether it went well."""
    try:
        with processes.die_with_peer(own):
            said = work()
    except BaseException as error:
        traceback.print_exc()
        said = {"failed": told(error, source.path)}
    say(own, said)
    return "failed" not in said


def told(error: BaseException, user_file: str) -> dict[str, Any]:
    """An exception as kind, what, where, hint."""
    from .gpu_library import NoLibrary

    if isinstance(error, (NoLibrary, Refused)):
        return {"kind": error.kind, "what": error.what, "where": None, "hint": error.hint}
    from ...trial.job import describe

    seen = describe(error, user_file)
    names, message = seen["types"], " ".join(str(seen["message"]).split())[:500]
    if seen["contract"]:
        return {"kind": "user_code", "what": seen["contract"], "where": seen["user_frame"], "hint": seen["hint"]}
    data = {"DataDependentOutputException", "DynamicOutputShapeException", "NoValues"} & set(names)
    if data:
        kind, hint = "data_dependent", "compute it without looking at values, or forecast with --no-forecast"
    elif "UnsupportedOperatorException" in names:
        kind, hint = "unsupported", "register a fake implementation with torch.library.register_fake"
    elif seen["user_frame"]:
        kind, hint = "user_code", None
    else:
        kind, hint = "engine", None
    return {"kind": kind, "what": f"{names[0]}: {message}", "where": seen["user_frame"], "hint": hint}


def say(connection: socket.socket, message: dict[str, Any]) -> None:
    """One line of JSON."""
    with contextlib.suppress(OSError):  # the client may be gone; the main loop sees it
        connection.sendall(json.dumps(message).encode() + b"\n")
