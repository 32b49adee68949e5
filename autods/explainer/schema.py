"""The config schema of the installed DeepSpeed: every key that it reads, with its default.

DeepSpeed has no list of its keys. Some sections are pydantic models, whose fields are read here. The others are read by
functions, so a dict that records every look-up is passed through `DeepSpeedConfig`. Nothing is trained or initialised.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import inspect
import json
import logging
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..config.deepspeed import get_key
from ..errors import EnvironmentBroken
from ..schema import read_as
from ..system.processes import ask_module

_UNSET: Any = object()
# Sections whose keys are the fields of a pydantic model: section → module and class.
_MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": (
        "deepspeed.runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
}
# Sections that hold the arguments of a class, which DeepSpeed looks up by name.
OPEN_SECTIONS = ("optimizer.params", "scheduler.params")
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key that DeepSpeed reads.

    `default` is None where a missing key means that nothing is set, and `has_default` is False where DeepSpeed does
    not say. `help` is DeepSpeed's own text. `replaced_by` names the key that replaces a deprecated one. `removed` is
    what DeepSpeed says when it refuses the key.
    """

    name: str
    default: Any = None
    has_default: bool = True
    help: str = ""
    deprecated: bool = False
    replaced_by: str = ""
    removed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What the installed DeepSpeed, of this version, says about a config.

    `keys` are all that it reads, by dotted name, such as 'zero_optimization.stage'. `strict` are the sections in which
    it refuses unknown keys. `complaints` are pairs of a dotted key and what DeepSpeed says against its value.
    `schedule_arguments` are those of the config's learning-rate schedule; None where DeepSpeed has none of that name.
    `has_optimizer` is False where neither DeepSpeed nor torch has the config's optimizer.
    """

    version: str
    keys: Mapping[str, Key]
    strict: tuple[str, ...] = ()
    complaints: tuple[tuple[str, str], ...] = ()
    schedule_arguments: tuple[str, ...] | None = None
    has_optimizer: bool = True

    @property
    def sections(self) -> frozenset[str]:
        """Names of keys that hold other keys."""
        return frozenset(name.rpartition(".")[0] for name in self.keys) - {""}

    def within(self, section: str) -> tuple[str, ...]:
        """The last parts of the names of all keys in a section; '' is the top."""
        return tuple(name.rpartition(".")[2] for name in self.keys if name.rpartition(".")[0] == section)


def read_schema(config: Mapping[str, Any]) -> Schema:
    """Ask the installed DeepSpeed about a config, in a process of its own; that takes some seconds.

    The import of DeepSpeed chooses a device for its whole process, which must not be the caller's.
    Raises EnvironmentBroken where DeepSpeed cannot be imported.
    """
    try:
        answer = ask_module(__name__, stdin=json.dumps(config), variables={"DS_ACCELERATOR": "cpu"}, limit_s=_LIMIT_S)
    except RuntimeError as error:
        raise EnvironmentBroken(
            f"DeepSpeed cannot be asked for its config schema: {error}\n  python -c 'import deepspeed'"
        ) from None
    return read_as(Schema, answer)


def main() -> None:
    """Answer for the config on standard input, with one line of JSON on standard output."""
    print(json.dumps(asdict(describe(json.load(sys.stdin)))))


def describe(config: Mapping[str, Any]) -> Schema:
    """What DeepSpeed, as this process imports it, says about a config."""
    import deepspeed

    return Schema(
        version=str(deepspeed.__version__),
        keys=_read_keys(),
        strict=tuple(_MODELS),
        complaints=tuple(complaint for section in _MODELS for complaint in _check_section(section, config)),
        schedule_arguments=_find_schedule_arguments(get_key(config, "scheduler.type")),
        has_optimizer=_has_optimizer(get_key(config, "optimizer.type")),
    )


def _read_keys() -> dict[str, Key]:
    keys: dict[str, Key] = {}
    defaults, removed = _record_lookups()
    for name, default in defaults.items():
        known = default is not _UNSET and not isinstance(default, Mapping)
        keys[name] = Key(
            name=name, default=default if known else None, has_default=known, removed=removed.get(name, "")
        )
    for section, (module, model) in _MODELS.items():
        keys.setdefault(section, Key(name=section, has_default=False))
        for key in _read_model(section, getattr(importlib.import_module(module), model)):
            keys[key.name] = key
    for section in OPEN_SECTIONS:
        keys[section] = Key(name=section, has_default=False)
    return keys


def _check_section(section: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, complaint) for each value of the section that DeepSpeed's model refuses, but unknown keys."""
    from pydantic import ValidationError

    values = get_key(config, section)
    if not isinstance(values, Mapping):
        return
    module, model = _MODELS[section]
    try:
        with _quiet():
            getattr(importlib.import_module(module), model)(**values)
    except ValidationError as refused:
        for error in refused.errors():
            if error["type"] != "extra_forbidden":
                place = ".".join(str(part) for part in error["loc"])
                yield (f"{section}.{place}" if place else section), error["msg"].removeprefix("Value error, ")
    except Exception as error:  # a check of the model's own, of any type
        yield section, str(error)


