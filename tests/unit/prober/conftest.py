"""All probes of these tests share one session, because each one starts and ends a guard process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autods.runner.cleanup import open_session


@pytest.fixture(scope="package", autouse=True)
def _session() -> Iterator[None]:
    with open_session():
        yield
