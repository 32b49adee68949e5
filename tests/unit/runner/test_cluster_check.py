"""What is no cluster, or one that does not let us in, is refused within seconds, in two lines. The child is real."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.runner import cluster_check, cluster_rehearsal
from autods.runner.cluster_check import STEPS, ClusterCheck, Step, format_address, parse_address
from autods.runner.cluster_rehearsal import Refused, check_sockets, describe_refusal, find_token

HTTP2 = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def answer(*parts: bytes) -> Callable[[socket.socket], None]:
    """A server that sends this, and hangs up when its client does."""

    def serve(link: socket.socket) -> None:
        for part in parts:
            link.sendall(part)
        while link.recv(4096):
            pass

    return serve


def read_first(link: socket.socket) -> None:
    link.recv(4096)
    link.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno\n")


# What listens there: the error, and words of it.
SERVERS: Mapping[str, tuple[Callable[[socket.socket], None], type[Exception], str]] = {
    "HTTP": (read_first, InputError, "is no Ray cluster"),
    "SSH": (answer(b"SSH-2.0-OpenSSH_9.2\r\n"), InputError, "is no Ray cluster"),
    "hangs up": (lambda link: None, InputError, "is no Ray cluster"),
    "garbage": (answer(bytes(range(256)) * 40), InputError, "is no Ray cluster"),
    "a byte at a time": (answer(*(b"x" for _ in range(20))), InputError, "is no Ray cluster"),
    "silence": (answer(), EnvironmentBroken, "says nothing for 1 s"),
}


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server on loopback."""

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = server.accept()
                threading.Thread(target=talk, args=(link,), daemon=True).start()

    def talk(link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            serve(link)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("name", SERVERS)
def test_what_listens_and_is_no_cluster_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_rehearsal, "_ANSWER_S", 1.0)
    serve, kind, words = SERVERS[name]
    with listening(serve) as port, pytest.raises(Refused, match=words) as refused:
        cluster_rehearsal.connect("127.0.0.1", port)
    assert refused.value.kind is kind


def test_the_child_s_verdict_is_an_error_of_two_lines() -> None:
    with (
        listening(read_first) as port,
        ClusterCheck("127.0.0.1", port, f"--address 127.0.0.1:{port}") as check,
        pytest.raises(InputError) as refused,
    ):
        check.wait()
    first, _ = str(refused.value).splitlines()
    assert first == f"--address 127.0.0.1:{port}: what listens there is no Ray cluster"
    assert check.process.poll() is not None


def test_where_nothing_listens_that_is_said() -> None:
    with socket.socket() as deaf:  # bound, so that nobody else has the port, and not listening
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(Refused, match=r"no Ray cluster answers there \(Connection refused\)"):
            cluster_rehearsal.connect("127.0.0.1", deaf.getsockname()[1])


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, f"{'a' * 64}.invalid", "a..b"])
def test_a_host_that_is_not_known_is_refused(host: str) -> None:
    with pytest.raises(Refused, match="no such host"):
        cluster_rehearsal.resolve(host, 6379)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ClusterCheck]:
    """A check whose child is a module of this text."""

    def start(text: str) -> ClusterCheck:
        (tmp_path / "impostor.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(cluster_check, "_REHEARSAL", "impostor")
        return ClusterCheck("10.0.0.1", 6379, "--address 10.0.0.1:6379")

    return start


def test_a_step_that_takes_too_long_ends_the_check(child, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Step(0.2, "the name was not found", InputError, "give HOST as an IP address")
    monkeypatch.setattr(cluster_check, "STEPS", {**STEPS, "resolve": slow})
    waits = "import time\nprint('resolve', flush=True)\ntime.sleep(600)"
    with child(waits) as check, pytest.raises(InputError, match="the name was not found"):
        check.wait()
    assert check.process.poll() is not None


def test_a_child_that_aborts_is_reported_by_its_last_words(child) -> None:
    words = "a.cc:1: Check failed: ok no {token} found"
    abort = f"import os, sys\nprint('ask', flush=True)\nos.write(2, {words!r}.encode() + b'\\n stack' * 99)\nos.abort()"
    with child(abort) as check, pytest.raises(EnvironmentBroken) as broken:
        check.wait()
    first, _ = str(broken.value).splitlines()
    assert first.endswith("cannot be joined: Check failed: ok no {token} found")


def test_a_child_that_says_nothing_is_reported_by_its_end(child) -> None:
    with child("import os\nos._exit(7)") as check, pytest.raises(EnvironmentBroken, match="ended with exit code 7"):
        check.wait()


def test_a_check_that_is_given_up_leaves_no_process(child) -> None:
    with child("import time\ntime.sleep(600)") as check:
        assert check.process.poll() is None
    assert check.process.poll() is not None


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("head:6379", "head", 6379), ("10.0.0.1:1", "10.0.0.1", 1), ("[::1]:65535", "::1", 65535)],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert parse_address(text, "--address") == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "10.0.0.1", ":6379", "ray://10.0.0.1:10001", "http://head:80", "head:many", "head:-1", "::1", "::1:6379",
        "[]:6379", "head:²", "head:٦٣٧٩", "he ad:6379", "head:6379\n", "h\0d:6379", "h\udcffd:6379", "user@head:22",
        "head:",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="neither auto nor HOST:PORT"):
        parse_address(text, "--address")


