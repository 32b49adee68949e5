"""The documents for contributors name real files and functions, and no imports go in a circle."""

from __future__ import annotations

import ast
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("docs/architecture.md", "CONTRIBUTING.md")
_PLACE = re.compile(r"`(autods/[\w/]+\.py):([\w.]+)`")
_FILE = re.compile(r"`((?:autods|tests|configs|strategies|docs)/[\w/.-]*[\w/])`")


def places() -> list[tuple[str, str]]:
    """Every `autods/file.py:name` of the architecture document."""
    return _PLACE.findall((ROOT / "docs/architecture.md").read_text())


def names_in(path: Path) -> set[str]:
    """The functions, classes and methods (`Class.method`) that a file defines."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_the_document_names_functions() -> None:
    assert len(places()) > 20


def test_the_drawing_has_the_layers_of_the_linter() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in tool["contracts"] if contract["name"] == "imports go down only")
    checked = [set(re.findall(r"autods\.(\w+)", layer)) for layer in layers]
    drawing = (ROOT / "docs/architecture.md").read_text().split("```")[1].strip()
    drawn = [set(re.split(r" {3,}", line)[0].split(" │ ")) for line in drawing.splitlines()]
    assert drawn == [layer for layer in checked if layer != {"__main__"}]


@pytest.mark.parametrize(("file", "name"), places())
def test_each_named_function_exists(file: str, name: str) -> None:
    assert name in names_in(ROOT / file)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_named_file_exists(document: str) -> None:
    missing = [name for name in _FILE.findall((ROOT / document).read_text()) if not (ROOT / name).exists()]
    assert missing == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count, too."""
    graph = grimp.build_graph("autods", cache_dir=None)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
