"""Every unit test ends within seconds, and a warning fails it."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 10


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def garbage_of_integration_tests_is_gone() -> None:
    """They run before in the same process; what Python finds unclosed there later would fail a unit test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
