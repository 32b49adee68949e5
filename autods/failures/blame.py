"""A failure that is the user's to mend, as the error that ends the fit."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ..outcomes import Failed

CONFIG = "DeepSpeed config"


def input_error(failure: Failed, path: str, log: Path) -> InputError:
    """What was wrong and where: the workload at `path`, with the line where it is known, or the DeepSpeed config."""
    where = CONFIG if failure.action == "fix_config" else path
    said = failure.evidence
    if said.startswith(f"{where}:"):
        line, _, rest = said.removeprefix(f"{where}:").partition(": ")
        if line.isdigit():
            where, said = f"{where}:{line}", rest
    seen = f"rank {failure.rank}, {failure.phase}; log: {log}"
    return InputError(said, where=where, mend=f"{failure.advice} ({seen})" if failure.advice else seen)
