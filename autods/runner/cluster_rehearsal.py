"""The child of a `ClusterCheck`: it joins a Ray cluster step by step, and leaves it.

`python -m autods.runner.cluster_rehearsal HOST PORT PARENT` prints the name of each step of `cluster_check.STEPS`.
Its last line is a verdict in JSON: {} when the cluster was joined, else kind, problem and hint of the error.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import AutodsError, EnvironmentBroken, InputError
from ..system import processes
from . import ray_connect
from .cluster_check import SAME_HINT, START_HINT, format_address

_TOKEN_HINT = "copy ~/.ray/auth_token of the cluster's first node here, chmod 600 it, and export RAY_AUTH_MODE=token"
_HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # with empty SETTINGS
_HTTP2_SETTINGS = 4  # the type of the frame with which a server begins
_ANSWER_S = 5.0
_ALIVE = 0  # GcsNodeInfo.GcsNodeState in Ray's gcs.proto


def main(argv: list[str]) -> None:
    """Take the steps; print each, and at last the verdict: {} when the cluster was joined."""
    host, port, parent = argv[0], int(argv[1]), int(argv[2])
    processes.die_with_parent(parent)
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no line of ours
    verdict: dict[str, str] = {}
    try:
        for name, take in (("resolve", resolve), ("connect", connect), ("load", load), ("ask", ask), ("join", join)):
            print(name, file=lines)
            take(host, port)
    except Refused as refused:
        kind = refused.kind.kind
        verdict = {"kind": kind, "problem": refused.problem, "hint": refused.hint}
    print(json.dumps(verdict), file=lines)
    lines.close()
    if not verdict:
        sys.modules["ray"].shutdown()


class Refused(Exception):
    """Why a step cannot be taken, and how to mend that. `kind` is the error that ends the command."""

    def __init__(self, kind: type[AutodsError], problem: str, hint: str) -> None:
        self.kind, self.problem, self.hint = kind, problem, hint
        super().__init__(problem)


def resolve(host: str, port: int) -> None:
    """Look up the host's name."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a label of more than 63 characters is no Unicode
        reason = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise Refused(InputError, f"no such host ({reason})", START_HINT) from None


def connect(host: str, port: int) -> None:
    """See whether a gRPC server listens there: it sends its HTTP/2 settings at once."""
    try:
        with socket.create_connection((host, port), _ANSWER_S) as link:
            link.settimeout(_ANSWER_S)
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            link.sendall(_HTTP2_BEGIN)
            frame = b""
            try:
                while len(frame) < 9 and (part := link.recv(9 - len(frame))):
                    frame += part
            except TimeoutError:
                problem = f"what listens there says nothing for {_ANSWER_S:.0f} s"
                raise Refused(EnvironmentBroken, problem, "is it the head of a Ray cluster, and stopped?") from None
            except ConnectionError:
                frame = b""  # it hung up
            if len(frame) < 9 or frame[3] != _HTTP2_SETTINGS:
                raise Refused(InputError, "what listens there is no Ray cluster", START_HINT)
    except OSError as error:
        reason = error.strerror or error
        raise Refused(InputError, f"no Ray cluster answers there ({reason})", START_HINT) from None


def load(host: str, port: int) -> None:
    """Find the token and import Ray."""
    source = find_token()
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode not in ("", "token", "disabled"):
        raise Refused(EnvironmentBroken, f"RAY_AUTH_MODE={mode} is neither token nor disabled", _TOKEN_HINT)
    if mode == "token" and source is None:
        raise Refused(EnvironmentBroken, "RAY_AUTH_MODE is token, and there is no token here", _TOKEN_HINT)
    ray_connect.import_ray()
    ray_connect.use_token()


