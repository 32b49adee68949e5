"""Every unit test ends within seconds, and a warning fails it."""

from __future__ import annotations

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
