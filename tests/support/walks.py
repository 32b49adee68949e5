"""Rungs, settings and outcomes for walks of a scripted machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autods.config.catalogue import describe_this_machine
from autods.config.profiles import read_profile
from autods.config.rungs import list_ladder, read_rungs, select_rungs
from autods.config.settings import Settings
from autods.runner.testing import failed, fit, out_of_memory
from autods.types import ModelFacts, Steps, WorkloadSource
from tests.support.machines import a_machine

FACTS = ModelFacts(
    parameters=32_000_000, largest_parameter=1_000_000, checkpointing=True, tokens_per_sample=64, has_optimizer=False
)


SETTINGS = Settings(
    source=WorkloadSource(kind="file", path="/model.py", name="model", digest="0"),
    gpus=2,
    device="cpu",
    device_bytes=416 * 2**20,
    device_bytes_asked=True,
    out=Path("out"),
    profile=read_profile("default"),
    ladder=select_rungs(list_ladder(read_rungs()), read_rungs()),
    hardware=a_machine(0),
    machine=describe_this_machine((), a_machine(0)),
    # Scripted trials and surfaces have the rate and memory of one micro batch.
    base={"bf16": {"enabled": True}, "gradient_accumulation_steps": 1},
    nvme_path=Path("/scratch"),
)


STEPS = Steps()


FITS = fit(peak_bytes=1)


OOM = out_of_memory(missing_bytes=2**20)


TOO_SMALL = replace(failed(action="fix_code", evidence="Expected more than 1 value"), wants_larger_batch=True)
