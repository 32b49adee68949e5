"""Unit tests run before integration tests; tests that need a GPU are skipped, with the reason, where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autods.hardware import visible_cards


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    integration = Path(__file__).parent / "integration"
    items.sort(key=lambda item: integration in item.path.parents)  # stable: the order within each stays
    # NVML answers without torch, which takes seconds to import.
    if any(item.get_closest_marker("gpu") for item in items) and not visible_cards(
        os.environ.get("CUDA_VISIBLE_DEVICES")
    ):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and NVML shows none here"))
