"""Draw what a finished fit shows on a terminal: python docs/picture.py autods-out/demo docs/fit.svg"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from autods.report import serialize
from autods.report.fit_view import print_fit

_COLUMNS = 100


def main(folder: Path, picture: Path) -> None:
    """Write the answer of the fit in `folder` as an SVG file without any request to another place."""
    console = Console(record=True, file=io.StringIO(), width=_COLUMNS, force_terminal=True, color_system="truecolor")
    print_fit(serialize.read(folder), console)
    svg = console.export_svg(title="autods fit examples/gpt.py")
    # Rich names web fonts; the reader's own monospace font does.
    start, _, rest = svg.partition("@font-face")
    while rest:
        svg = start + rest.partition("}")[2]
        start, _, rest = svg.partition("@font-face")
    picture.write_text(svg)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
