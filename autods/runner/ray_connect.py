"""Start Ray on this machine or join a cluster."""

from __future__ import annotations

import contextlib
import functools
import importlib
import ipaddress
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
from typing import Any, cast

import psutil

from ..errors import EnvironmentBroken, InputError


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """`ray.init` puts sys.exit there; afterwards it is as it was."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Ray's processes begin in sessions of their own: a signal for our whole process group (of `timeout`, scancel, a
    terminal that closes) is ours to take, and Ray has to be there until the ranks are gone. They end with us all the
    same, since Ray binds their lives to ours. Where a release of Ray has another name for it, they begin as usual."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):
            from ray._private import services

            usual = services.ConsolePopen
            services.ConsolePopen = functools.partial(usual, start_new_session=True)
            stack.callback(setattr, services, "ConsolePopen", usual)
        yield


def said_by(error: BaseException) -> str:
    """What an error of Ray's says, without the stacks that follow; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_ANSWERS_S = 5.0  # a cluster that lives answers at once; Ray itself would try for a minute and more
_START = "start one: `ray start --head --port 6379` on the first node, `ray start --address HOST:6379` on the others"


@contextlib.contextmanager
def joined(ray: Any, address: str) -> Iterator[Any]:
    """`ray`, connected to that cluster; our package is on its nodes' path. Raises InputError when there is none.

    address: 'auto' (RAY_ADDRESS, or the cluster that was last started on this machine) or HOST:PORT.
    """
    host, port = _place(address)
    _check_answers(address, host, port)
    _join(ray, host, port)
    try:
        yield ray
    finally:
        ray.shutdown()


def _place(address: str) -> tuple[str, int]:
    """Host and port."""
    said = address
    if address == "auto":
        said = os.environ.get("RAY_ADDRESS", "") or _last_started() or ""
        if not said:
            raise InputError("no Ray cluster runs on this machine", where="--address auto", hint=_START)
    host, _, port = said.rpartition(":")
    if not host or not port.isdigit() or "://" in said:
        where = f"--address {address}" if said == address else f"RAY_ADDRESS={said}"
        raise InputError("is neither auto nor HOST:PORT", where=where, hint="give HOST:PORT of `ray start --head`")
    return host.strip("[]"), int(port)


def _last_started() -> str | None:
    """Ray notes it in a file of its temporary folder."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._private.utils import read_ray_address

        return read_ray_address() or None
    return None


def _check_answers(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), _ANSWERS_S).close()
    except OSError as error:
        what = f"no Ray cluster answers at {host}:{port} ({error.strerror or error})"
        raise InputError(what, where=f"--address {address}", hint=_START) from None


def _join(ray: Any, host: str, port: int) -> None:
    package = Path(__file__).parents[1]
    try:
        with keeping_sigterm(), as_said(host):
            _know_the_token()
            ray.init(
                address=f"{host}:{port}",
                _node_ip_address=_own_address(host, port),
                logging_level=logging.ERROR,
                log_to_driver=False,
                configure_logging=False,
                namespace="autods",
                # The nodes may have none, or another version of it.
                runtime_env={"py_modules": [str(package)], "excludes": ["__pycache__"]},
            )
    except Exception as error:  # Ray raises bare ones here
        ray.shutdown()
        raise EnvironmentBroken(
            f"the Ray cluster at {host}:{port} cannot be joined: {said_by(error)}\n"
            "  every node needs the same Ray and Python, and a cluster that has a token wants it in RAY_AUTH_TOKEN"
        ) from error


def _own_address(host: str, port: int) -> str | None:
    """The address under which the cluster knows this machine; None leaves it to Ray.

    Ray asks which interface leads to the internet, which need not be the one that leads to the other nodes.
    """
    own = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    with contextlib.suppress(Exception):  # Ray's inner rooms: where they look otherwise, it decides by itself
        from ray._private.state import GlobalState

        state, raylet = GlobalState(), cast(Any, importlib.import_module("ray._raylet"))  # its types name no options
        said = raylet.GcsClientOptions.create(
            f"{host}:{port}", None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
        )
        state._initialize_global_state(said)
        nodes = {node["NodeManagerAddress"] for node in state.node_table() if node["Alive"]}
        state.disconnect()
        with socket.create_connection((host, port), _ANSWERS_S) as link:
            towards = str(link.getsockname()[0])
        return towards if towards in nodes else next(iter(sorted(nodes & own)), None)
    return None


def _know_the_token() -> None:
    """`ray start` makes one and its cluster wants it; with an explicit address Ray does not look for it by itself."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from ray._private.authentication import authentication_token_setup as setup

        level = setup.logger.level
        setup.logger.setLevel(logging.ERROR)  # that it does what we want is no warning
        try:
            setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        finally:
            setup.logger.setLevel(level)


@contextlib.contextmanager
def as_said(host: str) -> Iterator[None]:
    """A loopback address stays one: Ray takes it for this machine's outer address, where nothing may listen."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):
            if _is_loopback(host):
                from ray._private import services

                stack.callback(setattr, services, "resolve_ip_for_localhost", services.resolve_ip_for_localhost)
                services.resolve_ip_for_localhost = lambda name: name
        yield


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
            with keeping_sigterm(), apart(), as_said("127.0.0.1"):
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
    _let_agents_end_with_driver(folder)


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


def _let_agents_end_with_driver(folder: Path) -> None:
    """Note a regular end in the log of Ray's raylet, so that Ray's two agents follow a killed driver at once.

    Without the line they try to report the raylet's death to a GCS that is gone as well: measured, both stay 60 to 70 s
    after a SIGKILL of the driver. With it they are gone within seconds.
    """
    with contextlib.suppress(OSError), open(folder / "session_latest/logs/raylet.out", "a") as log:
        log.write("Raylet received SIGTERM (written by autods, so that agents do not report the raylet's death)\n")


def _sweep() -> None:
    """Folders of drivers that were killed before they could tidy up."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
