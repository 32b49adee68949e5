"""The DeepSpeed config of a script's engine: the chosen settings over the script's own."""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...config.deepspeed import (
    BATCH_KEYS,
    enabled_half_precision,
    get_key,
    is_default_optimizer,
    merge,
    strip_rung_keys,
)
from ...workload.script_source import has_placeholder
from ..job import RankJob
from .user_errors import script_error

_ZERO = "zero_optimization"
_PRECISIONS = ("bf16", "fp16")
_ABSENT = object()


class EngineConfig:
    """The config of a script that calls `deepspeed.initialize` itself.

    `file` is the content of the file that replaces `{ds_config}`. `given` is the config that a library took from the
    script before the engine; None without a library.
    """

    def __init__(self, job: RankJob) -> None:
        self.job = job
        self.given: Mapping[str, Any] | None = None
        # The number of ranks may be another than the fit's: a survey runs with one.
        total = {BATCH_KEYS[0]: job.train_batch} if BATCH_KEYS[0] in job.ds_config else {}  # AutoTP gets none
        self.chosen: dict[str, Any] = {**job.ds_config, **total}
        self.file: dict[str, Any] = dict(self.chosen)

    def for_engine(self, config: Mapping[str, Any], *, has_optimizer: bool) -> dict[str, Any]:
        """The config that the engine gets for the one that the script gives it.

        `has_optimizer` tells that the script passes an optimizer object, so the config names none.
        """
        completed = self._complete(config)
        if has_optimizer:
            completed.pop("optimizer", None)
        return completed

    def for_frozen_model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config of an engine that has nothing to train."""
        return dict(config)

    def own_part(self, config: Mapping[str, Any], *, from_file: bool) -> dict[str, Any]:
        """The part of the engine's config that is the script's own, not filled in through `{ds_config}`.

        Batch sizes that the script computes from its arguments belong to this run and are left out. The global batch
        size of a config file that the user wrote is kept, or else the two sizes that imply it.
        """
        if self.given is not None:  # the library chooses the precision
            enabled = [name for name in _PRECISIONS if get_key(config, f"{name}.enabled") is True]
            precision = {name: merge(get_key(self.given, name) or {}, {"enabled": True}) for name in enabled}
            config = {key: value for key, value in self.given.items() if key not in _PRECISIONS} | precision
        filled_in = self._filled_in()
        base = self.job.source.base_config if isinstance(self.job.source.base_config, Mapping) else {}
        config = _subtract(config, filled_in, kept=base)
        is_users = from_file and not filled_in
        dropped = BATCH_KEYS if not is_users else BATCH_KEYS[1:] if BATCH_KEYS[0] in config else ()
        return {key: value for key, value in config.items() if key not in dropped}

    def comes_filled_in(self, config: Mapping[str, Any]) -> bool:
        """Whether a config in the script's code has the rung and the batch of the file that replaces `{ds_config}`.

        Many scripts read the file themselves and pass what it holds.
        """
        filled_in = self._filled_in()
        return bool(filled_in) and merge(config, _rung_part(filled_in)) == config

    def _filled_in(self) -> Mapping[str, Any]:
        """What the script can have read from the file that replaces `{ds_config}`."""
        return self.file if has_placeholder(self.job.source.argv, "ds_config") else {}

    def _complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The script's keys stay, except those that the rung and the batch decide."""
        return merge(strip_rung_keys(config), self.chosen)


class LibraryConfig(EngineConfig):
    """The config of a script when a library calls the engine.

    Such a library reads the script's config early and completes it from the library's arguments. So the chosen config
    is put in its place there, and reaches the engine already completed. `convert` adapts the file to the library.
    """

    def __init__(self, job: RankJob, convert: Callable[[Mapping[str, Any]], dict[str, Any]] = dict) -> None:
        super().__init__(job)
        self.given = {}
        if job.stops_at_engine and is_default_optimizer(self.chosen.get("optimizer")):
            del self.chosen["optimizer"]  # until the survey knows whether the script makes one
        self.file = convert(self.chosen)

    def replace(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The config for the library in place of the script's, which is remembered."""
        self.given = given
        return merge(strip_rung_keys(given), self.chosen)

    def for_frozen_model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Stages 1 and 2 need an optimizer: the script's own stage 3 takes their place, or none."""
        if get_key(config, f"{_ZERO}.stage") not in (1, 2):
            return dict(config)
        own = get_key(self.given or {}, _ZERO) or {}
        kept = {key: value for key, value in own.items() if value != "auto"} if own.get("stage") == 3 else {"stage": 0}
        return {**config, _ZERO: kept}

    def _complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        wanted, enabled = enabled_half_precision(self.job.ds_config), enabled_half_precision(config)
        if not self.job.stops_at_engine and wanted != enabled:
            raise script_error(
                f"it trains in {enabled or 'fp32'}, and its config needs {wanted or 'fp32'}",
                hint=f"set {wanted or 'fp32'} in its own arguments after --, or drop --precision",
            )
        return dict(config)


def read_config(given: Any, parse: Callable[[str], Any] = json.loads) -> dict[str, Any] | None:
    """A copy of a config that is given as a dict, a path, JSON or base64; None when it is none of these.

    The copy has dicts and lists alone, as JSON has: those of a script may be OmegaConf's. DeepSpeed itself reads files
    by hjson, which takes comments; `parse` is that of the library that reads this config.
    """
    try:
        if not isinstance(given, Mapping):
            given = parse(_read_text(given))
        return {key: _copy_plainly(value) for key, value in given.items()}
    except (ValueError, TypeError, AttributeError, OSError):
        return None


def _read_text(given: Any) -> str:
    if os.path.isfile(given):  # False for a text that is too long for a path
        return Path(given).read_text()
    return str(given) if str(given).lstrip().startswith("{") else base64.urlsafe_b64decode(given).decode()


def _copy_plainly(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy_plainly(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_copy_plainly(inner) for inner in value]
    return copy.deepcopy(value)


def _rung_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config that the rung and the batch decide."""
    return _subtract(config, strip_rung_keys(config), kept={})


def _subtract(config: Mapping[str, Any], filled_in: Mapping[str, Any], *, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the keys that are as they were filled in; keys in `kept` stay."""
    rest = {key: value for key, value in config.items() if key in kept or filled_in.get(key, _ABSENT) != value}
    if isinstance(zero := rest.get(_ZERO), Mapping) and _ZERO in filled_in:  # its keys are compared one by one
        rest[_ZERO] = _subtract(zero, filled_in[_ZERO], kept=kept.get(_ZERO) or {})
    return rest
