"""What a fit found: as a value, as JSON, on the terminal. From values alone: nothing here runs a trial."""

from .files import from_dict, read, to_dict, write, write_so_far
from .result import Report, Throughput

__all__ = ["Report", "Throughput", "from_dict", "read", "to_dict", "write", "write_so_far"]
