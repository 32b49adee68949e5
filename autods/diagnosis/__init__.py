"""From evidence to a verdict. The only room that reads messages."""

from __future__ import annotations

from .diagnose import diagnose
from .trial_outcome import Evidence, HostMemory, from_end, input_error, outcome_of, wants_larger_batch
from .values import Diagnosis

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
