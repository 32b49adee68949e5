"""From evidence to a verdict. The only room that reads messages."""

from .blame import input_error
from .diagnosis import Diagnosis
from .evidence import Evidence, HostMemory, from_end
from .oracle import diagnose
from .verdict import outcome_of, wants_larger_batch

__all__ = [
    "Diagnosis",
    "Evidence",
    "HostMemory",
    "diagnose",
    "from_end",
    "input_error",
    "outcome_of",
    "wants_larger_batch",
]
