"""Settings of small fits on CPU ranks, and what the tests of such fits share."""

from __future__ import annotations

import contextlib
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.settings import Settings
from autods.events import Event
from autods.system.host import read_hardware
from autods.workload import Workload, make_source
from tests.support.settings import fit_settings

TORCH_ADAM = {"optimizer.params.torch_adam": True}  # a knob: torch's AdamW, for which no op has to be built
HERE = Path(__file__).parents[1] / "integration"
_OUTSIDE_BYTES = 10 * 2**20  # what a CPU rank holds outside of tensors differs by 9 MB from run to run


def near_forecasts(*peaks_bytes: int) -> Any:
    """What peaks of small models on CPU ranks, or their differences, compare with: 6 %, or as processes differ."""
    return pytest.approx(list(peaks_bytes), rel=0.06, abs=_OUTSIDE_BYTES)


def question(
    workload: str | Workload, folder: Path, *, certified: bool = False, stall_s: float = 100.0, **asked: object
) -> Settings:
    """Settings for 2 CPU ranks; a workload's name is a file in tests/integration/workloads.

    stall_s: short where ranks are to hang. They have no forecast and no certificate unless asked for: each
    costs some seconds a fit.
    """
    source = make_source(HERE / "workloads" / workload if isinstance(workload, str) else workload, folder=folder)
    said = {
        "gpus": 2,
        "device": "cpu",
        "gpu_memory": "1GiB",
        "config": "quick",
        "out": folder,
        "forecast": False,
        **asked,
    }
    settings = fit_settings(source, hardware=read_hardware(), **said)  # type: ignore[arg-type]
    profile = settings.profile
    limits = replace(profile.limits, stall_s=stall_s, init_s=200.0)
    certify = profile.certify if certified else replace(profile.certify, most_trials=0)
    return replace(settings, profile=replace(profile, limits=limits, certify=certify))


def free_port() -> int:
    """For a launcher that binds it seconds later: those above go to whoever asks meanwhile, those below to Ray."""
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(20_000, max(given_out, 20_100))
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def ignore(event: Event) -> None:
    """A listener that does not care."""
