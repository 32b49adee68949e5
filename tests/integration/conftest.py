"""One Ray for all integration tests, and runners whose zygote is shared by the tests of a workload."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autods.events import Event
from autods.requests import Settings, resolve
from autods.runner.ray_connect import session
from autods.runner.runner import RayRunner
from autods.system.host import look
from autods.trial.ops import clear_killed_builds, ops_folder
from autods.workload import Workload, source_of

HERE = Path(__file__).parent

Runners = Callable[..., RayRunner]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session", autouse=True)
def simulated_anew() -> Iterator[None]:
    """No forecast comes from a cache: what an earlier run simulated proves nothing of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTODS_FORECAST_CACHE", "off")
        yield


@pytest.fixture(scope="session", autouse=True)
def ops_built_once() -> Iterator[None]:
    """Plain DeepSpeed takes the ops that trials build, and no lock of a build that was killed is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(ops_folder()))
        clear_killed_builds()
        yield


@pytest.fixture(scope="session")
def ray() -> Iterator[object]:
    """A Ray on loopback that every runner of this run joins."""
    with session(cpus=64) as module:  # one for each runner that is kept; nobody counts processors here
        yield module


@pytest.fixture(scope="session")
def runners(ray: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runners]:
    """A started and surveyed runner per workload and question, kept until the end of the run."""
    started: dict[tuple[object, ...], RayRunner] = {}
    with contextlib.ExitStack() as stack:

        def runner(workload: str | Workload = "tiny.py", **asked: object) -> RayRunner:
            key = (workload, *sorted(asked.items()))
            if key not in started:
                settings = question(workload, tmp_path_factory.mktemp("fit"), **asked)
                started[key] = stack.enter_context(RayRunner(settings, ignore))
                started[key].survey()
            return started[key]

        yield runner


def question(
    workload: str | Workload, folder: Path, *, certified: bool = False, stall_s: float = 100.0, **asked: object
) -> Settings:
    """Settings for 2 CPU ranks; a workload's name is a file beside this one. stall_s: short where ranks are to hang.

    Without a forecast and a certificate, unless they are asked for: they cost some seconds a fit.
    """
    source = source_of(HERE / "workloads" / workload if isinstance(workload, str) else workload, folder=folder)
    said = {
        "gpus": 2,
        "device": "cpu",
        "gpu_memory": "1GiB",
        "config": "quick",
        "out": folder,
        "forecast": False,
        **asked,
    }
    settings = resolve(source, hardware=look(), **said)  # type: ignore[arg-type]
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
