from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from autods.errors import EnvironmentBroken
from autods.runner import ray_connect
from autods.runner.ray_connect import without_monitors


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


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray's private modules, made up."""

    class Node:
        def start_api_server(self, *, include_dashboard: bool, raise_on_failure: bool) -> None:
            self._webui_url = "started"

    class RayParams:
        def __init__(self, no_monitor: bool = False, include_log_monitor: bool = True) -> None:
            self.monitors = (not no_monitor, include_log_monitor)

    for name in ("ray", "ray._private", "ray._private.node", "ray._private.parameter", "ray._private.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["ray._private.utils"].get_dashboard_dependency_error = lambda: None  # type: ignore[attr-defined]
    sys.modules["ray._private.node"].Node = Node  # type: ignore[attr-defined]
    sys.modules["ray._private.parameter"].RayParams = RayParams  # type: ignore[attr-defined]
    return SimpleNamespace(Node=Node, RayParams=RayParams)


def test_rays_monitors_are_not_started_inside_and_are_again_after(private: SimpleNamespace) -> None:
    def started() -> tuple[object, object]:
        node = private.Node()
        node.start_api_server(include_dashboard=False, raise_on_failure=False)
        return private.RayParams().monitors, node._webui_url

    with without_monitors():
        assert started() == ((False, False), None)
    assert started() == ((True, True), "started")


def test_the_node_has_the_small_agent_which_listens_on_no_fixed_port(private: SimpleNamespace) -> None:
    from ray._private import utils

    assert utils.get_dashboard_dependency_error() is None
    with without_monitors():
        assert isinstance(utils.get_dashboard_dependency_error(), ImportError)
    assert utils.get_dashboard_dependency_error() is None


@pytest.mark.parametrize("missing", ["ray._private.node", "ray._private.parameter"])
def test_a_ray_with_other_names_starts_as_usual(
    private: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, ModuleType(missing))
    with without_monitors():
        assert private.RayParams().monitors == (True, True)


def test_the_installed_ray_still_has_the_names_that_are_changed() -> None:
    from ray._private import utils
    from ray._private.parameter import RayParams

    with without_monitors():
        params = RayParams()
        assert isinstance(utils.get_dashboard_dependency_error(), ImportError)
    assert params.no_monitor is True
    assert params.include_log_monitor is False