def find_token() -> str | None:
    """Return the variable or the file from which Ray takes its token; None where there is none.

    Raises Refused for a file that other users can read, or that is another user's: who has the token, has the cluster.
    """
    if text := os.environ.get("RAY_AUTH_TOKEN"):
        return check_token(text, "RAY_AUTH_TOKEN")
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given or "~/.ray/auth_token").expanduser()
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for its writer
        with open(file, "rb") as reader:
            status, content = os.fstat(file), reader.read(4096)
    except FileNotFoundError:
        if given:
            raise Refused(EnvironmentBroken, f"RAY_AUTH_TOKEN_PATH={given} does not exist", _TOKEN_HINT) from None
        return None
    except OSError as error:
        raise Refused(EnvironmentBroken, f"{path} cannot be read ({error.strerror})", _TOKEN_HINT) from None
    if status.st_uid not in (0, os.getuid()):
        raise Refused(EnvironmentBroken, f"{path} belongs to another user (uid {status.st_uid})", _TOKEN_HINT)
    if status.st_mode & 0o077:
        problem = f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})"
        raise Refused(EnvironmentBroken, problem, f"chmod 600 {path}; whoever read it can use the cluster")
    return check_token(content.decode(errors="replace"), str(path))


def check_token(text: str, source: str) -> str:
    """Return `source` if this is a token. Raises Refused. Ray aborts where the token is no HTTP header."""
    if not re.fullmatch(r"[!-~]+", text.strip()):
        raise Refused(EnvironmentBroken, f"{source} holds no token", _TOKEN_HINT)
    return source


def describe_refusal() -> str:
    """Why the cluster did not accept this process's token, as far as that is known here."""
    source = find_token()
    if source is None:
        return "wants a token, and there is none here"
    if get_mode() != "token":
        return f"wants a token, and RAY_AUTH_MODE={get_mode()} keeps that of {source} back"
    return f"refuses the token of {source}"


def get_mode() -> str:
    return os.environ.get("RAY_AUTH_MODE", "disabled")


def ask(host: str, port: int) -> None:
    """Ask the cluster's head for its versions and its nodes, of which this machine has to be one."""
    ray, gcs_client = sys.modules["ray"], ray_connect.ray_internal("ray._raylet", "GcsClient")
    try:
        client = gcs_client(address=format_address(host, port))
        metadata = client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=_ANSWER_S)
        nodes = client.get_all_node_info(timeout=_ANSWER_S).values()
    except ray.exceptions.AuthenticationError:
        raise Refused(EnvironmentBroken, f"the Ray cluster there {describe_refusal()}", _TOKEN_HINT) from None
    except Exception as error:  # an RpcError, of which Ray says no more
        reason = ray_connect.format_ray_error(error)
        raise Refused(InputError, f"what listens there is no Ray cluster that we know ({reason})", START_HINT) from None
    versions, here = json.loads(metadata or b"{}"), (ray.__version__, platform.python_version())
    there = (versions.get("ray_version", here[0]), versions.get("python_version", here[1]))
    if there != here:
        both = (f"Ray {ray_version} and Python {python}" for ray_version, python in (there, here))
        raise Refused(EnvironmentBroken, "the cluster there has {}, this environment {}".format(*both), SAME_HINT)
    check_sockets([Path(node.object_store_socket_name) for node in nodes if node.state == _ALIVE])


def check_sockets(sockets: Sequence[Path]) -> None:
    """Check that this process can reach one of the living nodes, given the sockets that they serve."""
    start = "run `ray start --address HOST:PORT` on this machine, or autods on a node of the cluster"
    if not sockets:
        raise Refused(EnvironmentBroken, "no node of the Ray cluster there is alive", START_HINT)
    ours = [path for path in sockets if path.exists()]
    if not ours:
        raise Refused(EnvironmentBroken, "this machine is no node of the Ray cluster there", start)
    if not any(os.access(path, os.W_OK) for path in ours):
        owner = f"another user (uid {ours[0].stat().st_uid})"
        raise Refused(
            EnvironmentBroken, f"the Ray cluster there is that of {owner}, and closed to this one", START_HINT
        )


def join(host: str, port: int) -> None:
    """Be a driver of the cluster."""
    try:
        ray_connect.init_ray(sys.modules["ray"], host, address=format_address(host, port))
    except Exception as error:  # Ray raises exceptions of no particular type here
        reason = ray_connect.format_ray_error(error)
        raise Refused(EnvironmentBroken, f"the Ray cluster there cannot be joined: {reason}", SAME_HINT) from None


if __name__ == "__main__":
    main(sys.argv[1:])
