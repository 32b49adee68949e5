"""Join a Ray cluster that somebody else started."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil

from ..errors import EnvironmentBroken, InputError
from .ray_init import keeping_sigterm, said_by

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
            raise InputError("no Ray cluster runs on this machine", where="--address auto", mend=_START)
    host, _, port = said.rpartition(":")
    if not host or not port.isdigit() or "://" in said:
        where = f"--address {address}" if said == address else f"RAY_ADDRESS={said}"
        raise InputError("is neither auto nor HOST:PORT", where=where, mend="give HOST:PORT of `ray start --head`")
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
        raise InputError(what, where=f"--address {address}", mend=_START) from None


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
