"""What README and docs hold: their code blocks, the commands in them, and the scripts that write parts of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each code block of a page."""
    yield from BLOCK.findall(page.read_text())


def commands() -> Iterator[tuple[str, str]]:
    """(page, command line) for each autods command, in blocks and in running text."""
    for page in PAGES:
        text = page.read_text()
        lines = [line for language, block in blocks(page) if language != "python" for line in block.splitlines()]
        lines += re.findall(r"`((?:\.venv/bin/)?autods [a-z]+ [^`]+)`", re.sub(r"\s*\n\s*", " ", BLOCK.sub("", text)))
        for line in lines:
            line = re.sub(r"\s+#.*", "", line).strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if line.startswith("autods ") and not re.search(
                r"…|COMMAND|\b(?:DIR|FOLDER)\b|\[OPTIONS\]|WORKLOAD|CONFIG", line
            ):
                yield page.name, line


def load_script(name: str) -> Any:
    """The module docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
