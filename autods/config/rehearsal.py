"""The settings of a rehearsal: a fit whose trials the simulated GPUs of another machine answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..devices import find_device
from ..errors import InputError
from ..files import as_folder_name
from ..requests import FitRequest
from ..types import WorkloadSource
from .catalogue import find_machines, make_hardware
from .plan_settings import nvme_place, spread_ranks
from .settings import Settings, resolve_fit


def resolve_rehearsal(request: FitRequest, source: WorkloadSource) -> Settings:
    """Return the settings of a fit that is rehearsed on a machine of the catalogue. Raises InputError."""
    if request.on is None:
        raise InputError("--rehearse needs a machine", hint="give --on h100-80gb, say; `autods plan --on` lists them")
    device = find_device(request.device)
    if not device.has_cards or request.address is not None:
        other = "--address" if device.has_cards else f"--device {device.name}"
        raise InputError(f"--rehearse runs on simulated GPUs, so {other} has no effect", hint="drop one of the two")
    if not request.forecast:
        raise InputError("--rehearse answers from the forecast, so --no-forecast leaves it without answers")
    machines = find_machines(request.on)
    if len(machines) > 1:
        raise InputError(f"--on {request.on}: a rehearsal is on one machine", hint="`autods plan` compares several")
    machine = machines[0]
    if machine.rates is None or machine.links is None:
        lacking = "the card's rates" if machine.rates is None else "the links between its cards"
        raise InputError(f"{machine.name} lacks {lacking}, so no time can be forecast", place=machine.source)
    ranks, per_node = spread_ranks(request.gpus, request.nodes, machine, device)
    host_only = replace(request, nodes=None, nvme_path=None, gpus=ranks)
    settings = resolve_fit(host_only, source, hardware=make_hardware(machine, ranks))
    settings = replace(
        settings,
        machine=machine,
        rehearsed=True,
        nodes=-(-ranks // per_node),
        nvme_path=nvme_place(request.nvme_path, machine),
    )
    name = f"{as_folder_name(source.name)}-{ranks}x{machine.name}-rehearsal-{settings.fingerprint()[:6]}"
    out = Path(request.out) if request.out is not None else Path("autods-out") / name
    return replace(settings, out=out.absolute())
