"""What a rank says of an exception."""

from __future__ import annotations

from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from autods.rank.record import describe_error


def compile_at(path: Path, source: str) -> CodeType:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return compile(source, str(path), "exec")


def raise_through(script: Path, module: Path, name: str) -> str | None:
    """The line that is named when a script calls a module of that name, which raises in its second line."""
    called: dict[str, Any] = {"__name__": name}
    exec(compile_at(module, "def read():\n    {}['steps']\n"), called)
    with pytest.raises(KeyError) as raised:
        exec(compile_at(script, "\n\nread()\n"), {"__name__": "__main__", "read": called["read"]})
    return describe_error(raised.value.with_traceback(raised.tb.tb_next), str(script)).user_frame


@pytest.mark.parametrize(
    ("module", "name", "shown"),
    [
        ("project/data/text.py", "data.text", "project/data/text.py:2"),
        ("venv/lib/python3.11/site-packages/yaml/nodes.py", "yaml.nodes", "project/train.py:3"),
        ("checkouts/DeepSpeed/deepspeed/engine.py", "deepspeed.engine", "project/train.py:3"),
    ],
    ids=["a module of the user's", "an installed one", "a checkout of a library"],
)
def test_an_error_has_the_innermost_line_of_the_users(tmp_path: Path, module: str, name: str, shown: str) -> None:
    assert raise_through(tmp_path / "project" / "train.py", tmp_path / module, name) == str(tmp_path / shown)


def test_an_error_outside_the_workload_has_no_line(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as raised:
        exec(compile_at(tmp_path / "other.py", "{}['x']\n"), {"__name__": "other"})
    assert describe_error(raised.value, str(tmp_path / "train.py")).user_frame is None
