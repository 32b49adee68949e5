"""What the installed DeepSpeed says about a config: the keys that it reads, their defaults, and its complaints.

Some sections are pydantic models, whose fields are read here. The keys that functions read stand in
`configs/deepspeed/keys.toml`; their defaults are constants of DeepSpeed. Nothing is trained or initialised.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, get_args

from ..config.deepspeed import get_key, read_known_keys
from ..config.key_rules import OPEN_SECTIONS
from ..config.problems import InstalledKeys
from ..errors import EnvironmentBroken
from ..schema import read_as
from ..system.processes import ask_module

# Sections whose keys are the fields of a pydantic model: section → module and class.
_MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "bfloat16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "hybrid_engine": ("deepspeed.runtime.config", "HybridEngineConfig"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "weight_quantization": ("deepspeed.inference.config", "WeightQuantConfig"),
    "timers.throughput": ("deepspeed.utils.config", "DeepSpeedThroughputTimerConfig"),
}
# Modules with a constant for each key of a section, and one of the same name and _DEFAULT. "" is the top.
_CONSTANTS = {
    "": "deepspeed.runtime.constants",
    "activation_checkpointing": "deepspeed.runtime.activation_checkpointing.config",
    "aio": "deepspeed.runtime.swap_tensor.constants",
    "checkpoint": "deepspeed.runtime.constants",
    "data_types": "deepspeed.runtime.constants",
    "flops_profiler": "deepspeed.profiling.constants",
}
_LIMIT_S = 300.0


def ask_deepspeed(config: Mapping[str, Any]) -> InstalledKeys:
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
    return read_as(InstalledKeys, answer)


def main() -> None:
    """Answer for the config on standard input, with one line of JSON on standard output."""
    print(json.dumps(asdict(describe(json.load(sys.stdin)))))


def describe(config: Mapping[str, Any]) -> InstalledKeys:
    """What DeepSpeed, as this process imports it, says about a config."""
    import deepspeed
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, get_pipeline_config
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    known = read_known_keys()
    roots = {section: getattr(importlib.import_module(module), name) for section, (module, name) in _MODELS.items()}
    models = dict(pair for section, model in roots.items() for pair in _walk_models(section, model))
    fields = [field for section, model in models.items() for field in _read_fields(section, model)]
    defaults: dict[str, Any] = dict.fromkeys((*known.top, *models, *OPEN_SECTIONS))
    for section, names in {"": known.top, **known.inside}.items():
        constants = _read_constants(_CONSTANTS[section]) if section in _CONSTANTS else {}
        defaults |= {f"{section}.{name}".lstrip("."): constants.get(name) for name in names}
    defaults |= {f"pipeline.{name}": default for name, default in get_pipeline_config({}).items()}
    return InstalledKeys(
        version=str(deepspeed.__version__),
        defaults=defaults | {name: default for name, default, _ in fields},
        strict=tuple(section for section, model in models.items() if model.model_config.get("extra") == "forbid"),
        replaced={name: successor for name, _, successor in fields if successor is not None},
        complaints=(
            *_find_removed(config),
            *(each for root in roots.items() for each in _check_section(*root, config)),
        ),
        schedule_arguments=_find_schedule_arguments(get_key(config, "scheduler.type")),
        has_optimizer=_has_optimizer(get_key(config, "optimizer.type")),
        optimizers=tuple(DEEPSPEED_OPTIMIZERS),
        schedules=tuple(VALID_LR_SCHEDULES),
    )


def _read_constants(module: str) -> dict[str, Any]:
    """Key → default, from pairs of constants such as AIO_QUEUE_DEPTH and AIO_QUEUE_DEPTH_DEFAULT."""
    constants = vars(importlib.import_module(module))
    pairs = [(constants.get(name.removesuffix("_DEFAULT")), name) for name in constants if name.endswith("_DEFAULT")]
    return {key: _as_json(constants[name]) for key, name in pairs if isinstance(key, str)}


def _as_json(default: Any) -> bool | int | float | str | None:
    default = getattr(default, "value", default)  # of an enum
    return default if isinstance(default, bool | int | float | str) else None


def _walk_models(section: str, model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (section, model) for a pydantic model of DeepSpeed's, and for those in its fields."""
    from pydantic import BaseModel

    yield section, model
    for name, field in model.model_fields.items():
        for part in (field.annotation, *get_args(field.annotation)):
            for spelling in dict.fromkeys((field.alias or name, name)):
                if inspect.isclass(part) and issubclass(part, BaseModel):
                    yield from _walk_models(f"{section}.{spelling}", part)


def _read_fields(section: str, model: Any) -> Iterator[tuple[str, Any, str | None]]:
    """Yield (dotted key, default, successor) for each field under both of its names. Only deprecated keys have one."""
    for name, field in model.model_fields.items():
        default = _as_json(field.get_default(call_default_factory=True))
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        successor = str(extra.get("new_param", "")) if extra.get("deprecated") else None
        for spelling in {field.alias or name, name}:
            yield f"{section}.{spelling}", default, successor


def _check_section(section: str, model: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, complaint) for each value of the section that DeepSpeed's model refuses, but unknown keys."""
    from pydantic import ValidationError

    values = get_key(config, section)
    holder, _, last = section.rpartition(".")
    holding = get_key(config, holder) if holder else None
    if isinstance(holding, Mapping) and last in holding and not isinstance(values, Mapping):
        yield section, "Input should be a valid dictionary"
    if not isinstance(values, Mapping) or (section == "bfloat16" and "bf16" in config):  # the old name is not read then
        return
    try:
        model(**values)
    except ValidationError as refused:
        for error in refused.errors():
            if error["type"] != "extra_forbidden":
                said = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
                yield ".".join(map(str, (section, *error["loc"]))), said
    except Exception as error:  # a check of the model's own, of any type
        yield section, str(error)


def _find_removed(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, DeepSpeed's first sentence about it) for each key whose feature DeepSpeed has removed."""
    from deepspeed.runtime import config as module
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig

    words = {word for text in map(inspect.getsource, (module, constants)) for word in re.findall(r"\w+", text)}
    for key, value in config.items():
        if key not in words:  # DeepSpeed says nothing of a key that it does not name
            continue
        try:
            DeepSpeedConfig({key: value})
        except Exception as error:  # mostly that a batch size is missing
            if "has been removed" in str(error):
                inside = re.search(rf"'({re.escape(key)}\.\w+)'", str(error))
                yield inside[1] if inside else key, str(error).split(". ")[0].rstrip(".")


def _find_schedule_arguments(name: Any) -> tuple[str, ...] | None:
    """The arguments of a learning-rate schedule of DeepSpeed's or torch's, without the optimizer."""
    from deepspeed.runtime import lr_schedules
    from torch.optim import lr_scheduler

    if name in lr_schedules.VALID_LR_SCHEDULES:
        schedule = getattr(lr_schedules, name)
    else:
        schedule = getattr(lr_scheduler, str(name), None)
        if not (inspect.isclass(schedule) and issubclass(schedule, lr_scheduler.LRScheduler)):
            return None
    return tuple(inspect.signature(schedule).parameters)[1:]


def _has_optimizer(name: Any) -> bool:
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    return name is None or str(name).lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, str(name))


if __name__ == "__main__":
    main()
