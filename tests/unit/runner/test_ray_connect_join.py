"""`--address`: what is no address, where nothing answers, and what a cluster that refuses us is called."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.runner import ray_connect
from autods.runner.ray_connect import joined


class FakeRay:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.said, self.shutdowns = error, {}, 0

    def init(self, **said: Any) -> None:
        self.said = said
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self.shutdowns += 1

    def is_initialized(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def _a_door_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing behind it answers what Ray asks."""
    monkeypatch.setattr(ray_connect, "_own_address", lambda host, port: "127.0.0.1")


@pytest.fixture
def door() -> Iterator[str]:
    """An address where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_cluster_is_left_as_it_was_found(door: str) -> None:
    ray = FakeRay()
    with joined(ray, door):
        assert ray.said["address"] == door
        assert ray.shutdowns == 0
    assert ray.shutdowns == 1


def test_our_package_goes_along(door: str) -> None:
    ray = FakeRay()
    with joined(ray, door):
        (package,) = ray.said["runtime_env"]["py_modules"]
    assert package.endswith("/autods")


def test_auto_is_the_address_of_the_environment(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", door)
    ray = FakeRay()
    with joined(ray, "auto"):
        assert ray.said["address"] == door


def test_auto_without_a_cluster_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_connect, "_last_started", lambda: None)
    with pytest.raises(InputError, match="no Ray cluster runs on this machine") as refused, joined(FakeRay(), "auto"):
        pass
    assert "ray start --head" in str(refused.value)


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "head:many", ":6379"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="neither auto nor HOST:PORT"), joined(FakeRay(), address):
        pass


def test_where_nothing_answers_ray_is_not_even_asked(door: str) -> None:
    ray = FakeRay()
    with socket.socket() as deaf:  # bound, so that nobody else has the port, and not listening
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(InputError, match="no Ray cluster answers"), joined(ray, address):
            pass
    assert ray.said == {}


def test_a_cluster_that_refuses_us_is_the_machines_fault_in_two_lines(door: str) -> None:
    ray = FakeRay(RuntimeError("Version mismatch: The cluster was started with:\n  Ray: 2.9"))
    with pytest.raises(EnvironmentBroken, match="Version mismatch") as broken, joined(ray, door):
        pass
    assert len(str(broken.value).splitlines()) == 2
    assert ray.shutdowns == 1


def test_a_connection_that_looked_at_the_cluster_is_the_fits_as_well(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay()
    monkeypatch.setattr(ray_connect, "_import_ray", lambda joins=False: ray)
    with ray_connect.kept_session(door):
        pass
    assert ray.shutdowns == 0
    ray.said = {}
    with ray_connect.session(cpus=1, address=door):
        assert ray.said == {}
    assert ray.shutdowns == 1


def test_a_connection_that_another_place_wants_is_given_up(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setattr(ray_connect, "_import_ray", lambda joins=False: ray)
    with ray_connect.kept_session(door):
        pass
    with pytest.raises(InputError, match="HOST:PORT"), ray_connect.session(cpus=1, address="elsewhere"):
        pass
    assert ray.shutdowns == 1