@pytest.mark.parametrize("port", ["0", "65536", "99999", "9" * 5000])
def test_a_port_beyond_those_of_tcp_is_refused(port: str) -> None:
    with pytest.raises(InputError, match="from 1 to 65535"):
        parse_address(f"head:{port}", "--address")


class TestToken:
    """The token that Ray would send."""

    @pytest.fixture(autouse=True)
    def home(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".ray").mkdir()
        return tmp_path

    @staticmethod
    def write(path: Path, text: str = "secret", mode: int = 0o600) -> Path:
        path.write_text(text)
        path.chmod(mode)
        return path

    def test_the_variable_goes_before_the_file(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert find_token() is None
        path = self.write(home / ".ray/auth_token")
        assert find_token() == str(path)
        other = self.write(home / "other")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
        assert find_token() == str(other)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
        assert find_token() == "RAY_AUTH_TOKEN"

    @pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o777])
    def test_a_file_that_others_can_open_is_refused(self, home: Path, mode: int) -> None:
        path = self.write(home / ".ray/auth_token", mode=mode)
        with pytest.raises(Refused, match=f"mode {mode:04o}") as refused:
            find_token()
        assert f"chmod 600 {path}" in refused.value.hint

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_a_file_of_another_user_is_refused(self, home: Path) -> None:
        os.chown(self.write(home / ".ray/auth_token"), 65534, 65534)
        with pytest.raises(Refused, match="belongs to another user"):
            find_token()

    def test_what_holds_no_token_is_refused(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.write(home / ".ray/auth_token", text=" \n")
        with pytest.raises(Refused, match="holds no token"):
            find_token()
        path.unlink()
        os.mkfifo(path, 0o600)
        with pytest.raises(Refused, match="holds no token"):
            find_token()
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home))
        with pytest.raises(Refused, match="cannot be read"):
            find_token()
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "none"))
        with pytest.raises(Refused, match="does not exist"):
            find_token()

    def test_a_token_of_several_lines_is_refused(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "a\nb")
        with pytest.raises(Refused, match="RAY_AUTH_TOKEN holds no token"):
            find_token()

    def test_a_refusal_names_what_was_sent(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert describe_refusal() == "wants a token, and there is none here"
        path = self.write(home / ".ray/auth_token")
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert describe_refusal() == f"wants a token, and RAY_AUTH_MODE=disabled keeps that of {path} back"
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        assert describe_refusal() == f"refuses the token of {path}"

    def test_a_mode_that_asks_for_a_token_needs_one(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        with pytest.raises(Refused, match="there is no token here"):
            cluster_rehearsal.load("head", 6379)
        monkeypatch.setenv("RAY_AUTH_MODE", "junk")
        with pytest.raises(Refused, match="neither token nor disabled"):
            cluster_rehearsal.load("head", 6379)


def test_a_machine_has_to_be_a_node_of_the_cluster(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no node of the Ray cluster there is alive"):
        check_sockets([])
    with pytest.raises(Refused, match="this machine is no node"):
        check_sockets([tmp_path / "plasma_store"])
    (tmp_path / "plasma_store").touch()
    check_sockets([tmp_path / "none", tmp_path / "plasma_store"])
