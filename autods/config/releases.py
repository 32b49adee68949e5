"""How DeepSpeed's releases differ: faults that no error shows, removed keys, changed defaults."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from ..schema import read_toml_as
from ..system.host import data_folder, installed_versions
from ..types import Scalar
from .catalogue import Site
from .deepspeed import get_key, merge, nest_key, precision_name, read_known_keys
from .rungs import Rung

_REMOVAL = Version("0.19.8")  # DeepSpeed #8489


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFault:
    """A fault of the releases from `since` to before `fixed`, under these ZeRO stages; without `precisions` in all.

    Without `fixed` every later release has it. `below` maps a dotted key to the value below which a config has it,
    `switches` are keys that bring it where they are true. One that is `mended` is not in the ranks of autods.
    """

    since: str
    fixed: str | None = None
    stages: tuple[int, ...]
    precisions: tuple[str, ...] = ()
    below: Mapping[str, float] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    effect: Literal["wrong", "sometimes wrong", "slow"]
    symptom: str
    source: str
    mended: bool = False

    @property
    def remedy(self) -> str:
        if self.fixed is not None:
            return f"pip install 'deepspeed>={self.fixed}'"
        left = (f"leave {key} at {value:g}" for key, value in self.below.items())
        remedy = "; ".join((*left, *(f"leave {key} out" for key in self.switches)))
        return f"{remedy}, or train by autods run, which mends it" if self.mended else remedy

    @property
    def key(self) -> str:
        """The key of a config that brings the fault."""
        return next(iter((*self.below, *self.switches)), "zero_optimization.stage")

    @property
    def is_by_stage(self) -> bool:
        """Whether every config of its stages has it, whatever else it says."""
        return not (self.below or self.switches)

    def describe(self, version: str) -> str:
        """What this release, which has the fault, does."""
        return f"DeepSpeed {version}: {self.symptom} ({self.source})"

    def concerns(self, stage: int, precision: str, config: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Whether a config of this ZeRO stage and precision has it."""
        if stage not in self.stages or (self.precisions and precision not in self.precisions):
            return False
        if not all(get_key(config, key) is True for key in self.switches):
            return False
        values = ((get_key(config, key), least) for key, least in self.below.items())
        return all(isinstance(value, int | float) and value < least for value, least in values)


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
    faults = (fault for fault in _read() if Version(fault.since) <= known)
    return tuple(fault for fault in faults if fault.fixed is None or known < Version(fault.fixed))


def find_tolerated(ladder: Iterable[Rung], precision: str, base: Mapping[str, Any]) -> tuple[ReleaseFault, ...]:
    """What the installed release does slowly or sometimes wrong on rungs of this ladder; they are not left out.

    They train with the keys of the user's config `base`, too.
    """
    configs, faults = [(rung.stage, merge(base, rung.ds_config)) for rung in ladder], find_faults(_installed())
    return tuple(
        fault
        for fault in faults
        if fault.effect != "wrong" and any(fault.concerns(stage, precision, config) for stage, config in configs)
    )


def find_mended(config: Mapping[str, Any]) -> tuple[ReleaseFault, ...]:
    """Return the faults of the installed release that this config has outside the ranks of autods."""
    stage, precision = get_key(config, "zero_optimization.stage") or 0, precision_name(config)
    faults = (fault for fault in find_faults(_installed()) if fault.mended)
    return tuple(fault for fault in faults if fault.concerns(stage, precision, config))


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


def set_precision(site: Site, precision: str) -> Site:
    """Return the site with ranks that train in this precision, which decides the stages that go wrong."""
    return replace(site, precision=precision, wrong_stages=find_wrong_stages(precision))


def find_removed_keys() -> Mapping[str, str]:
    """Map each dotted key that the installed release refuses, because the feature is gone, to what to do instead."""
    try:
        return read_known_keys().removed if Version(_installed()) >= _REMOVAL else {}
    except InvalidVersion:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedDefault:
    """The default of a dotted key of the config, by the first release that has it."""

    key: str
    values: Mapping[str, Scalar]
    source: str

    def read(self, version: Version) -> Scalar | None:
        """Return the default of this release; None for one before all."""
        known = [release for release in self.values if Version(release) <= version]
        return self.values[max(known, key=Version)] if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    defaults: tuple[ChangedDefault, ...]


def name_defaults(config: Mapping[str, Any], *, without: Container[str] = ()) -> dict[str, Any]:
    """Return the config with the installed release's defaults of keys whose default has changed, except `without`.

    A key that the config has stays, and so does a section that it lacks.
    """
    path, named = data_folder("configs") / "deepspeed" / "defaults.toml", dict(config)
    with suppress(InvalidVersion):
        version = Version(_installed())
        for row in read_toml_as(_Defaults, path, name="list of defaults").defaults:
            section, _, name = row.key.rpartition(".")
            holder = get_key(named, section) if section else named
            if row.key in without or not isinstance(holder, Mapping) or name in holder:
                continue
            if (value := row.read(version)) is not None:
                named = merge(named, nest_key(row.key, value))
    return named


@cache
def _installed() -> str:
    return installed_versions()["deepspeed"]
