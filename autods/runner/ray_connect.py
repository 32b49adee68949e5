"""Start Ray on this machine or join a cluster.

Ray is started and joined through its documented interface. Three of its internals are used as well, each through
`ray_internal`, which fails with Ray's version where one is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import EnvironmentBroken, InputError

_ANSWERS_S = 5.0  # a running cluster answers at once; Ray itself would try for more than a minute
_START_HINT = "start one: `ray start --head --port 6379` on the first node, `ray start --address HOST:6379` on others"
_FOLDER_PREFIX = "autods-ray."
_SERVICES = "ray._private.services"
_VARIABLES = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep CUDA_VISIBLE_DEVICES as the user set it
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    # We start one actor; Ray would start a worker for each CPU.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Ray's workers have niceness 15 by default, and so would our ranks: other programs would slow down their steps.
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # we judge the memory of our ranks
}


@contextlib.contextmanager
def session(*, cpus: int, address: str | None = None) -> Iterator[Any]:
    """The `ray` module, connected.

    The cluster is the one that this process already is in, else the one at `address`, else one of our own with so many
    CPUs. Raises InputError when none answers at `address`, EnvironmentBroken when Ray cannot be started or joined.
    """
    ray = _import_ray(joins=address is not None)
    if ray.is_initialized():
        yield ray
    else:
        with start_local(ray, cpus) if address is None else join_cluster(ray, address):
            yield ray


def format_ray_error(error: BaseException) -> str:
    """The first line of an error's text, without the stacks that follow; its type where the text is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def ray_internal(module: str, name: str) -> Any:
    """A function or class that Ray does not document. Raises EnvironmentBroken where this release lacks it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        version = getattr(sys.modules.get("ray"), "__version__", "?")
        raise EnvironmentBroken(
            f"Ray {version} has no {module}.{name}, which autods needs\n  install a release that has it: ray==2.60"
        ) from None


@contextlib.contextmanager
def start_local(ray: Any, cpus: int) -> Iterator[None]:
    """A Ray of our own on this machine, reachable on loopback alone. Raises EnvironmentBroken."""
    _remove_abandoned_folders()
    # A short path: Ray puts sockets below it, and the path of a socket may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir="/tmp"))
    held = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks, where nobody removes the folder either
        fcntl.flock(held, fcntl.LOCK_EX)
    options = {
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": 80 * 2**20,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(folder),
    }
    try:
        for attempt in (1, 2):  # on a busy machine Ray's raylet can miss its 30 s
            try:
                _init(ray, "127.0.0.1", address="local", **options)
                break
            except EnvironmentBroken:
                raise
            except Exception as error:  # Ray raises exceptions of no particular type here
                ray.shutdown()
                if attempt == 2:
                    raise EnvironmentBroken(
                        f"Ray did not start, twice: {format_ray_error(error)}\n"
                        "  is the machine busy, /tmp or /dev/shm full? `ray start --head` says more"
                    ) from error
        # Ray's two agents follow a killed driver at once if the raylet's log notes a regular end. Without that line
        # they try to report the raylet's death to a GCS that is gone as well.
        # Measured after a SIGKILL of the driver: both stay 60 to 70 s without the line, and end within seconds with it.
        with contextlib.suppress(OSError), open(folder / "session_latest/logs/raylet.out", "a") as log:
            log.write("Raylet received SIGTERM (written by autods, so that agents do not report the raylet's death)\n")
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_abandoned_folders() -> None:
    """Remove the folders of drivers that were killed before they could do so.

    A driver holds a lock on its folder as long as it lives. Its pid would not do: it may live in another container that
    shares /tmp. An empty folder is left: its driver is about to take the lock.
    """
    for old in Path("/tmp").glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the driver lives
                if any(old.iterdir()):
                    shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def join_cluster(ray: Any, address: str) -> Iterator[None]:
    """A connection to the cluster at `address`, whose nodes get our package.

    `address` is HOST:PORT or 'auto': RAY_ADDRESS, or the cluster that was last started on this machine.
    Raises InputError when no cluster answers there, EnvironmentBroken when it cannot be joined.
    """
    host, port = _parse_address(address)
    try:
        socket.create_connection((host, port), _ANSWERS_S).close()
    except OSError as error:
        text = f"no Ray cluster answers at {host}:{port} ({error.strerror or error})"
        raise InputError(text, place=f"--address {address}", hint=_START_HINT) from None
    # The nodes may not have the package, or another version of it.
    shipped = {"py_modules": [str(Path(__file__).parents[1])], "excludes": ["__pycache__"]}
    try:
        try:
            _find_token()
            _init(ray, host, address=f"{host}:{port}", runtime_env=shipped)
        except EnvironmentBroken:
            raise
        except Exception as error:  # Ray raises exceptions of no particular type here
            raise EnvironmentBroken(
                f"the Ray cluster at {host}:{port} cannot be joined: {format_ray_error(error)}\n"
                "  every node needs the same Ray and Python; give the token of a cluster that has one in RAY_AUTH_TOKEN"
            ) from error
        yield
    finally:
        ray.shutdown()


def _parse_address(address: str) -> tuple[str, int]:
    """Host and port. Raises InputError."""
    text, origin = address, f"--address {address}"
    if address == "auto":
        given = os.environ.get("RAY_ADDRESS", "")
        text, origin = given or ray_internal("ray._private.utils", "read_ray_address")(), f"RAY_ADDRESS={given}"
        if not text:
            raise InputError("no Ray cluster runs on this machine", place="--address auto", hint=_START_HINT)
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or "://" in text:
        raise InputError("is neither auto nor HOST:PORT", place=origin, hint="give HOST:PORT of `ray start --head`")
    return host.strip("[]"), int(port)


def _find_token() -> None:
    """Use the token that `ray start` made, which its cluster wants; Ray does not look for it by itself here."""
    try:
        from ray._private.authentication import authentication_token_setup as setup
    except ImportError:
        return  # this release of Ray has no tokens
    level = setup.logger.level
    setup.logger.setLevel(logging.ERROR)  # it warns of what we want
    try:
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    finally:
        setup.logger.setLevel(level)


def _init(ray: Any, host: str, **options: Any) -> None:
    """Call `ray.init`, which is to leave our handler of SIGTERM, our sessions and loopback addresses alone.

    Ray's processes begin in sessions of their own. A signal for our process group (from `timeout`, scancel or a closing
    terminal) then meets us alone, and Ray is there until the ranks are gone. Ray binds its processes to our life in
    another way. A `host` on loopback stays: Ray would take this machine's outer address instead, open to the network.
    """
    popen, resolve = (ray_internal(_SERVICES, name) for name in ("ConsolePopen", "resolve_ip_for_localhost"))
    services: Any = sys.modules[_SERVICES]
    handler = signal.getsignal(signal.SIGTERM)
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    if host in ("localhost", "::1") or host.startswith("127."):
        services.resolve_ip_for_localhost = lambda name: name
    try:
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
        ray.init(namespace="autods", **quiet, **options)
    finally:
        services.ConsolePopen = popen
        services.resolve_ip_for_localhost = resolve
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _import_ray(*, joins: bool = False) -> Any:
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    # A cluster that we join has its own setting. Where Ray was imported before, it has read this variable already, and
    # its servers would want a token that it does not send.
    if not joins and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray's default for a local cluster; set, it prints nothing
    import ray

    return ray
