"""What went wrong in a simulation, in the user's terms: exceptions become `protocol.Failure`s."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ...trial.patching import SymbolMissing
from .protocol import Failure


class Refused(Exception):
    """The simulation cannot or must not go on; the fields are those of `protocol.Failure`."""

    def __init__(self, kind: str, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.kind, self.what, self.hint = kind, what, hint


def unsupported(what: str, hint: str | None = None) -> Refused:
    """The error for code whose memory use is unknown: no forecast is better than a wrong one."""
    return Refused("unsupported", what, hint or "forecast with --no-forecast, or measure by a trial (autods fit)")


@contextlib.contextmanager
def explain_optimizer_errors(config: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of `deepspeed.initialize` or of a step about the config's optimizer into `Refused`."""
    try:
        yield
    except Exception as error:
        message = str(error)
        name = (config.get("optimizer") or {}).get("type")
        optimizer = f"the optimizer {name}" if name else "the optimizer of build_optimizer"
        if isinstance(error, AssertionError) and "untested ZeRO Optimizer" in message:
            raise Refused(
                "engine",
                f"DeepSpeed has not tested ZeRO with {optimizer}, and refuses it",
                'add "zero_allow_untested_optimizer": true to the config, or use Adam, AdamW, Adagrad or Lion',
            ) from error
        if "cget_managed_ptr" in message:
            raise unsupported(
                f"{optimizer} is a paged one of bitsandbytes: its states move between the GPU and the host, which is"
                " not simulated",
                "use the optimizer of the same name without Paged, or measure by a trial (autods fit)",
            ) from error
        if isinstance(error, ValueError) and "had not been implemented on CPU backend" in message:
            raise Refused(
                "engine", f"DeepSpeed's kernel of {optimizer} runs on GPUs only", "use AdamW on CPU ranks"
            ) from error
        if name and isinstance(error, AttributeError) and f"has no attribute '{name.lower()}'" in message.lower():
            raise Refused(
                "engine",
                f"optimizer.type {name!r} is neither an optimizer of DeepSpeed nor of torch.optim",
                "mind the case: torch's are written as in torch.optim (SGD, Adafactor)",
            ) from error
        raise


def failure_of(error: BaseException, user_file: str) -> Failure:
    """The failure that an exception means; `where` is the innermost line of the user's file."""
    if isinstance(error, Refused):
        return Failure(kind=error.kind, what=error.what, hint=error.hint)
    if isinstance(error, SymbolMissing):
        what, _, advice = str(error).partition("\n")
        return Failure(kind="engine", what=what, hint=advice.strip())
    from ...trial.job import describe_error

    described = describe_error(error, user_file)
    types, message = described["types"], " ".join(str(described["message"]).split())[:500]
    where = described["user_frame"]
    if described["contract"]:
        return Failure(kind="user_code", what=described["contract"], where=where, hint=described["hint"])
    kind, hint = "user_code" if where else "engine", None
    if {"DataDependentOutputException", "DynamicOutputShapeException", "NoValues"} & set(types):
        kind, hint = "data_dependent", "compute it without looking at values, or forecast with --no-forecast"
    elif "UnsupportedOperatorException" in types:
        kind, hint = "unsupported", "register a fake implementation with torch.library.register_fake"
    return Failure(kind=kind, what=f"{types[0]}: {message}", where=where, hint=hint)
