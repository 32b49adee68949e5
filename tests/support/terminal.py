"""What documents look like on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from autods.report import FitReport
from autods.report.answers.fit import make_fit_document
from autods.report.document import Document
from autods.report.render_terminal import print_document


def printed(document: Document, width: int, *, verbose: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_document(document, console, verbose=verbose)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(report: FitReport, width: int, *, verbose: bool = True) -> str:
    return printed(make_fit_document(report), width, verbose=verbose)
