"""Results as values, as JSON and on the terminal. Nothing here runs a trial."""

from __future__ import annotations

from .results import Report, Throughput
from .serialize import from_dict, read, to_dict, write, write_so_far

__all__ = ["Report", "Throughput", "from_dict", "read", "to_dict", "write", "write_so_far"]
