"""Start Ray or join a cluster: what is no address, what does not answer, and what is said of Ray's failures."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.runner import ray_connect
from autods.runner.ray_connect import join_cluster, ray_internal, session, start_local


class FakeRay:
    """Fails with `error` in its first `failures` starts."""

    def __init__(self, error: Exception | None = None, failures: int = 1) -> None:
        self.error, self.failures = error, failures
        self.options: list[dict[str, Any]] = []
        self.shutdowns = 0

    def init(self, **options: Any) -> None:
        self.options.append(options)
        if self.error is not None and len(self.options) <= self.failures:
            raise self.error

    def shutdown(self) -> None:
        self.shutdowns += 1

    def is_initialized(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def _no_ray_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's modules, made up; the variables that Ray reads are none of this process afterwards."""
    services = SimpleNamespace(ConsolePopen=print, resolve_ip_for_localhost=lambda host: "10.0.0.9")
    monkeypatch.setitem(sys.modules, "ray._private.services", services)  # type: ignore[arg-type]


@pytest.fixture
def listening() -> Iterator[str]:
    """An address where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


TIMED_OUT = Exception("The current node timed out during startup.\nThis could happen because ...")


def test_a_ray_that_misses_its_time_once_is_started_again() -> None:
    ray = FakeRay(TIMED_OUT, failures=1)
    with start_local(ray, 2):
        assert (len(ray.options), ray.shutdowns) == (2, 1)
    assert ray.shutdowns == 2


def test_a_ray_that_fails_twice_is_reported_in_two_lines() -> None:
    ray = FakeRay(TIMED_OUT, failures=2)
    with pytest.raises(EnvironmentBroken) as broken, start_local(ray, 2):
        pass
    first, second = str(broken.value).splitlines()
    assert "timed out during startup" in first
    assert "/dev/shm" in second
    assert len(ray.options) == 2


def test_only_the_folder_of_a_dead_driver_is_removed() -> None:
    """Neither pid is known here; the first driver lives, say in another container that shares /tmp."""
    live, dead = (Path(tempfile.mkdtemp(prefix=f"autods-ray.{pid}-", dir="/tmp")) for pid in (4_190_001, 4_190_002))
    for folder in (live, dead):
        (folder / "session_latest").mkdir()
    held = os.open(live, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with start_local(FakeRay(), 1):
            assert (live.exists(), dead.exists()) == (True, False)
    finally:
        os.close(held)
        shutil.rmtree(live)


def test_a_missing_internal_of_ray_is_reported_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="9.9"))  # type: ignore[arg-type]
    monkeypatch.delattr(sys.modules["ray._private.services"], "ConsolePopen")
    ray = FakeRay()
    missing = r"Ray 9\.9 has no ray\._private\.services\.ConsolePopen"
    with pytest.raises(EnvironmentBroken, match=missing), start_local(ray, 2):
        pass
    assert ray.options == []


def test_the_installed_ray_has_the_internals_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ray_connect._import_ray()  # it sets variables that Ray reads once a process
    for module, name in (
        ("ray._private.services", "ConsolePopen"),
        ("ray._private.services", "resolve_ip_for_localhost"),
        ("ray._private.utils", "read_ray_address"),
        ("ray._private.state", "available_resources_per_node"),
    ):
        assert callable(ray_internal(module, name))


def test_a_cluster_is_left_as_it_was(listening: str) -> None:
    ray = FakeRay()
    with join_cluster(ray, listening):
        assert ray.options[0]["address"] == listening
        assert ray.shutdowns == 0
    assert ray.shutdowns == 1


def test_the_nodes_of_a_cluster_get_our_package(listening: str) -> None:
    ray = FakeRay()
    with join_cluster(ray, listening):
        (package,) = ray.options[0]["runtime_env"]["py_modules"]
    assert package.endswith("/autods")


def test_auto_is_the_address_of_the_environment(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    ray = FakeRay()
    with join_cluster(ray, "auto"):
        assert ray.options[0]["address"] == listening


def test_auto_without_a_cluster_names_the_command_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    utils = SimpleNamespace(read_ray_address=lambda: None)
    monkeypatch.setitem(sys.modules, "ray._private.utils", utils)  # type: ignore[arg-type]
    none = "no Ray cluster runs on this machine"
    with pytest.raises(InputError, match=none) as refused, join_cluster(FakeRay(), "auto"):
        pass
    assert "ray start --head" in str(refused.value)


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "head:many", ":6379"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="neither auto nor HOST:PORT"), join_cluster(FakeRay(), address):
        pass


def test_where_nothing_answers_ray_is_not_called() -> None:
    ray = FakeRay()
    with socket.socket() as deaf:  # bound, so that nobody else has the port, and not listening
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(InputError, match="no Ray cluster answers"), join_cluster(ray, address):
            pass
    assert ray.options == []


def test_a_cluster_that_refuses_us_is_reported_in_two_lines(listening: str) -> None:
    ray = FakeRay(RuntimeError("Version mismatch: The cluster was started with:\n  Ray: 2.9"))
    with pytest.raises(EnvironmentBroken, match="Version mismatch") as broken, join_cluster(ray, listening):
        pass
    assert len(str(broken.value).splitlines()) == 2
    assert ray.shutdowns == 1


def test_a_session_ends_its_connection(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setattr(ray_connect, "_import_ray", lambda joins=False: ray)
    with session(cpus=1, address=listening):
        assert (len(ray.options), ray.shutdowns) == (1, 0)
    assert ray.shutdowns == 1
