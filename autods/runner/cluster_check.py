"""Whether a Ray cluster lets this process join, tried by another process first.

Ray's core aborts a process that a cluster refuses, and asks a head that is none again and again. So a child process
joins the cluster, within a time limit, and its last words are the reason where it cannot.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

from ..errors import AutodsError, EnvironmentBroken, InputError
from ..system.processes import python_command

START_HINT = "start one as docs/nodes.md says; `ray start --head` prints its address"
SAME_HINT = "every node needs the same Ray and Python; `ray status --address HOST:PORT` says more"
_TOKEN_HINT = "copy ~/.ray/auth_token of the cluster's first node here, chmod 600 it, and export RAY_AUTH_MODE=token"
_CHILD = "autods.runner.ray_connect"
_CONNECT_S = 10.0
_JOIN_S = 60.0  # Ray tries a token for 20 s, and joins within 2
_LOG_PREFIX = re.compile(r"\[\d{4}-.*?\] (?:\S+:\d+: )?")


class NoCluster(InputError):
    """No cluster answers at an address: it is wrong, or the cluster is gone."""


def check_cluster(host: str, port: int, origin: str) -> None:
    """Return when a child process has joined the cluster and left it.

    `origin` is the option or variable that names the cluster. Raises NoCluster where nobody listens at the address,
    EnvironmentBroken for a token that other users can read, and where the cluster was not joined.
    """
    find_token(origin)
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except (OSError, UnicodeError) as error:  # a label of more than 63 characters is no Unicode
        reason = getattr(error, "strerror", None) or error
        raise NoCluster(f"no Ray cluster answers there ({reason})", place=origin, hint=START_HINT) from None
    command = [*python_command(_CHILD), host, str(port), str(os.getpid())]
    folders = os.pathsep.join(path for path in sys.path if path)  # as we import
    try:
        joined = subprocess.run(
            [command[0], "-W", "ignore", *command[1:]], env={**os.environ, "PYTHONPATH": folders}, timeout=_JOIN_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        words = _read_last_words(expired.stdout or b"", origin)
        problem = f"the Ray cluster there was not joined within {_JOIN_S:.0f} s: {words or 'it says nothing'}"
        raise make_error(problem, origin, START_HINT) from None
    if joined.returncode:
        words = _read_last_words(joined.stdout, origin) or f"the process that tried it ended with {joined.returncode}"
        raise make_error(f"the Ray cluster there cannot be joined: {words}", origin, SAME_HINT)


def _read_last_words(output: bytes, origin: str) -> str:
    """The reason in what the child has printed: of an abort, else its last line; '' without one.

    Raises EnvironmentBroken where the cluster did not accept the token.
    """
    text = output.decode(errors="replace")
    if "AuthToken" in text or "authentication" in text.lower():
        raise make_error(f"the Ray cluster there {describe_refusal(origin)}", origin, _TOKEN_HINT)
    words = re.findall(r"Check failed: .*", text) or [line for line in text.splitlines() if line.strip()]
    return _LOG_PREFIX.sub("", words[-1]).strip() if words else ""


def find_token(origin: str) -> str | None:
    """Return the variable or the file from which Ray takes its token; None where there is none.

    Raises EnvironmentBroken for a file that other users can read, or that is another user's: who has the token, has
    the cluster. Ray aborts where the token is no HTTP header, or its mode is unknown.
    """

    def refuse(problem: str, hint: str = _TOKEN_HINT) -> AutodsError:
        return make_error(problem, origin, hint)

    mode, given = os.environ.get("RAY_AUTH_MODE", ""), os.environ.get("RAY_AUTH_TOKEN_PATH")
    if mode not in ("", "token", "disabled"):
        raise refuse(f"RAY_AUTH_MODE={mode} is neither token nor disabled")
    source, text = "RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN")
    if not text:
        path = Path(given or "~/.ray/auth_token").expanduser()
        source = str(path)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for its writer
            with open(file, "rb") as reader:
                status, text = os.fstat(file), reader.read(4096).decode(errors="replace")
        except FileNotFoundError:
            if given:
                raise refuse(f"RAY_AUTH_TOKEN_PATH={given} does not exist") from None
            if mode == "token":
                raise refuse("RAY_AUTH_MODE is token, and there is no token here") from None
            return None
        except OSError as error:
            raise refuse(f"{path} cannot be read ({error.strerror})") from None
        if status.st_uid not in (0, os.getuid()):
            raise refuse(f"{path} belongs to another user (uid {status.st_uid})")
        if status.st_mode & 0o077:
            problem = f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})"
            raise refuse(problem, f"chmod 600 {path}; whoever read it can use the cluster")
    if not re.fullmatch(r"[!-~]+", text.strip()):
        raise refuse(f"{source} holds no token")
    return source


def describe_refusal(origin: str) -> str:
    """Why the cluster did not accept this process's token, as far as that is known here."""
    source, mode = find_token(origin), os.environ.get("RAY_AUTH_MODE")
    if source is None:
        return "wants a token, and there is none here"
    return (
        f"wants a token, and RAY_AUTH_MODE={mode} keeps that of {source} back"
        if mode == "disabled"
        else (f"refuses the token of {source}")
    )


def make_error(problem: str, origin: str, hint: str) -> EnvironmentBroken:
    """The error in two lines, which begin with the option or variable that names the cluster."""
    return EnvironmentBroken(f"{origin}: {problem}\n  {hint}")


def parse_address(text: str, origin: str) -> tuple[str, int]:
    """Return the host and the port of 'HOST:PORT' or '[IPv6]:PORT'. Raises InputError, which names `origin`."""
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_plain = text.isascii() and text.isprintable() and not re.search(r"[\s/@{}]", text) and port.isdigit()
    if not host.strip("[]") or not is_plain or (":" in host and not is_bracketed):
        raise InputError("is neither auto nor HOST:PORT", place=origin, hint="give HOST:PORT of `ray start --head`")
    if not 0 < int(port[:6]) < 2**16:
        raise InputError("a port is a number from 1 to 65535", place=origin, hint="`ray start --head` prints its port")
    return host[1:-1] if is_bracketed else host, int(port)


def format_address(host: str, port: int) -> str:
    """'HOST:PORT', with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
