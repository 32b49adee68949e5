"""`autods report` shows a finished fit or probe again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autods.cli.main import main
from autods.report import serialize
from autods.report.render_html import PAGE
from autods.runner.testing import surface
from tests.support.probes import LIMIT, MIB, Bench, ask, probed
from tests.support.reports import fitting_report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    serialize.write(fitting_report(str(tmp_path)), tmp_path)
    return tmp_path


def test_a_finished_fit_is_shown_and_its_page_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr()
    assert "Use zero3, micro batch 4" in shown.out
    assert f"page: {folder / 'report.html'}" in shown.err
    assert (folder / "report.html").stat().st_size > 1000


def test_a_report_is_shown_where_its_page_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / PAGE).mkdir()
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr()
    assert "Use zero3, micro batch 4" in shown.out
    assert f"no page: {folder / 'report.html'}: cannot be written" in shown.err


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", '"x"', "[1]", "null", str(10**30)])
def test_a_report_of_other_numbers_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    path = folder / "report.json"
    path.write_text(re.sub('"seconds": [0-9.]+', f'"seconds": {value}', path.read_text()))
    assert main(["report", str(folder)]) == 2
    assert "is not the report of a fit" in capsys.readouterr().err


def test_two_fits_stand_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--compare", str(folder)]) == 0
    assert "| samples/s | 41.7 | 41.7 |" in capsys.readouterr().out
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["rung"] == "zero3"


def test_a_folder_without_a_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "report.json: cannot be read: No such file or directory\n  give the folder" in capsys.readouterr().err


def test_a_probes_folder_shows_its_table_and_makes_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = probed(
        ask(tmp_path, "micro_batch=1,2"),
        Bench(surface(limit_bytes=LIMIT, state_bytes=100 * MIB, sample_bytes=100 * MIB)),
    )
    folder = Path(report.out)
    (folder / PAGE).unlink()
    assert main(["report", str(folder)]) == 0
    assert "fastest: cell" in capsys.readouterr().out
    assert "fastest: cell" in (folder / PAGE).read_text()
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "probe.json").read_text())


@pytest.mark.parametrize("option", [("--markdown",), ("--compare", "another")])
def test_what_is_for_fits_is_refused_for_a_probe(tmp_path: Path, option: tuple[str, ...]) -> None:
    (tmp_path / "probe.json").write_text("{}")
    assert main(["report", str(tmp_path), *option]) == 2
