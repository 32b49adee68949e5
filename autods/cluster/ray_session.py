"""Ray on loopback, with its files in a folder of ours, gone when we are."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from ..errors import EnvironmentBroken
from .ray_init import apart, keeping_sigterm, said_by
from .ray_join import as_said, joined
from .ray_lean import without_monitors

_PREFIX = "autods-ray-"
_KEPT: list[tuple[str, contextlib.ExitStack]] = []  # a connection that waits for who uses it, by its address


@contextlib.contextmanager
def session(*, cpus: int, address: str | None = None) -> Iterator[Any]:
    """The `ray` module, connected: to the cluster this process already is in, else to the one at `address`, else to one
    of our own. Raises InputError when none answers at `address`."""
    ray = _import_ray(joins=address is not None)
    if _KEPT:
        kept, held = _KEPT.pop()
        with held:
            if kept == address:
                yield ray
                return
    if ray.is_initialized():
        yield ray
        return
    if address is not None:
        with joined(ray, address):
            yield ray
        return
    _sweep()
    # Short: Ray puts sockets below it, and a socket's path may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
    try:
        _begin(ray, cpus, folder)
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def kept_session(address: str) -> Iterator[Any]:
    """`session`, and where the block ends well its connection stays for the next one that asks for this address: the
    nodes' workers, which have loaded our package by then, are the connection's."""
    with contextlib.ExitStack() as stack:
        owned = not is_connected()
        ray = stack.enter_context(session(cpus=1, address=address))
        yield ray
        if owned:
            _KEPT.append((address, stack.pop_all()))


def is_connected() -> bool:
    """Whether this process is in a cluster already that is not ours; does not import Ray to find out."""
    if _KEPT:
        return False
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _begin(ray: Any, cpus: int, folder: Path) -> None:
    """Ray's start, tried twice: on a busy machine its raylet can miss its 30 s. Raises EnvironmentBroken."""
    for last in (False, True):
        try:
            with keeping_sigterm(), apart(), without_monitors(), as_said("127.0.0.1"):
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder),
                    object_store_memory=80 * 2**20,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    configure_logging=False,
                    namespace="autods",
                )
            break
        except Exception as error:  # Ray raises bare ones here
            ray.shutdown()
            if last:
                raise EnvironmentBroken(
                    f"Ray did not start, twice: {said_by(error)}\n"
                    "  is the machine busy, /tmp or /dev/shm full? `ray start --head` says more"
                ) from error
    _let_agents_go(folder)


def _import_ray(*, joins: bool = False) -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA_VISIBLE_DEVICES as the user set it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Whether a cluster has a token is its own affair. Where Ray was imported before, it has read this and reads it no
    # more: its servers would want a token that it does not send.
    if not joins and "ray" not in sys.modules:
        # Its default for a local cluster, said aloud so that it prints nothing.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_DISABLE_DOCKER_CPU_WARNING", "1")
    for name in ("RAY_enable_worker_prestart", "RAY_prestart_worker_first_driver"):
        os.environ.setdefault(name, "0")  # one actor is all we start; each idle worker costs 0.6 s
    # By default Ray's workers have 15, and so would our ranks: whatever else runs would be timed along with them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # our ranks' memory is ours to judge
    import ray

    return ray


def _let_agents_go(folder: Path) -> None:
    """Have Ray's agents follow a killed driver at once.

    Else they try for 60 s to report the raylet's end to a GCS that is gone as well, unless its log says this.
    """
    with contextlib.suppress(OSError), open(folder / "session_latest/logs/raylet.out", "a") as log:
        log.write("Raylet received SIGTERM (so that agents do not report its end, says autods)\n")


def _sweep() -> None:
    """Folders of drivers that were killed before they could tidy up."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
