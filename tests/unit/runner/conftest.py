"""These tests meet no token of a Ray cluster that the machine's user has, nor its mode."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def no_ray_token(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray looks for it in variables and in ~/.ray."""
    monkeypatch.setenv("HOME", str(empty_home))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
