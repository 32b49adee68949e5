"""The simulated device: DeepSpeed's real engine on tensors without memory, in a separate process.

Only `client` may be imported by the rest of autods: it needs no torch. The other modules run inside the worker.
"""

from __future__ import annotations

from .client import ProcessSimulator, SimulatedEngine
from .protocol import SimulationFailed

__all__ = ["ProcessSimulator", "SimulatedEngine", "SimulationFailed"]
