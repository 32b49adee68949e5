"""What cannot be simulated, or DeepSpeed refuses, as a line for the user with the way to mend it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


class Refused(Exception):
    """As `SimulationFailed` of the asking side: kind, what, mend."""

    def __init__(self, kind: str, what: str, mend: str | None = None) -> None:
        super().__init__(what)
        self.kind, self.what, self.mend = kind, what, mend


def unsupported(what: str, mend: str | None = None) -> Refused:
    """Something whose memory nobody knows here: better no forecast than a wrong one."""
    return Refused("unsupported", what, mend or "forecast with --no-forecast, or measure by a trial (autods fit)")


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
