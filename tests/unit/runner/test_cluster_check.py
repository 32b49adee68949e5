"""What is no cluster, or one that does not let us in, is refused in two lines."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.runner import cluster_check
from autods.runner.cluster_check import check_cluster, describe_refusal, find_token, format_address, parse_address

ORIGIN = "--address 127.0.0.1:6379"


@pytest.fixture
def port() -> Iterator[int]:
    """A port of loopback on which somebody listens, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Let the child be a module of this text."""

    def replace(text: str) -> None:
        (tmp_path / "impostor.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(cluster_check, "_CHILD", "impostor")

    return replace


def test_where_nothing_listens_that_is_said() -> None:
    with socket.socket() as deaf:  # bound, so that nobody else has the port, and not listening
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match=r"no Ray cluster answers there \(Connection refused\)"):
            check_cluster("127.0.0.1", deaf.getsockname()[1], ORIGIN)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, f"{'a' * 64}.invalid", "a..b"])
def test_a_host_that_is_not_known_is_refused(host: str) -> None:
    with pytest.raises(InputError, match="no Ray cluster answers there"):
        check_cluster(host, 6379, ORIGIN)


def test_what_is_no_cluster_ends_the_check_at_its_limit(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_check, "_JOIN_S", 3.0)
    with pytest.raises(EnvironmentBroken) as refused:
        check_cluster("127.0.0.1", port, ORIGIN)
    first, _ = str(refused.value).splitlines()
    assert first.startswith(f"{ORIGIN}: the Ray cluster there was not joined within 3 s: ")


def test_a_child_that_takes_too_long_is_ended(child, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_check, "_JOIN_S", 1.0)
    child("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    with pytest.raises(EnvironmentBroken, match=r"not joined within 1 s: \d+") as refused:
        check_cluster("127.0.0.1", port, ORIGIN)
    pid = int(str(refused.value).splitlines()[0].rpartition(" ")[2])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_that_aborts_is_reported_by_its_last_words(child, port: int) -> None:
    words = "a.cc:1: Check failed: ok no {token} found"
    child(f"import os\nos.write(2, {words!r}.encode() + b'\\n stack' * 99)\nos.abort()")
    with pytest.raises(EnvironmentBroken) as broken:
        check_cluster("127.0.0.1", port, ORIGIN)
    first, _ = str(broken.value).splitlines()
    assert first.endswith("cannot be joined: Check failed: ok no {token} found")


def test_a_line_of_ray_s_log_is_reported_without_its_prefix(child, port: int) -> None:
    line = "[2026-11-26 15:41:50,652 W 30094 30094] gcs_client.cc:210: Timed out while waiting"
    child(f"import sys\nprint({line!r})\nsys.exit(1)")
    with pytest.raises(EnvironmentBroken, match="cannot be joined: Timed out while waiting\n"):
        check_cluster("127.0.0.1", port, ORIGIN)


def test_a_child_that_says_nothing_is_reported_by_its_end(child, port: int) -> None:
    child("import os\nos._exit(7)")
    with pytest.raises(EnvironmentBroken, match="the process that tried it ended with 7"):
        check_cluster("127.0.0.1", port, ORIGIN)


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
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".ray").mkdir()
        return tmp_path

    @staticmethod
    def write(path: Path, text: str = "secret", mode: int = 0o600) -> Path:
        path.write_text(text)
        path.chmod(mode)
        return path

    def test_the_variable_goes_before_the_file(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert find_token(ORIGIN) is None
        path = self.write(home / ".ray/auth_token")
        assert find_token(ORIGIN) == str(path)
        other = self.write(home / "other")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
        assert find_token(ORIGIN) == str(other)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
        assert find_token(ORIGIN) == "RAY_AUTH_TOKEN"

    @pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o777])
    def test_a_file_that_others_can_open_is_refused(self, home: Path, mode: int) -> None:
        path = self.write(home / ".ray/auth_token", mode=mode)
        with pytest.raises(EnvironmentBroken, match=f"mode {mode:04o}") as refused:
            find_token(ORIGIN)
        assert f"chmod 600 {path}" in str(refused.value)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_a_file_of_another_user_is_refused(self, home: Path) -> None:
        os.chown(self.write(home / ".ray/auth_token"), 65534, 65534)
        with pytest.raises(EnvironmentBroken, match="belongs to another user"):
            find_token(ORIGIN)

    def test_what_holds_no_token_is_refused(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.write(home / ".ray/auth_token", text=" \n")
        with pytest.raises(EnvironmentBroken, match="holds no token"):
            find_token(ORIGIN)
        path.unlink()
        os.mkfifo(path, 0o600)
        with pytest.raises(EnvironmentBroken, match="holds no token"):
            find_token(ORIGIN)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home))
        with pytest.raises(EnvironmentBroken, match="cannot be read"):
            find_token(ORIGIN)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "none"))
        with pytest.raises(EnvironmentBroken, match="does not exist"):
            find_token(ORIGIN)

    def test_a_token_of_several_lines_is_refused(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "a\nb")
        with pytest.raises(EnvironmentBroken, match="RAY_AUTH_TOKEN holds no token"):
            find_token(ORIGIN)

    def test_a_refusal_names_what_was_sent(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert describe_refusal(ORIGIN) == "wants a token, and there is none here"
        path = self.write(home / ".ray/auth_token")
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert describe_refusal(ORIGIN) == f"wants a token, and RAY_AUTH_MODE=disabled keeps that of {path} back"
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        assert describe_refusal(ORIGIN) == f"refuses the token of {path}"

    def test_a_mode_that_asks_for_a_token_needs_one(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        with pytest.raises(EnvironmentBroken, match="there is no token here"):
            find_token(ORIGIN)
        monkeypatch.setenv("RAY_AUTH_MODE", "junk")
        with pytest.raises(EnvironmentBroken, match="neither token nor disabled"):
            find_token(ORIGIN)
