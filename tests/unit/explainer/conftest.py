from __future__ import annotations

import pytest

from autods.explainer import explain as explainer
from autods.explainer.installed import describe


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that imports DeepSpeed takes seconds; the integration tests of `explain` have it."""
    monkeypatch.setattr(explainer, "ask_deepspeed", describe)
