"""Every unit test ends, and a warning fails it."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 60  # on a loaded machine; on a quiet one each takes seconds at most


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
