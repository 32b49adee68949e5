from __future__ import annotations

from types import SimpleNamespace

import pytest

from autods.rank.training_run import session as sessions
from autods.rank.training_run.script import report_missing_session


@pytest.fixture
def engine(monkeypatch):
    """An engine that counts its steps, in rank 0 of a process that has no session."""
    monkeypatch.setattr(sessions, "_current", None)
    monkeypatch.setenv("RANK", "0")
    engine = SimpleNamespace(steps=0)

    def step():
        engine.steps += 1

    engine.step = step
    report_missing_session(engine)
    return engine


def test_a_script_without_a_session_hears_of_it_once(engine, capsys):
    for _ in range(3):
        engine.step()
    assert engine.steps == 3
    assert capsys.readouterr().err.count("calls no autods.session(engine)") == 1


def test_a_script_with_a_session_hears_nothing(engine, capsys):
    sessions.begin(SimpleNamespace())
    engine.step()
    assert engine.steps == 1
    assert capsys.readouterr().err == ""
