"""Calls of gRPC methods over a bare socket, with and without a token: what a stranger could send."""

from __future__ import annotations

import importlib
import pkgutil
import re
import socket
import struct
from collections.abc import Iterable, Mapping

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY = 0, 1, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
# Methods of Ray's servers of which its Python has no description.
_NATIVE = ("/ray.rpc.ObjectManagerService/Pull", "/ray.rpc.ObjectManagerService/Push")
_STATUS = re.compile(rb"grpc-status[\x01\x02](\d{1,2})")


def list_methods() -> list[str]:
    """The paths of the gRPC methods of Ray's servers: /package.Service/Method.

    RaySyncer is left out: Ray 2.60 aborts where a call of it has no node's id, before it looks for a token. So are
    gRPC's own services, which tell anybody the names of services and whether they are healthy.
    """
    import ray.core.generated as generated

    paths = [*_NATIVE]
    for module in pkgutil.iter_modules(generated.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"ray.core.generated.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                paths += [f"/{service.full_name}/{method.name}" for method in service.methods]
    return paths


def call_each(port: int, paths: Iterable[str], token: str = "") -> dict[str, str]:
    """Call each method with an empty request, one after the other on connections to this port of 127.0.0.1.

    Return by path the gRPC status ('0': it was answered, '12': unknown there, '16': not authenticated), or how the
    connection ended.
    """
    return {path: call(port, path, token) for path in paths}


def call(port: int, path: str, token: str = "") -> str:
    """Call a method with an empty request; return its gRPC status, or how the connection ended."""
    headers = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "127.0.0.1", "te": "trailers",
        "content-type": "application/grpc",
    }  # fmt: skip
    if token:
        headers["authorization"] = f"Bearer {token}"
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as link:
            link.sendall(
                _PREFACE
                + _frame(_SETTINGS, 0, 0)
                + _frame(_HEADERS, _END_HEADERS, 1, _encode(headers))
                + _frame(_DATA, _END_STREAM, 1, bytes(5))
            )
            return _read_status(link)
    except OSError as error:
        return type(error).__name__


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _encode(headers: Mapping[str, str]) -> bytes:
    """HPACK without its tables and without Huffman codes."""
    text = b""
    for name, value in headers.items():
        assert len(name) < 127
        assert len(value) < 127
        text += bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return text


def _read_status(link: socket.socket) -> str:
    file = link.makefile("rb")
    while len(head := file.read(9)) == 9:
        payload = file.read(int.from_bytes(head[:3], "big"))
        kind, flags = head[3], head[4]
        if kind == _SETTINGS and not flags & _ACK:
            link.sendall(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            link.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _HEADERS and flags & _END_STREAM:
            match = _STATUS.search(payload)
            return match[1].decode() if match else f"headers {payload!r}"
        elif kind == _GOAWAY:
            return "goaway"
    return "closed"
