"""Workloads: the user's training code behind one protocol."""

from __future__ import annotations

from .load import bind_options, load, make_source
from .protocol import Workload, WorkloadError

__all__ = ["Workload", "WorkloadError", "bind_options", "load", "make_source"]
