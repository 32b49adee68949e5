from __future__ import annotations

from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken
from autods.runner import ray_connect


@pytest.fixture(scope="module", autouse=True)
def _imported_as_a_fit_does() -> None:
    """What Ray reads of the environment at import holds for the whole process, and so for tests that come after."""
    ray_connect._import_ray()


class FakeRay:
    """Starts after `failures` failures."""

    def __init__(self, failures: int) -> None:
        self.failures, self.inits, self.shutdowns = failures, 0, 0

    def init(self, **said: object) -> None:
        self.inits += 1
        if self.inits <= self.failures:
            raise Exception("The current node timed out during startup.\nThis could happen because ...")

    def shutdown(self) -> None:
        self.shutdowns += 1


def test_a_ray_that_misses_its_time_once_is_started_again(tmp_path: Path) -> None:
    ray = FakeRay(1)
    ray_connect._begin(ray, 2, tmp_path)
    assert (ray.inits, ray.shutdowns) == (2, 1)


def test_a_ray_that_does_not_start_twice_is_the_machines_fault_in_two_lines(tmp_path: Path) -> None:
    ray = FakeRay(2)
    with pytest.raises(EnvironmentBroken) as broken:
        ray_connect._begin(ray, 2, tmp_path)
    first, second = str(broken.value).splitlines()
    assert "timed out during startup" in first
    assert "/dev/shm" in second
    assert (ray.inits, ray.shutdowns) == (2, 2)
