"""From what a person typed to a question: the experiment's axes, the machine, the workload's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..api_types import whole
from ..errors import InputError
from ..hardware import Hardware
from ..values import WorkloadSource
from ..workload import Workload
from ..workload.arguments import names_of
from .elsewhere import hardware_of, machine_asked
from .experiments import with_experiment
from .question import Question, pose


def settle(
    workload: str | Path | Workload,
    source: WorkloadSource,
    *,
    hardware: Hardware,
    vary: Sequence[str] | Mapping[str, Iterable[Any]] = (),
    experiment: str | Path | None = None,
    gpus: int | str | Sequence[int] | None = None,
    forecast_only: bool = False,
    on: str | None = None,
    host_memory: str | int | None = None,
    **asked: Any,
) -> Question:
    """Check what was asked, by the names of `api.probe`. Raises InputError."""
    said = Path(workload) if isinstance(workload, str) else workload
    vary = with_experiment(experiment, vary)
    counts = _counts(gpus)
    machine = None
    if forecast_only and (asked.get("nodes") is not None or asked.get("address") is not None):
        raise InputError(
            "--forecast-only runs nothing on a cluster", mend="`autods plan --nodes` forecasts several nodes"
        )
    if forecast_only:
        machine = machine_asked(
            hardware,
            device=asked.get("device", "cuda"),
            gpu_memory=asked.get("gpu_memory"),
            host_memory=host_memory,
            on=on,
        )
        if asked.get("device", "cuda") == "cuda":
            asked = {**asked, "gpu_memory": None}  # the machine's card is of that size
            hardware = hardware_of(machine, max(_ranks(counts, vary)), hardware)
        if not asked.get("forecast", True):
            raise InputError("--forecast-only and --no-forecast contradict each other", mend="drop one of the two")
    elif on is not None or host_memory is not None:
        option = "--on" if on is not None else "--host-memory"
        raise InputError(f"{option} is of another machine: trials run on this one", mend="add --forecast-only")
    return pose(
        source, lambda function: names_of(said, source, function), hardware=hardware, vary=vary, gpus=counts,
        machine=machine, **asked,
    )  # fmt: skip


def most_ranks(gpus: int | str | Sequence[int] | None, vary: Sequence[str] | Mapping[str, Iterable[Any]]) -> int | None:
    """The most ranks of any cell, as far as they are said. Raises InputError."""
    return max(_said(_counts(gpus), vary), default=None)


def _counts(gpus: int | str | Sequence[int] | None) -> tuple[int, ...]:
    """'1,2,4' → three numbers."""
    if gpus is None or isinstance(gpus, int):
        return () if gpus is None else (gpus,)
    try:
        if isinstance(gpus, str):
            return tuple(int(part) for part in gpus.split(","))
        return tuple(whole("gpus", part) for part in gpus)
    except (ValueError, TypeError):
        raise InputError(f"--gpus {gpus}: these are no numbers", mend="give --gpus 8, or --gpus 1,2,4,8") from None


def _ranks(counts: Sequence[int], vary: Sequence[str] | Mapping[str, Iterable[Any]]) -> list[int]:
    """How many cards the machine that is forecast for must show: all that any cell asks for."""
    if not (found := _said(counts, vary)):
        raise InputError("say how many ranks to forecast for", mend="give --gpus 8, or --gpus 1,2,4,8")
    return found


def _said(counts: Sequence[int], vary: Sequence[str] | Mapping[str, Iterable[Any]]) -> list[int]:
    lines = vary.items() if isinstance(vary, Mapping) else (line.partition("=")[::2] for line in vary)
    named = [values for name, values in lines if name.strip() == "gpus"]
    parts = [part for values in named for part in (values.split(",") if isinstance(values, str) else values)]
    return [*counts, *(int(part) for part in parts if str(part).strip().isdigit())]
