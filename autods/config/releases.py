"""Faults of DeepSpeed's releases that no error shows: the rows of configs/deepspeed/faults.toml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from packaging.version import InvalidVersion, Version

from ..schema import read_toml_as
from ..system.host import data_folder, installed_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFault:
    """A fault of the releases from `since` to before `fixed`, under these ZeRO stages; without `precisions` in all."""

    since: str
    fixed: str
    stages: tuple[int, ...]
    precisions: tuple[str, ...] = ()
    effect: Literal["wrong", "sometimes wrong", "slow"]
    what: str
    source: str

    @property
    def remedy(self) -> str:
        return f"pip install 'deepspeed>={self.fixed}'"

    def describe(self, version: str) -> str:
        """What this release, which has the fault, does."""
        return f"DeepSpeed {version}: {self.what} ({self.source})"

    def concerns(self, stage: int, precision: str) -> bool:
        """Whether a config of this ZeRO stage and precision has it."""
        return stage in self.stages and (not self.precisions or precision in self.precisions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Faults:
    faults: tuple[ReleaseFault, ...]


@cache  # the file of an installation does not change while it runs
def _read() -> tuple[ReleaseFault, ...]:
    return read_toml_as(_Faults, data_folder("configs") / "deepspeed" / "faults.toml", name="list of faults").faults


def find_faults(version: str) -> tuple[ReleaseFault, ...]:
    """Return the faults of this release of DeepSpeed; none of a version that is no number."""
    try:
        known = Version(version)
    except InvalidVersion:
        return ()
    return tuple(fault for fault in _read() if Version(fault.since) <= known < Version(fault.fixed))


def find_wrong_stages(precision: str) -> dict[int, str]:
    """Map each ZeRO stage at which the installed release computes wrong gradients to what it does and what mends it."""
    version = _installed()
    faults = [fault for fault in find_faults(version) if fault.effect == "wrong"]
    return {
        stage: f"{fault.describe(version)}; {fault.remedy}"
        for fault in faults
        for stage in fault.stages
        if fault.concerns(stage, precision)
    }


@cache
def _installed() -> str:
    return installed_versions()["deepspeed"]
