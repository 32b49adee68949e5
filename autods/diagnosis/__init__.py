"""Diagnose failed runs and trials. No other package decides anything from the text of messages."""

from __future__ import annotations

from .diagnose import diagnose
from .trial_outcome import Evidence, HostMemory, explain_failure, make_input_error, wants_larger_batch
from .values import Diagnosis

__all__ = [
    "Diagnosis",
    "Evidence",
    "HostMemory",
    "diagnose",
    "explain_failure",
    "make_input_error",
    "wants_larger_batch",
]
