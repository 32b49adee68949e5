"""Unit tests run before integration tests; tests that need a GPU are skipped, with the reason, where there is none."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from autods.devices.cuda import read_nvml
from autods.forecast.stored_simulations import KEEPS

# Each test simulates what it is about; what another test or an earlier run has simulated does not answer.
os.environ[KEEPS] = "0"

# Started in the background of a script, we ignore Ctrl-C and would hand that on to the fits that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    integration = Path(__file__).parent / "integration"
    # Unit tests meet no Ray in their process. Files of many short tests come last, so that no worker waits at the end.
    items.sort(key=lambda item: (integration in item.path.parents, integration / "hostile" in item.path.parents))
    # NVML answers without torch, which takes seconds to import.
    if (
        any(item.get_closest_marker("gpu") for item in items)
        and not read_nvml(os.environ.get("CUDA_VISIBLE_DEVICES")).cards
    ):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and NVML shows none here"))


def pytest_collection_finish() -> None:
    """Leave the processors to the ranks: the test processes need one thread each, and no search for old garbage."""
    if torch := sys.modules.get("torch"):  # its threads would spin between the small steps of Optuna's Gaussian process
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # thousands of tests and whole packages stay until the end; each full collection would visit them