def _find_schedule_arguments(name: Any) -> tuple[str, ...] | None:
    """The arguments of a learning-rate schedule of DeepSpeed's, without the optimizer."""
    from deepspeed.runtime import lr_schedules

    if name not in lr_schedules.VALID_LR_SCHEDULES:
        return None
    return tuple(inspect.signature(getattr(lr_schedules, name)).parameters)[1:]


def _has_optimizer(name: Any) -> bool:
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    return name is None or str(name).lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, str(name))


class _Recorder(dict[str, Any]):
    """A config that notes each look-up in `seen`, with its default. It seems to hold the names in `present`."""

    def __init__(self, path: str, seen: dict[str, Any], present: frozenset[str]) -> None:
        super().__init__()
        self._path, self._seen, self._present = path, seen, present

    def _note(self, key: object, default: Any = _UNSET) -> str:
        name = f"{self._path}{key}"
        if self._seen.get(name, _UNSET) is _UNSET:
            self._seen[name] = default
        return name

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if self._note(key, default) in self._present else default

    def __contains__(self, key: object) -> bool:
        return self._note(key) in self._present

    def keys(self) -> Any:
        return self

    def __getitem__(self, key: str) -> Any:
        return _Recorder(f"{self._note(key)}.", self._seen, self._present)


def _look_up(*present: str) -> tuple[dict[str, Any], Exception | None]:
    """All look-ups of DeepSpeedConfig in a config that seems to hold these sections, and the error that ended it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: dict[str, Any] = {}
    try:
        with _quiet():
            DeepSpeedConfig(_Recorder("", seen, frozenset(present)))
    except Exception as error:  # a missing batch size at the end, or a value that no recorder can be
        return seen, error
    return seen, None


# DeepSpeedConfig reads this section without asking whether it is there.
_ALWAYS_READ = "data_efficiency"


def _record_lookups() -> tuple[dict[str, Any], dict[str, str]]:
    """Dotted key → default for all keys that are read by functions, `_UNSET` where a look-up has none.

    And key → DeepSpeed's message for each key that it refuses because it has removed the feature.
    """
    seen, _ = _look_up(_ALWAYS_READ)
    removed = {}
    for section in [name for name, default in seen.items() if default is _UNSET or default in (None, {})]:
        nested, error = _look_up(_ALWAYS_READ, section)
        seen |= {name: default for name, default in nested.items() if name.startswith(f"{section}.")}
        if error is not None and "has been removed" in str(error):
            removed[section] = str(error)
    return seen, removed


def _read_model(section: str, model: Any) -> Iterator[Key]:
    """The keys of a pydantic model of DeepSpeed's, under the names that a config uses."""
    texts = _field_texts(model)
    for field, info in model.model_fields.items():
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        default = info.get_default(call_default_factory=True)
        if isinstance(default, enum.Enum):
            default = default.value
        yield Key(
            name=f"{section}.{info.alias or field}",
            default=default if isinstance(default, bool | int | float | str | None) else None,
            help=texts.get(field, ""),
            deprecated=bool(extra.get("deprecated")),
            replaced_by=str(extra.get("new_param", "")),
        )


def _field_texts(model: Any) -> dict[str, str]:
    """Field → the text that stands below it in the class, as DeepSpeed documents its configs."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    except (OSError, SyntaxError):  # installed without sources
        return {}
    assert isinstance(body, ast.ClassDef)
    texts, last = {}, ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts[last] = " ".join(str(node.value.value).split())
            last = ""
    return texts


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed's log lines about the probed configs out of the answer."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()
