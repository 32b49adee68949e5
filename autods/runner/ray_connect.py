"""Start Ray on this machine or join a cluster.

Ray is started and joined through its documented interface. Internals that are replaced are declared here, others are
used through `ray_internal`: both fail with Ray's version where one is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from ..devices import DEVICES
from ..errors import EnvironmentBroken, InputError
from ..rank.patching import Patch, declare, declare_all
from ..system import processes
from ..system.limits import check_limits, check_space
from .cleanup import open_session, session_variables
from .cluster_check import SAME_HINT, START_HINT, NoCluster, check_cluster, format_address, parse_address

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
    "RAY_enable_metrics_collection": "0",  # nobody reads them, and their port asks for no token
}
# Clusters of RLHF stacks often set these. Ray then does not tell its actors which cards they were given, and ranks
# would take those of other jobs. Empty, for an older Ray takes each other text for a yes, "0" too.
_TELLS_CARDS = {
    f"RAY_EXPERIMENTAL_NOSET_{device.visible_variable}": "" for device in DEVICES.values() if device.visible_variable
}
_ADDRESS_BYTES = 300
_SHUTDOWN_S = 30.0
_HEAD_ANSWERS_S, _HEAD_ASKED, _BETWEEN_S = 10.0, 3, 5.0  # within the minute in which Ray itself waits for its head
_TASK_S = 60.0
_SESSION_BYTES = 2**24  # of Ray's logs and sockets in /tmp, amply
_PROCESSES = declare("ray._private.services.ConsolePopen", "signals of a scheduler are meant for the driver alone")
_HANDLER = declare("ray._private.utils.set_sigterm_handler", "Ray's handler of SIGTERM would end the driver at once")
_LOOPBACK = declare(
    "ray._private.services.resolve_ip_for_localhost",
    "Ray would take this machine's outer address instead of loopback, open to the network",
)
# The autoscaler, the logs' way to the driver, and the dashboard's server, which Ray starts without a dashboard, too.
_UNUSED = declare_all(
    "ray._private.node.Node",
    ("start_monitor", "start_log_monitor", "start_api_server"),
    "no trial needs them; they take two seconds of a processor, memory and ports",
    optional=True,
)
_TOKENS = "ray._private.authentication.authentication_token_setup"
_SPT_NOENV = {"SPT_NOENV": "1"}  # Ray's processes keep their environment when they change their title


@contextlib.contextmanager
def session(*, cpus: int, address: str | None = None) -> Iterator[Any]:
    """The `ray` module, connected.

    The cluster is the one that this process already is in, else the one at `address`, else one of our own with so many
    CPUs. Raises InputError where no cluster answers at `address`, EnvironmentBroken where Ray cannot be started or
    joined.
    """
    loaded = sys.modules.get("ray")
    with open_session() as folder:
        if loaded is not None and loaded.is_initialized():
            yield loaded
        elif address is None:
            ray = import_ray()
            with start_local(ray, cpus, folder):
                yield ray
        else:
            host, port, origin = find_cluster(address)
            check_cluster(host, port, origin)
            ray = import_ray()
            with join_cluster(ray, host, port):
                yield ray


def measure_start() -> float:
    """Start a Ray of our own as a fit does, run a task on it and end it. Return the seconds until the task answered.

    Raises EnvironmentBroken where Ray does not start, or its worker does not answer within a minute.
    """
    began = time.monotonic()
    with session(cpus=1) as ray:
        try:
            ray.get(ray.remote(lambda: None).remote(), timeout=_TASK_S)
        except ray.exceptions.RayError as error:
            problem = f"Ray starts, but runs no task: {format_ray_error(error)}"
            raise EnvironmentBroken(f"{problem}\n  `ray start --head` and `ray status` say more") from error
        return time.monotonic() - began


def find_head_problem(head: str) -> str | None:
    """Why nobody answers at HOST:PORT of a cluster's head; None where somebody does.

    A machine that refuses the connection has no head any more. One that says nothing is asked again: a network that is
    down for seconds ends no run of days.
    """
    host, _, port = head.rpartition(":")
    problem = ""
    for attempt in range(_HEAD_ASKED):
        time.sleep(_BETWEEN_S if attempt else 0.0)
        try:
            socket.create_connection((host.strip("[]"), int(port)), _HEAD_ANSWERS_S).close()
            return None
        except OSError as error:
            problem = str(error.strerror or error).lower()
            if isinstance(error, ConnectionRefusedError):
                break
    return problem


def format_ray_error(error: BaseException) -> str:
    """The first line of an error's text, without the stacks that follow; its type where the text is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def ray_internal(module: str, name: str, *, formerly: str | None = None) -> Any:
    """A function or class that Ray does not document, from the module where older releases have it else.

    Raises EnvironmentBroken where this release lacks it.
    """
    for place in filter(None, (module, formerly)):
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(place), name)
    version = getattr(sys.modules.get("ray"), "__version__", "?")
    raise EnvironmentBroken(
        f"Ray {version} has no {module}.{name}, which autods needs\n  install a release that has it: ray==2.60"
    )


