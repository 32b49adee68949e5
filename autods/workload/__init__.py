"""What is trained: the user's code behind one protocol."""

from __future__ import annotations

from .hf_config import partitioned
from .load import bound, load, source_of
from .model_py import check_file
from .protocol import Workload, WorkloadError

__all__ = ["Workload", "WorkloadError", "bound", "check_file", "load", "partitioned", "source_of"]
