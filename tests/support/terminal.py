"""What a report looks like on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from autods.report import FitReport
from autods.report.fit_view import print_fit


def shown(report: FitReport, width: int, *, verbose: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_fit(report, console, verbose=verbose)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
