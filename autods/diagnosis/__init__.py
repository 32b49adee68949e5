"""Diagnose failed runs and trials. No other package decides anything from the text of messages."""

from __future__ import annotations

from .diagnose import diagnose
from .values import Diagnosis

__all__ = ["Diagnosis", "diagnose"]
