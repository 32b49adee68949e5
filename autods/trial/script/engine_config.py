"""The DeepSpeed config of a script's engine: the trial's settings over the script's own."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...config.deepspeed import (
    BATCH_KEYS,
    DEFAULT_OPTIMIZER,
    enabled_half_precision,
    get_key,
    merge,
    strip_rung_keys,
    without_monitors,
)
from ...workload.script_source import has_placeholder
from ..exam import allow_gathering
from ..job import RankJob
from .user_errors import script_error

_ZERO = "zero_optimization"
_PRECISIONS = ("bf16", "fp16")
_ABSENT = object()


def stops_at_engine(job: RankJob) -> bool:
    """Whether the script runs up to the creation of its engine only."""
    return job.job == "survey" or job.only_build


class EngineConfig:
    """The config of a script that calls `deepspeed.initialize` itself.

    `file` is the content of the file that replaces `{ds_config}`. `given` is the config that a library took from the
    script before the engine, in the subclass for such libraries.
    """

    def __init__(self, job: RankJob) -> None:
        self.job = job
        self.given: Mapping[str, Any] | None = None
        self.file: dict[str, Any] = dict(self._trial)

    @property
    def _trial(self) -> dict[str, Any]:
        """The trial's config. The number of ranks may be another than the fit's: a survey runs with one."""
        return {**self.job.ds_config, BATCH_KEYS[0]: self.job.train_batch}

    def for_engine(self, config: Mapping[str, Any], *, has_optimizer: bool) -> dict[str, Any]:
        """The config that the engine gets for the one that the script gives it.

        `has_optimizer` tells that the script passes an optimizer object, so the config names none.
        """
        merged = without_monitors(self._merge(config))
        if has_optimizer:
            merged.pop("optimizer", None)
        return self._allow_gathering(merged)

    def own_part(self, config: Mapping[str, Any], *, from_file: bool) -> dict[str, Any]:
        """The part of the engine's config that is the script's own, not filled in through `{ds_config}`.

        Batch sizes that the script computes from its arguments belong to this run and are left out. The global batch
        size of a config file that the user wrote is kept.
        """
        filled_in = self.file if has_placeholder(self.job.source.argv, "ds_config") else {}
        base = self.job.source.base_config if isinstance(self.job.source.base_config, Mapping) else {}
        config = _subtract(self._scripts_own(config), filled_in, kept=base)
        kept = BATCH_KEYS[0] if from_file and not filled_in else None
        return {key: value for key, value in config.items() if key not in BATCH_KEYS or key == kept}

    def _merge(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The script's keys stay, except those that the rung and the batch decide."""
        return merge(strip_rung_keys(config), self._trial)

    def _scripts_own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config

    def _allow_gathering(self, config: dict[str, Any]) -> dict[str, Any]:
        return allow_gathering(config) if self.job.exam == "worst_case" else config


class LibraryConfig(EngineConfig):
    """The config of a script when a library calls the engine.

    Such a library reads the script's config early and completes it from the library's arguments. So the trial's config
    is put in its place there, and reaches the engine already completed. `convert` adapts the file to the library.
    """

    def __init__(self, job: RankJob, convert: Callable[[Mapping[str, Any]], dict[str, Any]] = dict) -> None:
        super().__init__(job)
        self.file = convert(self._requested)

    def replace(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The config for the library in place of the script's, which is remembered."""
        self.given = given
        return merge(strip_rung_keys(given), self._requested)

    @property
    def _requested(self) -> dict[str, Any]:
        """The trial's config, without the default optimizer until the survey knows whether the script makes one."""
        config = dict(self.job.ds_config)
        if stops_at_engine(self.job) and _is_default_optimizer(config.get("optimizer")):
            del config["optimizer"]
        return config

    def _merge(self, config: Mapping[str, Any]) -> dict[str, Any]:
        wanted, enabled = enabled_half_precision(self.job.ds_config), enabled_half_precision(config)
        if not stops_at_engine(self.job) and wanted != enabled:
            raise script_error(
                f"it trains in {enabled or 'fp32'}, and the trial needs {wanted or 'fp32'}",
                hint=f"set {wanted or 'fp32'} in its own arguments after --, or drop --precision",
            )
        return dict(config)

    def _scripts_own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config that the script gave, in the precision that the library chose."""
        given = self.given or {}
        others = {key: value for key, value in given.items() if key not in _PRECISIONS}
        enabled = [name for name in _PRECISIONS if get_key(config, f"{name}.enabled") is True]
        return others | {name: merge(get_key(given, name) or {}, {"enabled": True}) for name in enabled}


def read_config(given: Any) -> dict[str, Any] | None:
    """A copy of a config that is given as a dict, a path or base64; None when it is none of these."""
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    try:
        if Path(given).is_file():
            return dict(json.loads(Path(given).read_text()))
        return dict(json.loads(base64.urlsafe_b64decode(given).decode()))
    except (ValueError, TypeError, OSError):
        return None


def _is_default_optimizer(optimizer: Any) -> bool:
    """Whether it is the optimizer that autods uses when nobody names one."""
    if not isinstance(optimizer, Mapping):
        return False
    params = {key: value for key, value in dict(optimizer.get("params") or {}).items() if key != "torch_adam"}
    return optimizer.get("type") == DEFAULT_OPTIMIZER["type"] and params == DEFAULT_OPTIMIZER["params"]


def _subtract(config: Mapping[str, Any], filled_in: Mapping[str, Any], *, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the keys that are as they were filled in; keys in `kept` stay."""
    rest = {key: value for key, value in config.items() if key in kept or filled_in.get(key, _ABSENT) != value}
    if isinstance(zero := rest.get(_ZERO), Mapping) and _ZERO in filled_in:  # its keys are compared one by one
        rest[_ZERO] = _subtract(zero, filled_in[_ZERO], kept=kept.get(_ZERO) or {})
    return rest
