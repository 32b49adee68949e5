"""Diagnose failed runs and trials. No other package decides anything from the text of messages."""

from __future__ import annotations

from .root_cause import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
