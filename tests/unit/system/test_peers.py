"""Connections of other users to our ports are cut off, and no others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from autods.system.peers import cut_off_strangers, list_listening_ports

STRANGER = 2_000_000_001
CONNECT = """
import encodings.idna, os, socket, sys
os.setuid(int(sys.argv[1]))
connection = socket.create_connection((sys.argv[2], int(sys.argv[3])), 10)
print("connected", flush=True)
print(connection.recv(1))
"""


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    is_6 = request.param == socket.AF_INET6
    with socket.create_server(("", 0), family=request.param, dualstack_ipv6=is_6) as server:
        yield server


def accept(server: socket.socket, uid: int) -> tuple[socket.socket, subprocess.Popen[str]]:
    """A connection of that user to the server, and the user's process."""
    command = [sys.executable, "-c", CONNECT, str(uid), "127.0.0.1", str(server.getsockname()[1])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return server.accept()[0], process


def test_the_ports_at_which_we_listen_are_known(server: socket.socket) -> None:
    assert server.getsockname()[1] in list_listening_ports()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_only_a_connection_of_another_user_is_cut(server: socket.socket) -> None:
    port = server.getsockname()[1]
    (connection, process), (ours, our_process) = accept(server, STRANGER), accept(server, 0)
    with connection, ours, process, our_process:
        assert cut_off_strangers([port + 1]) == []  # of another server
        assert cut_off_strangers([port]) == [STRANGER]
        assert process.communicate()[0] == "connected\nb''\n"
        ours.sendall(b"x")
        assert our_process.communicate()[0] == "connected\nb'x'\n"
