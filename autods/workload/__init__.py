"""What is trained: the user's code behind one protocol."""

from .hf_config import partitioned
from .model_py import check_file
from .source import bound, load, source_of
from .workload import Workload, WorkloadError

__all__ = ["Workload", "WorkloadError", "bound", "check_file", "load", "partitioned", "source_of"]
