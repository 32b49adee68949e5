"""Every generator that a workload's code may draw from without being handed one."""

from __future__ import annotations

import random


def seed_all(seed: int) -> None:
    """Python's, torch's on every device, and NumPy's global generators."""
    import numpy
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
