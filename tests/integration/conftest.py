"""One Ray for all integration tests, and runners whose zygote is shared by a module's tests of a workload."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from autods.rank.ops import clear_killed_builds, ops_folder
from autods.runner.ray_connect import session
from autods.runner.runner import RayRunner
from autods.workload import Workload
from tests.support.fits import HERE, ignore, question
from tests.support.rank_server import RankServer

Runners = Callable[..., RayRunner]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session", autouse=True)
def ops_built_once() -> Iterator[None]:
    """Plain DeepSpeed takes the ops that trials build, and no lock of a build that was killed is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(ops_folder()))
        clear_killed_builds()
        yield


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    """Runs plain training scripts on ranks that need not import torch and DeepSpeed again."""
    server = RankServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def ray() -> Iterator[object]:
    """A Ray on loopback that every runner of this run joins."""
    with session(cpus=64) as module:  # one for each runner that is kept; nobody counts processors here
        yield module


@pytest.fixture(scope="module")
def runners(ray: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runners]:
    """A started and surveyed runner per workload and question, kept until the end of the module.

    Ray's process of an idle runner takes a hundredth of a processor, which adds up until the end of the run.
    """
    started: dict[tuple[object, ...], RayRunner] = {}
    with contextlib.ExitStack() as stack:

        def runner(workload: str | Workload = "tiny.py", **asked: object) -> RayRunner:
            key = (workload, *sorted(asked.items()))
            if key not in started:
                settings = question(workload, tmp_path_factory.mktemp("fit"), **asked)
                started[key] = stack.enter_context(RayRunner(settings, ignore))
                started[key].survey()
            return started[key]

        yield runner
