from __future__ import annotations

import pytest

from autods.explainer import explain as explainer
from autods.explainer.installed import describe


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that import DeepSpeed take seconds; the integration tests of `explain` have them."""
    monkeypatch.setattr(explainer, "ask_deepspeed", describe)
    monkeypatch.setattr(explainer, "find_refusals", lambda config, ranks: ())
