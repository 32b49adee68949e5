"""Results as values, as JSON, on the terminal and as pages. Nothing here runs a trial."""

from __future__ import annotations

from .results.fit import FitReport, Throughput
from .serialize import from_dict, read, to_dict, write, write_so_far

__all__ = ["FitReport", "Throughput", "from_dict", "read", "to_dict", "write", "write_so_far"]
