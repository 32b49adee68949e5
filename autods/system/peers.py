"""Who is at the other end of this process's TCP connections, for servers on this machine that ask for no password.

The kernel shows the owner of every socket of this machine in /proc/net/tcp. A connection from another machine has no
other end there, and is left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_ESTABLISHED, _LISTENING = "01", "0A"
_MAPPED = "0000000000000000FFFF0000"  # how an IPv4 address begins among those of IPv6


@dataclass(frozen=True, slots=True)
class _Socket:
    """One row of the kernel's table; addresses are 'HEX:PORT'."""

    local: str
    remote: str
    state: str
    uid: int
    inode: int

    @property
    def port(self) -> int:
        return int(self.local.rpartition(":")[2], 16)


def list_listening_ports() -> frozenset[int]:
    """Return the TCP ports at which this process listens."""
    ours = _list_own_sockets()
    return frozenset(row.port for row in _read_sockets() if row.state == _LISTENING and row.inode in ours)


def cut_off_strangers(ports: Collection[int]) -> list[int]:
    """Shut down the connections to these ports of ours that come from other users of this machine; return their uids.

    Root and this user are no strangers.
    """
    ours = _list_own_sockets() if ports else {}
    rows = list(_read_sockets()) if ours else []
    owners = {(row.local, row.remote): row.uid for row in rows}
    strangers = []
    for row in rows:
        if row.inode not in ours or row.state != _ESTABLISHED or row.port not in ports:
            continue
        uid = owners.get((row.remote, row.local))
        if uid not in (None, 0, os.geteuid()):
            strangers.append(uid)
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(ours[row.inode])) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    return strangers


def _list_own_sockets() -> dict[int, int]:
    """The descriptors of this process's sockets by inode."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}")):
                sockets[int(match[1])] = int(name)
    return sockets


def _read_sockets() -> Iterator[_Socket]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as table:
            next(table, None)  # the names of the columns
            for line in table:
                _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
                yield _Socket(local.removeprefix(_MAPPED), remote.removeprefix(_MAPPED), state, int(uid), int(inode))
