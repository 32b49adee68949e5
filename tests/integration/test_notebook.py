"""The example notebook, executed by a real kernel on two CPU ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each code cell of the notebook shows."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "examples").symlink_to(ROOT / "examples")
    notebook = nbformat.read(ROOT / "examples" / "first_fit.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def texts(shown: list[dict[str, Any]]) -> str:
    return "".join(each["text"] for each in shown if each["output_type"] == "stream")


def pages(shown: list[dict[str, Any]]) -> list[str]:
    return [each["data"]["text/html"] for each in shown if "text/html" in each.get("data", {})]


def test_a_notebook_shows_lines_while_a_fit_works(outputs: list[list[dict[str, Any]]]) -> None:
    assert "zero1" in texts(outputs[1])
    assert "trial 1: " in texts(outputs[2])
    assert "fits: " in texts(outputs[2])
    assert re.search(r"^race, 2 of \d", texts(outputs[2]), re.MULTILINE)
    assert re.search(r"^certify, (\d) of \1: .*\d+ of about \d+.*, about .* left$", texts(outputs[2]), re.MULTILINE)


def test_a_notebook_shows_the_page_of_a_result(outputs: list[list[dict[str, Any]]]) -> None:
    assert [len(pages(outputs[cell])) for cell in (1, 2, 4)] == [1, 1, 1]
    (plan,) = pages(outputs[1])
    assert "zero3" in plan


def test_a_notebook_reads_the_config_of_its_fit(outputs: list[list[dict[str, Any]]]) -> None:
    (result,) = outputs[3]
    rung, micro_batch, stage = eval(result["data"]["text/plain"])
    assert rung in ("ddp", "zero1", "zero2", "zero3")
    assert micro_batch >= 1
    assert stage in (0, 1, 2, 3)
