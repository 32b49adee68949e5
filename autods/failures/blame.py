"""A failure that is the user's to mend, as the error that ends the fit."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import InputError
from ..outcomes import Failed

CONFIG = "DeepSpeed config"

_PLACE = re.compile(r"(/[^\n]*?\.py:\d+): ")


def input_error(failure: Failed, path: str, log: Path) -> InputError:
    """What was wrong and where: the workload at `path`, with the line where it is known, or the DeepSpeed config."""
    where = CONFIG if failure.action == "fix_config" else path
    said = failure.evidence
    if where == path and (place := _PLACE.match(said)):  # a line of the workload, or of a module that it imports
        where, said = place[1], said[place.end() :]
    seen = f"rank {failure.rank}, {failure.phase}; log: {log}"
    return InputError(said, where=where, mend=f"{failure.advice} ({seen})" if failure.advice else seen)