@contextlib.contextmanager
def start_local(ray: Any, cpus: int, folder: Path) -> Iterator[None]:
    """A Ray of our own on this machine, reachable on loopback alone and with a token that only its processes know.

    `folder` is private: Ray opens its own folders below it to everybody. Raises EnvironmentBroken.
    """
    options = {
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": 80 * 2**20,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(folder / "r"),  # a short path: Ray puts sockets below it
    }
    check_limits()
    check_space(folder.parent, _SESSION_BYTES, "Ray")
    try:
        with _environment(_SPT_NOENV | session_variables()), _own_token():
            for attempt in (1, 2):  # on a busy machine Ray's raylet can miss its 30 s
                try:
                    init_ray(ray, "127.0.0.1", address="local", **options)
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
        yield
    finally:
        with _killed_after(_SHUTDOWN_S, folder):
            ray.shutdown()
        _read_authentication()  # as the environment has it, for another cluster


@contextlib.contextmanager
def _killed_after(limit_s: float, folder: Path) -> Iterator[None]:
    """Kill our Ray's processes if the block takes longer: ray.shutdown() waits for the raylet's answer without end."""

    def kill() -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                for ours in (child, *child.children()) if str(folder) in " ".join(child.cmdline()) else ():
                    ours.kill()

    timer = threading.Timer(limit_s, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Have the Ray that starts meanwhile use a new token. It reaches Ray's processes in their environment alone.

    Ray would make one that lasts, in a file of the home folder that others may read.
    """
    with _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        _read_authentication()
        yield


def _read_authentication() -> None:
    """Have Ray read the variables with its token and with the mode again, which it keeps from the first use on.

    Raises EnvironmentBroken where this release cannot: the Ray that starts would ask for another token, or for none.
    """
    loader = ray_internal("ray._raylet", "AuthenticationTokenLoader")
    ray_internal("ray._raylet", "Config").initialize("")
    loader.instance().reset_cache()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables of this process, for the processes that it starts meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def join_cluster(ray: Any, host: str, port: int) -> Iterator[None]:
    """A connection to the cluster at HOST:PORT, whose nodes get our package; `check_cluster` says that it accepts us.

    Raises EnvironmentBroken when it cannot be joined after all.
    """
    place = format_address(host, port)
    # The nodes may not have the package, or another version of it.
    package = str(Path(__file__).parents[1])
    shipped = {"py_modules": [package], "excludes": ["__pycache__"], "env_vars": _TELLS_CARDS}
    try:
        try:
            use_token()
            init_ray(ray, host, address=place, runtime_env=shipped)
        except EnvironmentBroken:
            raise
        except Exception as error:  # Ray raises exceptions of no particular type here
            raise EnvironmentBroken(
                f"the Ray cluster at {place} cannot be joined: {format_ray_error(error)}\n  {SAME_HINT}"
            ) from error
        yield
    finally:
        ray.shutdown()


def find_cluster(address: str) -> tuple[str, int, str]:
    """Return the host, the port, and the option or variable that gives them. Raises InputError.

    `address` is HOST:PORT or 'auto': RAY_ADDRESS, or the cluster that was last started on this machine.
    """
    text, origin = address, f"--address {address}"
    if address == "auto":
        given = os.environ.get("RAY_ADDRESS", "")
        text = given or read_last_address(origin)
        if not text:
            raise NoCluster("no Ray cluster runs on this machine", place=origin, hint=START_HINT)
        origin = f"RAY_ADDRESS={given}" if given else f"--address auto, which is {text}"
    return *parse_address(text, origin), origin


def read_last_address(origin: str) -> str:
    """Return HOST:PORT of the cluster that was last started on this machine; '' where there is none.

    Ray notes it in a folder that every user may write to. Raises InputError where somebody else wrote the note: whoever
    leads us to a cluster of theirs runs code as us.
    """
    # It moved in the middle of 2025 (github.com/ray-project/ray/pull/53287).
    path = ray_internal("ray._common.utils", "get_ray_address_file", formerly="ray._private.utils")(None)
    hint = "give HOST:PORT of a cluster that you trust"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if os.fstat(file.fileno()).st_uid in (0, os.geteuid()):
                return (file.read(_ADDRESS_BYTES) or b"").decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", place=origin, hint=hint) from None
    raise InputError(f"{path} was written by another user", place=origin, hint=hint)


def use_token() -> None:
    """Use the token that `ray start` made, which its cluster wants; Ray does not look for it by itself here."""
    enable = ray_internal(_TOKENS, "maybe_enable_token_auth_if_token_available")
    logger = logging.getLogger(_TOKENS)
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of what we want
    try:
        enable(warn_if_disabled=False)
    finally:
        logger.setLevel(level)


def init_ray(ray: Any, host: str, **options: Any) -> None:
    """Call `ray.init`, which is to leave our handler of SIGTERM and loopback alone. Raises SymbolMissing."""
    patches: dict[Patch, Any] = {
        _PROCESSES: _leave_signals_to_us(_PROCESSES.original()),
        _HANDLER: lambda handler: None,
        **{patch: lambda self, **options: None for patch in _UNUSED.values()},
    }
    if host in ("localhost", "::1") or host.startswith("127."):
        patches[_LOOPBACK] = lambda name: name
    with contextlib.ExitStack() as stack:
        for patch, replacement in patches.items():
            stack.enter_context(patch.installed(replacement))
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(_sigterm_waits())
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
        ray.init(namespace="autods", **quiet, **options)


def _leave_signals_to_us(popen: type[subprocess.Popen[bytes]]) -> type[subprocess.Popen[bytes]]:
    """Return a kind of `popen` whose processes end when Ray or the guard ends them, not by a scheduler's signals.

    `timeout`, a closing terminal and Ctrl-C signal our process group; Slurm sends SIGTERM to every process of a job,
    and ranks that still save need Ray until they are done. A blocked signal stays blocked in what Ray starts.
    """

    class RayProcess(popen):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            with _sigterm_blocked():
                super().__init__(*args, **{**options, "start_new_session": True})

        terminate = popen.kill  # Ray would wait a second for each

    return RayProcess


@contextlib.contextmanager
def _sigterm_waits() -> Iterator[None]:
    """SIGTERM finds our handler again, after the block. Meanwhile Ray's C++ puts one in its place, which aborts."""
    handler = signal.getsignal(signal.SIGTERM)
    with _sigterm_blocked():
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def import_ray() -> Any:
    """The `ray` module, with our defaults of the variables that it reads once a process."""
    # With the raylet gone, ray.shutdown() ends this process without a word if its parent has ended (ShutdownIfLocal-
    # RayletDisconnected in Ray's raylet_ipc_client.cc). It does not if this pid lives; workers get the raylet's own.
    for name, value in {**_VARIABLES, "RAY_RAYLET_PID": str(os.getpid())}.items():
        os.environ.setdefault(name, value)
    import ray

    return ray


def main(argv: list[str]) -> None:
    """Join the cluster at HOST PORT and leave it, as the child of `check_cluster` in the process PARENT."""
    host, port, parent = argv[0], int(argv[1]), int(argv[2])
    processes.die_with_parent(parent)
    ray = import_ray()
    use_token()
    try:
        init_ray(ray, host, address=format_address(host, port))
    except Exception as error:  # Ray raises exceptions of no particular type here
        sys.exit(" ".join(str(error).split()) or type(error).__name__)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
