"""A shell completes commands and options."""

from __future__ import annotations

import pytest

from autods.cli.main import main


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("autods pl", {"plan"}), ("autods do", {"doctor"}), ("autods fit --gp", {"--gpus", "--gpu-memory"})],
)
def test_a_shell_is_offered_what_fits(
    typed: str, offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_AUTODS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert set(capsys.readouterr().out.split()) == offered
